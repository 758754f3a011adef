"""Write a page to explore a step with.

python -m torchtitan_graph.explore --job.config_file my.toml -o step.html

A run's folder in place of the file stands for its configuration, and adds what the run measured. All options of
training are taken, as --training.seq_len 512; NGPU=64 in front shows one rank of 64. The graphs are built as a dry run
does: nothing is allocated or sent. The page is one HTML file, and opens without a network.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.fx import GraphModule

import torchtitan_graph
from torchtitan_graph.analysis.liveness import input_memory
from torchtitan_graph.analysis.measured import find_trace, has_traces, measured
from torchtitan_graph.analysis.scopes import charges, in_a_row
from torchtitan_graph.command import check_result, command, make_parser, run_command, write_result
from torchtitan_graph.config import JobConfig, ranks_asked_for, read_beside
from torchtitan_graph.device import GIB
from torchtitan_graph.errors import UserError
from torchtitan_graph.explorer import PassWatch, Strings, graph_data, page, run_data
from torchtitan_graph.forecast import forecast
from torchtitan_graph.log import logger
from torchtitan_graph.parallel.pipeline import StageGraph
from torchtitan_graph.plan.ranks import dry_rank, load_dry
from torchtitan_graph.steps import Graphs, build_graphs
from torchtitan_graph.steps.budget import EARLIER, INPUTS

EVALUATION = "One microbatch of evaluation: forward alone."
STAGE = "One microbatch, with what the stage does once a step; its parts run one after another, each holding its own."


def with_records(config: JobConfig) -> JobConfig:
    """Set the options that record call hierarchies and source lines, which the page shows.

    Raises:
        UserError: its graphs can't have them.
    """
    if config.compile.capture != "make_fx":
        raise UserError(
            f"compile.capture = {config.compile.capture}: its nodes do not know which calls made them; explore the "
            "same step with --compile.capture make_fx"
        )
    config.compile.record_call_hierarchy = config.debug.stack_traces = True
    return config


def build(config: JobConfig, trace: Path | None) -> dict[str, Any]:
    """Build a configuration's graphs, as a dry run does, and return the page's data.

    Args:
        trace: a profile of a run of it.

    Raises:
        UserError: as a run of that configuration; or the profile is of other graphs.
    """
    watch = PassWatch()
    with dry_rank(config) as blueprint:
        # Nothing is written except the page, and nothing is computed. A profiled graph has run: its norms are this
        # machine's.
        target = blueprint.target if trace is None else dataclasses.replace(blueprint.target, fused_norms=False)
        blueprint.options = dataclasses.replace(
            blueprint.options, look=watch.look, dump_to=None, picture=None, verify=False, target=target
        )
        assembly = blueprint.assembly
        graphs = build_graphs(assembly)
        of_rank = forecast(assembly, graphs, config.optimizer)
        costs, (_, seq_len) = assembly.costs, blueprint.options.rows
        strings, shown = Strings(), []
        found = [(each, seq_len, [STAGE] * (len(each.parts) > 1), of_rank.rest) for each in _of_training(graphs)]
        seconds = measured(trace, [gm for each, *_ in found for gm in each.parts]) if trace is not None else {}
        if blueprint.options.eval_rows is not None:
            rest = {name: size for name, size in of_rank.rest.items() if name != EARLIER}
            found += [(each, blueprint.options.eval_rows[1], [EVALUATION], rest) for each in _of_evaluation(graphs)]
        for (name, whole, parts), length, notes, rest in found:
            costs = dataclasses.replace(costs, visible=blueprint.model.visible_in_one_document(length))
            charged = in_a_row([charges(gm, costs, seconds.get(gm.meta["name"])) for gm in parts])
            rest = rest | {INPUTS: input_memory(whole)}
            shown.append(graph_data(name, parts, charged, costs, watch.graphs[name], strings, notes, rest))
        versions = f"torchtitan_graph {torchtitan_graph.__version__}, torch {torch.__version__}"
        return {
            "title": f"{config.model.name} {config.model.flavor or 'as in config.json'}",
            "facts": [
                f"rank {dist.get_rank()} of {dist.get_world_size()}, {assembly.layout}; estimates by the rates of "
                f"{costs.rates.name}; {versions}"
            ],
            "planned": f"{of_rank.in_all / GIB:.3f} GiB{of_rank.unknown}",
            "needs": of_rank.lines(),
            "strings": strings.table,
            "graphs": shown,
        }


class Shown(NamedTuple):
    """A shown graph: its name in the record of passes, the graph, and the parts in which it runs."""

    name: str
    whole: GraphModule
    parts: list[GraphModule]


def _of_training(graphs: Graphs) -> list[Shown]:
    """Return the graphs of training: the step's, or each pipeline stage's."""
    if isinstance(graphs.train, dict):
        return [
            Shown(f"stage {number}", stage.train.gm, [part.gm for part in stage.parts.by_name.values()])
            for number, stage in graphs.train.items()
        ]
    if isinstance(graphs.train, StageGraph):
        parts = [part.gm for part in graphs.train.parts.by_name.values()]
        return [Shown("training step", graphs.train.train.gm, parts)]
    return [Shown("training step", graphs.train.gm, [graphs.train.gm])]


def _of_evaluation(graphs: Graphs) -> list[Shown]:
    """Return the graphs of evaluation: one, or each pipeline stage's."""
    if isinstance(graphs.train, dict):
        steps = {f"evaluation of stage {number}": stage.evaluate for number, stage in graphs.train.items()}
    else:
        steps = {"evaluation step": graphs.evaluate}
    return [Shown(name, step.gm, [step.gm]) for name, step in steps.items() if step is not None]


@command
def main(argv: Sequence[str]) -> int:
    parser = make_parser(__doc__, allow_abbrev=False)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE.html",
        default=Path("explorer.html"),
        help="where to write the page (default explorer.html)",
    )
    options, of_training = read_beside(parser, argv)
    check_result("-o", options.output)
    config = with_records(load_dry(of_training))
    run = Path(config.job.config_file or "")
    is_run = config.job.config_file is not None and run.is_dir()
    has_profile = is_run and has_traces(run)
    trace = find_trace(run, config.comm.fake_rank, ranks_asked_for() or 1) if has_profile else None
    data = build(config, trace)
    if is_run:
        data["run"] = run_data(run, options.output)
        data["run"]["facts"].append(["peak memory, planned", data["planned"]])
    write_result("-o", options.output, page(data))
    logger.info(f"wrote {options.output}: {options.output.stat().st_size / 2**20:.1f} MiB; open it in a browser")
    return 0


if __name__ == "__main__":
    run_command(main)
