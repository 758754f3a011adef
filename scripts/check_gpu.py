"""On a machine with a CUDA GPU, in one call and ten minutes: all of this project that only a GPU can tell.

    python scripts/check_gpu.py [--minutes 10] [--json check_gpu.json] [--folder outputs/check_gpu]

Is the graph eager's equal, bit for bit, for every family? Are a GPU's own kernels right? How fast is each mode, with
which MFU, and how far off are the forecasts of memory and time? What do float8, CUDA graphs and deterministic kernels
change? It prints one table, and writes it as JSON, with a profile alongside it. The exit code is 0 if all bits are
equal and kernels are right, 1 if not, 3 if as far as could be compared, 2 if nothing was run. docs/tune/check_gpu.md
explains the columns, and how to send the result in.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchtitan_graph import device as devices
from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.check import matrix
from torchtitan_graph.check.kernels import kernels_off
from torchtitan_graph.check.matrix import BF16, FP32, Cell
from torchtitan_graph.command import check_result, make_parser, write_result
from torchtitan_graph.config import load
from torchtitan_graph.data.batch import Batch
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.spec import family_names, load_family
from torchtitan_graph.plan.ranks import build, configuration
from torchtitan_graph.plan.simulate import by_rates, simulate
from torchtitan_graph.train import choose_kernels
from torchtitan_graph.trainer import Trainer

REPOSITORY = Path(__file__).resolve().parents[1]
# Heads that the GPU's kernels support: a power of two, at least 16 wide.
HEADS = (("head_dim", 32), ("nope_dim", 32), ("rope_dim", 32), ("v_dim", 32), ("kv_lora_rank", 32))
FAMILIES = [name for name in family_names() if name != "transformers"]  # whose own kernels are not this package's
FLAVORS = [(f, x) for f in FAMILIES for x in load_family(f).FLAVORS if x.startswith("debugmodel")]
SHARED = (
    "--training.dataset stdlib --validation.no-enable --checkpoint.no-enable --training.mixed_precision_param bfloat16"
)
MODELS = {
    "llama3 1B": "--model.name llama3 --model.flavor 1B --training.seq_len 4096 --training.local_batch_size 4",
    "qwen3 debugmodel_moe": (
        "--model.name qwen3 --model.flavor debugmodel_moe --training.seq_len 4096 --training.local_batch_size 4"
    ),
}
EAGER, COMPILED, GRAPH, CUDA_GRAPHS = "eager", "compiled eager", "graph", "CUDA graphs"
DETERMINISTIC, WHOLE, FLOAT8 = "graph, deterministic", "whole graph", "float8"
MODES = {
    EAGER: "--compile.mode eager",
    COMPILED: "--compile.mode eager",
    GRAPH: "",
    DETERMINISTIC: "--debug.deterministic",
    "graph, varlen": "--model.attn varlen",
    CUDA_GRAPHS: "--compile.cuda_graphs",
    "optimizer in graph": "--compile.optimizer_in_graph",
    "CUDA graphs, optimizer in graph": "--compile.cuda_graphs --compile.optimizer_in_graph",
    WHOLE: "--compile.codegen whole",
    FLOAT8: "--model.converters float8 --quantize.linear.float8.filter_fqns output",
}
MODES_OF_OTHERS = (EAGER, GRAPH, DETERMINISTIC, CUDA_GRAPHS)  # except the first model, which is timed in each
NUM_STEPS = 10  # measured ones
MOST_MINUTES = 24 * 60
NUM_AT_ONCE = max(1, min(4, (os.cpu_count() or 1) // 4))  # untimed parts share the GPU
EQUAL, DIFFERS, MEASURED, FAILED, NOT_RUN = "equal", "DIFFERS", "measured", "FAILED", "not run"
AGREES = "agrees"
TOLERANCE = 1e-2  # of a norm: results in bf16 are rounded by 2**-9

Row = dict[str, Any]
COLUMNS = (
    *("part", "model", "mode", "result", "step_ms", "planned_ms", "tokens_per_s", "mfu", "peak_gib", "planned_gib"),
    "note",
)


class Part(NamedTuple):
    """Some rows of the table, computed by a process of its own: `make(*arguments)`.

    seconds   time limit on an H100, for the estimate of the remaining time
    is_timed  it needs the GPU for itself
    """

    name: str
    model: str
    mode: str
    make: Callable[..., Iterator[Row]]
    arguments: tuple[Any, ...]
    seconds: float
    is_timed: bool

    def row(self, **values: Any) -> Row:
        return {"part": self.name, "model": self.model, "mode": self.mode, **values}


def all_parts(folder: Path) -> list[Part]:
    """Return all parts: first those that share the GPU, the longest of them first, then those that need it alone."""

    def bits(attn: str, flavors: Iterable[tuple[str, str]], seconds: float) -> list[Part]:
        return [Part("bits", f"{f} {x}", attn, compare_bits, (f, x, attn), seconds, False) for f, x in flavors]

    of_each_family = dict(FLAVORS).items()  # the last flavour, which has experts where any has
    # Segments' kernels have no sinks and no windows.
    segmented = [(f, x) for f, x in of_each_family if f != "gpt_oss"]
    numbers = Part("numbers", "", "", compare_numbers, (), 10, False)
    first, *_ = MODELS
    speeds = [
        Part("speed", model, mode, measure, (words, mode), 50 if mode in (COMPILED, WHOLE, FLOAT8) else 25, True)
        for model, words in MODELS.items()
        for mode in (MODES if model == first else MODES_OF_OTHERS)
    ]
    profile = Part("profile", first, GRAPH, write_profile, (MODELS[first], folder / "trace.json"), 25, True)
    shared = [*bits("flex", of_each_family, 60), *bits("sdpa", FLAVORS, 15), *bits("varlen", segmented, 15), numbers]
    return [*shared, *speeds, profile]


def seconds_of(parts: Iterable[Part], num_at_once: int = NUM_AT_ONCE) -> float:
    """Return the seconds that parts may take on an H100."""
    return sum(part.seconds / (1 if part.is_timed else num_at_once) for part in parts)


# --- a part's work, in a process of its own ---------------------------------------------------------------------------


def compare_bits(family: str, flavor: str, attn: str) -> Iterator[Row]:
    """Train a tiny model both ways: yield whether loss, every gradient and the parameters of all steps are equal."""
    _join()
    matrix.DEVICE = torch.device("cuda")
    # Else bf16 attention uses cuDNN's kernels, whose backward adds in another order each time.
    choose_kernels(load(["--debug.deterministic"]))
    precisions = {"fp32": FP32, "bf16": BF16}
    if attn == "varlen":  # its kernels have half precision alone
        del precisions["fp32"]
    for name, precision in precisions.items():
        mode = f"{attn} {name}"
        try:
            cell = Cell(
                family=family,
                flavor=flavor,
                attn=attn,
                precision=precision,
                changes=HEADS,
                fused_layers=True,
            )
            eager = matrix.train(cell, matrix.build_eager(cell))
            different = matrix.bits_that_differ(eager, matrix.train(cell, matrix.build_graph(cell)))
        except Exception as error:
            traceback.print_exc()
            yield {"mode": mode, "result": FAILED, "note": first_line(error)}
            continue
        note = f"{len(different)} of {len(eager)} differ, first {different[0]}" if different else ""
        yield {"mode": mode, "result": DIFFERS if different else EQUAL, "note": note}


def compare_numbers() -> Iterator[Row]:
    """Compare kernels that a CPU does not have with their references, by norms."""
    for name, off in kernels_off():
        result = AGREES if off <= TOLERANCE else DIFFERS
        yield {"mode": name, "result": result, "note": f"off by {off:.1e} of the norm"}


def measure(words: str, mode: str) -> Iterator[Row]:
    """Yield the medians of a mode's steps, with their forecasts."""
    options = f"{SHARED} {words} {MODES[mode]}".split()
    is_eager = mode in (EAGER, COMPILED)
    # An eager step has no graph to forecast; its FLOPs are those of the graph.
    config, rates = configuration([*options, *(["--compile.mode", "graph"] if is_eager else [])], 1), devices.rates()
    plan = simulate(job := build(config, 1, rates), by_rates(job, rates), rates)
    with training(options, is_compiled=mode == COMPILED) as (step, num_tokens):
        for _ in range(3):  # libraries choose their kernels, graphs are recorded
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(NUM_STEPS):
            begin = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        seconds, peak, peak_flops = statistics.median(times), torch.cuda.max_memory_allocated(), devices.peak_flops()
    forecast = plan.rank.forecast
    row: Row = {"result": MEASURED, "step_ms": round(seconds * 1e3, 2), "tokens_per_s": round(num_tokens / seconds)}
    row |= {"peak_gib": round(peak / devices.GIB, 3)}
    if peak_flops:
        row["mfu"] = round(forecast.operations / seconds / peak_flops, 4)
    if not is_eager:
        row |= {"planned_ms": round(plan.step.seconds * 1e3, 2), "planned_gib": round(forecast.in_all / devices.GIB, 3)}
        row["note"] = f"planned for {rates.name}"
    yield row


