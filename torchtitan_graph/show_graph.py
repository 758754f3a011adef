"""Show the graph of a configuration, without training.

python -m torchtitan_graph.show_graph --job.config_file my.toml

What train.py takes is taken here as well; NGPU=64 in front shows one rank of 64. Nothing is allocated or sent. Each
line has the value's dtype and shape, phase, module, line of source, and after | what is held while it runs.
"""

import argparse
import collections
import dataclasses
import difflib
import fnmatch
import functools
import html
import math
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from torchtitan_graph.analysis.liveness import takes_memory
from torchtitan_graph.analysis.measured import find_trace
from torchtitan_graph.command import check_result, command, make_parser, run_command, write_result
from torchtitan_graph.compiler import PassPlan, passes
from torchtitan_graph.config import JobConfig, read_beside
from torchtitan_graph.errors import UserError
from torchtitan_graph.formats.show import without_bytes
from torchtitan_graph.models.layers.adapt import beginnings
from torchtitan_graph.plan.ranks import dry_rank, load_dry
from torchtitan_graph.small_files import read_text
from torchtitan_graph.steps import build_graphs
from torchtitan_graph.steps.choices import plan_extra
from torchtitan_graph.steps.table import DEPTH, step_table

MAX_BYTES = 2**30  # of a graph's text; one of 150,000 nodes has about 40 MB
_CALL = re.compile(r"    \w+ = ([\w.]+)")
_MARKS = re.compile(r"(.*?) ?(forward|backward)(?: (?!\w+='|at |in )(\S+))?")  # value, phase, module
_HELD = re.compile(r"\d{1,12}\.\d{3} MiB")
_VALUE = re.compile(r"(\w{1,20})\[(\d{1,15}(?:, \d{1,15}){0,15}|)\]")
_WIDTHS = {name: dtype.itemsize for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}


class Line(NamedTuple):
    """A node of a graph, from its line in a dump."""

    text: str
    operator: str
    phase: str
    module: str
    num_bytes: int
    held: float


def read_lines(text: str) -> list[Line]:
    return [line for line in map(_read_line, text.splitlines()) if line is not None]


def _read_line(text: str) -> Line | None:
    """Return a line of a dump as a node; None if it is not a node's. A line is untrusted, and may be long."""
    call, _, words = text.partition("  # ")
    words, _, held = words.rpartition(" | ")
    called, marks = _CALL.match(call), _MARKS.match(words)
    if called is None or marks is None or not _HELD.fullmatch(held):
        return None
    operator = called[1] if "." in called[1] else "getitem"
    size = _size(marks[1]) if _takes_memory(operator) else 0
    return Line(text.strip(), operator, marks[2], marks[3] or "", size, float(held.removesuffix(" MiB")))


def _size(value: str) -> int:
    return sum(
        _WIDTHS.get(dtype, 0) * math.prod(int(size) for size in sizes.split(",") if size.strip())
        for dtype, sizes in _VALUE.findall(value)
    )


@functools.cache
def _takes_memory(operator: str) -> bool:
    """Return whether a node's value has a storage of its own: a view has none, and parts of a tuple have the
    tuple's."""
    if operator == "getitem":
        return False
    try:
        return takes_memory(functools.reduce(getattr, operator.split("."), torch.ops))
    except (AttributeError, RuntimeError):  # a Python function, or of a library that is not imported here
        return True


def statistics(lines: Iterable[Line]) -> list[str]:
    """Return tables of nodes and their values' bytes, by operator, and by the module's first two names."""
    tables = []
    keys = {"operator": lambda line: line.operator, "module": lambda line: ".".join(line.module.split(".")[:2])}
    lines = list(lines)
    for title, key in keys.items():
        count, size = collections.Counter(map(key, lines)), collections.Counter[str]()
        for line in lines:
            size[key(line)] += line.num_bytes
        tables += [f"{title:60} {'nodes':>7} {'MiB taken':>15}"]
        tables += [
            f"{name or '(outside any)':60} {count[name]:7} {size[name] / 2**20:15.3f}" for name, _ in size.most_common()
        ]
        tables += [""]
    return tables