def write_profile(words: str, path: Path) -> Iterator[Row]:
    """Write a trace of one step, for https://ui.perfetto.dev."""
    with training(f"{SHARED} {words}".split()) as (step, _):
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        with torch.profiler.profile() as profiler:
            step()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
    yield {"result": MEASURED, "note": f"{path.name}, {path.stat().st_size / 2**20:.1f} MiB"}


@contextlib.contextmanager
def training(options: Sequence[str], is_compiled: bool = False) -> Iterator[tuple[Callable[[], None], int]]:
    """Yield an optimizer step of the trainer's, on rows of one document each, and the number of its tokens."""
    _join()
    config = load(options)
    choose_kernels(config)
    trainer = Trainer(Blueprint(config, 1))
    for block in trainer.model.blocks.values() if is_compiled else ():
        block.compile()
    rows, seq_len = config.training.local_batch_size, config.training.seq_len
    tokens, labels = torch.randint(trainer.model.config.vocab_size, (2, rows, seq_len))
    positions = torch.arange(seq_len).repeat(rows, 1)
    on_host = Batch(tokens, labels, positions, torch.zeros_like(positions))
    batch = on_host.to(trainer.device)
    num_tokens = torch.full((), rows * seq_len, device=trainer.device)

    def step() -> None:
        loss = trainer.steps.train([batch], num_tokens, [on_host]).loss
        trainer.update.clip(loss)
        trainer.update.step(torch.zeros_like(loss, dtype=torch.float32))
        trainer.update.finish()

    with contextlib.closing(trainer.steps):
        yield step, rows * seq_len


def _join() -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def describe_device() -> Iterator[Row]:
    if torch.version.cuda is None:
        raise UserError(f"torch {torch.__version__} has no CUDA; install a CUDA build of it, see README.md")
    if not torch.cuda.is_available():
        raise UserError(
            "torch sees no CUDA GPU here; tests/numerics checks bits on a CPU, see docs/reference/cuda_without_a_gpu.md"
        )
    properties = torch.cuda.get_device_properties(0)
    driver = "unknown"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0]
    yield {
        "device": properties.name,
        "memory_gib": round(properties.total_memory / devices.GIB, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver,
    }


# --- the processes, one after the other -------------------------------------------------------------------------------


def first_line(error: BaseException) -> str:
    """Return the error's type and the first line of its message, without this machine's paths."""
    text = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
    for path in (REPOSITORY, Path(sys.prefix), Path.home()):
        text = text.replace(str(path), "...")
    return text[:200]


def _in_child(part: Part, rows: Path, log: Path) -> None:
    """Write a part's rows to a file, a line each as soon as it is computed, and its output to another."""
    with log.open("w") as said, rows.open("w") as file:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        try:
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
            for row in part.make(*part.arguments):
                file.write(json.dumps(part.row(**row)) + "\n")
                file.flush()
        except BaseException as error:
            traceback.print_exc()
            file.write(json.dumps(part.row(result=FAILED, note=first_line(error))) + "\n")


def run_parts(parts: Sequence[Part], seconds: float, folder: Path, say: Callable[[str], None] = print) -> list[Row]:
    """Run each part in a process of its own, and return their rows. A failed part, or one without time left, is a row
    too. Ctrl-C ends the time."""
    why = "the time was up; --minutes gives more"
    # Forked, as torch is loaded here, and this process never uses the GPU.
    context, begin = multiprocessing.get_context("fork"), time.monotonic()
    waiting, running, rows = list(parts), dict[Any, tuple[Part, Path, Path, float]](), list[Row]()

    def left() -> float:
        return seconds - (time.monotonic() - begin)

    def end(process: Any) -> None:
        part, path, log, started = running.pop(process)
        process.join()
        made = [json.loads(line) for line in path.read_text().splitlines()]
        if left() <= 0 and process.exitcode:
            made.append(part.row(result=NOT_RUN, note=f"cut off: {why}"))
        elif process.exitcode:
            made.append(part.row(result=FAILED, note=f"its process ended with {process.exitcode}: {log.name}"))
        rows.extend(made)
        took, results = time.monotonic() - started, ", ".join(dict.fromkeys(row.get("result", "") for row in made))
        todo = [*waiting, *(part for part, *_ in running.values())]
        say(
            f"{len(parts) - len(todo)}/{len(parts)} {part.name} {part.model} {part.mode}: {results}  ({took:.0f} s; "
            f"about {min(seconds_of(todo), max(left(), 0)) / 60:.1f} minutes left)"
        )

    while waiting or running:
        while waiting and left() > 0 and _has_room(waiting[0], [part for part, *_ in running.values()]):
            part, number = waiting.pop(0), len(parts) - len(waiting)
            path, log = folder / f"{number}.jsonl", folder / f"{number}.log"
            path.touch()
            process = context.Process(target=_in_child, args=(part, path, log))
            process.start()
            running[process] = part, path, log, time.monotonic()
        if left() <= 0:
            rows += [part.row(result=NOT_RUN, note=why) for part in waiting]
            waiting.clear()
            for process in running:
                process.kill()
        try:
            wait([process.sentinel for process in running], timeout=max(left(), 0) if waiting or left() > 0 else None)
        except KeyboardInterrupt:
            seconds, why = 0.0, "stopped"
        for process in [process for process in running if process.exitcode is not None]:
            end(process)
    return rows


def _has_room(part: Part, running: Sequence[Part]) -> bool:
    if part.is_timed or any(other.is_timed for other in running):
        return not running
    return len(running) < NUM_AT_ONCE


# --- the report -------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows as lines with a heading."""
    cells = [COLUMNS, *(tuple("" if (x := row.get(c)) is None else str(x) for c in COLUMNS) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    numbers = range(COLUMNS.index("step_ms"), COLUMNS.index("note"))
    return [
        "  ".join(
            x.rjust(w) if i in numbers else x.ljust(w) for i, (x, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def commit() -> str:
    """Return the name of the commit that is checked out, and whether files differ from it."""
    try:
        git = ["git", "-C", str(REPOSITORY)]
        name = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        return name + " with changes" * bool(subprocess.run([*git, "diff", "--quiet", "HEAD"]).returncode)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def exit_code(rows: Sequence[Row]) -> int:
    results = {row["result"] for row in rows if row["part"] in ("bits", "numbers")}
    return 1 if DIFFERS in results else 3 if results - {EQUAL, AGREES} or not results else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="what is left then is not run (default 10)")
    parser.add_argument("--json", type=Path, default=Path("check_gpu.json"), help="(default check_gpu.json)")
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/check_gpu"), help="of the profile, and of what each part says"
    )
    args = parser.parse_args(argv)
    try:
        if not 0 < args.minutes <= MOST_MINUTES:
            raise UserError(f"--minutes {args.minutes}: must be above 0 and at most {MOST_MINUTES}, a day")
        check_result("--json", args.json)
        args.folder.mkdir(parents=True, exist_ok=True)
        device = run_parts([Part("device", "", "", describe_device, (), 5, True)], 60, args.folder, lambda _: None)[0]
        if device.get("result"):
            raise UserError(device["note"].removeprefix("UserError: "))
    except (UserError, OSError) as error:
        print(f"check_gpu: {error}", file=sys.stderr)
        return 2
    begin = time.monotonic()
    rows = run_parts(all_parts(args.folder), args.minutes * 60, args.folder)
    print("\n".join(["", *table(rows), ""]))
    about = {key: device[key] for key in ("device", "memory_gib", "capability", "driver")} | {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "commit": commit(),
        "seconds": round(time.monotonic() - begin, 1),
    }
    write_result("--json", args.json, json.dumps(about | {"rows": rows}, indent=1) + "\n")
    print(f"written: {args.json}; the profile and what each part said are in {args.folder}")
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