def timeline(lines: Sequence[Line], title: str) -> str:
    """Return an SVG picture of held memory, node by node, with the peak marked and named."""
    width, height, peak = 1000, 300, max(lines, key=lambda line: line.held)
    x, y = width / max(1, len(lines) - 1), (height - 60) / max(peak.held, 1e-9)
    points = " ".join(f"{i * x:.1f},{height - line.held * y:.1f}" for i, line in enumerate(lines))
    where = lines.index(peak) * x
    turn = next((i for i, line in enumerate(lines) if line.phase == "backward"), len(lines)) * x
    words = html.escape(
        f"{title}: {peak.held:.3f} MiB at its peak, {peak.text.split('  # ')[0]} in {peak.module or 'no module'}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    return f"""{head}
<rect width="{width}" height="{height}" fill="white"/>
<polygon points="0,{height} {points} {width},{height}" fill="#9ecae1"/>
<line x1="{turn:.1f}" y1="30" x2="{turn:.1f}" y2="{height}" stroke="#888" stroke-dasharray="4"/>
<text x="{min(turn + 4, width - 70):.1f}" y="42" fill="#555">backward</text>
<circle cx="{where:.1f}" cy="60" r="4" fill="#d62728"/>
<text x="4" y="18">{words}</text>
</svg>
"""


def check_name(name: str, names: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Check that `name` is a pass; `traced` is before any."""
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        parser.error(f"{name}: legal are {', '.join(names)}{f'; did you mean {near[0]}?' if near else ''}")
    return name


def find_graph(folder: Path, name: str, parser: argparse.ArgumentParser) -> Path:
    """Return the file of the graph after a pass."""
    paths = sorted(folder.glob("*.py"))
    names = [path.stem.partition("_")[2] for path in paths]
    return paths[names.index(check_name(name, names, parser))]


def read(path: Path) -> str:
    """Return a graph's text.

    Raises:
        UserError: it can't be read.
    """
    try:
        return read_text(path, MAX_BYTES)
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror or error})") from error


def passes_of(config: JobConfig) -> list[str]:
    """Return the names of the graphs that a configuration's dry run can write; a stage's code is generated after
    partitioning."""
    is_cut = config.parallelism.pipeline_parallel_degree > 1
    ordered = [each for each in passes(PassPlan({}, (), ()), plan_extra(config.compile)) if not (is_cut and each.cut)]
    return ["traced", *(each.name for each in ordered if each.name not in config.compile.disable_passes)]


def build(words: Sequence[str], folder: Path, wanted: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Build the graphs of a configuration, and write those after the wanted passes, or the last.

    Raises:
        UserError: as a run of that configuration.
    """
    with dry_rank(load_dry([*words, "--debug.dump_graphs", "--job.dump_folder", str(folder)])) as blueprint:
        names = passes_of(blueprint.config)
        chosen = [check_name(name, names, parser) for name in wanted] or names[-1:]
        blueprint.options = dataclasses.replace(blueprint.options, dump_only=chosen, eval_rows=None)
        blueprint.dry_run()


def table(words: Sequence[str], by: str, depth: int, profile: Path | None) -> list[str]:
    """Return a table of the FLOPs, bytes and time of modules or functions, forward and backward side by side.

    With a run's folder as the profile, its configuration is used too, unless `words` name another file.

    Raises:
        UserError: as a run of that configuration; or the profile is of another.
    """
    names = {word.partition("=")[0].replace("-", "_") for word in words}
    if profile is not None and profile.is_dir() and "__job.config_file" not in names:
        words = ["--job.config_file", str(profile), *words]
    with dry_rank(load_dry([*words, "--compile.record_call_hierarchy"])) as blueprint:
        of_rank = (blueprint.config.comm.fake_rank, blueprint.dims.num_ranks)
        trace = find_trace(profile, *of_rank) if profile is not None else None
        # A profiled graph has run: its norms are this machine's.
        target = blueprint.target if trace is None else dataclasses.replace(blueprint.target, fused_norms=False)
        blueprint.options = dataclasses.replace(blueprint.options, eval_rows=None, target=target)
        graphs = build_graphs(blueprint.assembly)
        return step_table(blueprint.assembly, graphs, by=by, depth=depth, trace=trace)


def own_options() -> argparse.ArgumentParser:
    """Return the parser of the options that training doesn't have."""
    parser = make_parser(__doc__, allow_abbrev=False)
    parser.add_argument("--graphs", type=Path, help="show those that a run with debug.dump_graphs wrote to this folder")
    parser.add_argument("--stage", type=int, help="of a pipeline (default the rank's first)")
    parser.add_argument("--after", help="the pass after which to show it; traced: before any (default the last)")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="what changed from after pass A to after pass B")
    parser.add_argument("--module", default="*", help="only nodes of such modules, and of all inside, as layers.0")
    parser.add_argument("--phase", choices=("forward", "backward"), help="only nodes of it")
    parser.add_argument("--op", default="*", help="only such operators, as 'aten.mm.*'")
    parser.add_argument(
        "--statistics", action="store_true", help="count nodes and the bytes they take by operator and by module"
    )
    parser.add_argument("--timeline", type=Path, metavar="FILE.svg", help="draw what is held, node by node")
    parser.add_argument("--by", choices=("module", "function", "scope"), help="a table of what each costs; scope: both")
    parser.add_argument("--depth", type=int, help=f"with --by: how many calls below the whole (default {DEPTH})")
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="RUN_OR_TRACE",
        help="with --by: what a run took, measured; of its folder the configuration is taken too",
    )
    return parser


@command
def main(argv: Sequence[str]) -> int:
    parser = own_options()
    options, of_training = read_beside(parser, argv)
    given = [name for name in vars(options) if getattr(options, name) != parser.get_default(name)]
    alone = {"by": ("depth", "profile"), "diff": ("graphs", "stage")}  # other options of such a table, or difference
    for name, others in alone.items():
        if name in given and (rest := [other for other in given if other not in (name, *others)]):
            parser.error(f"--{name}: looks at whole graphs; leave out --{', --'.join(rest)}")
    if options.by is None and ("depth" in given or "profile" in given):
        parser.error("--depth and --profile are of the table that --by asks for")
    if (options.depth or 0) < 0:
        parser.error(f"--depth {options.depth}: must be at least 0, the whole alone")
    if options.graphs is not None and of_training:
        parser.error(f"{of_training[0]}: with --graphs nothing is built")
    if options.by:
        depth = DEPTH if options.depth is None else options.depth
        print("\n".join(table(of_training, options.by, depth, options.profile)))
        return 0
    if options.timeline:
        check_result("--timeline", options.timeline)
    with tempfile.TemporaryDirectory() as empty:
        folder = options.graphs
        if folder is None:
            wanted = options.diff or ([options.after] if options.after else [])
            build(of_training, Path(empty), wanted, parser)
            folder = Path(empty, "graphs")
        show(options, folder, parser)
    return 0


def show(options: argparse.Namespace, folder: Path, parser: argparse.ArgumentParser) -> None:
    """Print what the options select of the graphs in a folder.

    Raises:
        UserError: a file can't be read, or the picture can't be written.
    """
    if not folder.is_dir():
        parser.error(f"--graphs {folder}: there is no such folder")
    stages = {path.name.partition("_")[2]: path for path in folder.glob("stage_*")}
    if stages:
        number = min(stages, key=lambda each: (len(each), each)) if options.stage is None else str(options.stage)
        if number not in stages:
            parser.error(f"--stage {number}: is not here; legal are {', '.join(sorted(stages))}")
        folder = stages[number]
    elif options.stage is not None:
        parser.error(f"--stage {options.stage}: these graphs are not of a pipeline's stages")
    if not (paths := sorted(folder.glob("*.py"))):
        parser.error(f"--graphs {folder}: has no graphs; a run with debug.dump_graphs = true writes them to graphs/")
    if options.diff:
        old, new = (without_bytes(read(find_graph(folder, name, parser))) for name in options.diff)
        before, after = options.diff
        print("\n".join(difflib.unified_diff(old, new, before, after, n=0, lineterm="")))
        return
    path = find_graph(folder, options.after, parser) if options.after else paths[-1]
    text = read(path)
    if not (lines := read_lines(text)):
        parser.error(f"{path}: is no graph that debug.dump_graphs wrote")
    if options.timeline:
        write_result("--timeline", options.timeline, timeline(lines, path.stem))
    wanted = [
        line
        for line in lines
        if any(fnmatch.fnmatchcase(each, options.module) for each in beginnings(line.module))
        and options.phase in (None, line.phase)
        and fnmatch.fnmatch(line.operator, options.op)
    ]
    if not wanted:
        known = dict.fromkeys(each for line in lines for each in beginnings(line.module))
        near = difflib.get_close_matches(options.module, known, n=3)
        parser.error(
            f"no node is of --module {options.module!r}, --op {options.op!r} and the phase; there are modules"
            f" such as {', '.join(near or sorted({line.module for line in lines if line.module})[:3])}"
        )
    if options.statistics:
        print("\n".join(statistics(wanted)))
    elif len(wanted) == len(lines):
        print(text)
    else:
        print("\n".join(line.text for line in wanted))


if __name__ == "__main__":
    run_command(main)
