"""The cost of the training step's modules and functions, as a table."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

from torch.fx import GraphModule

from torchtitan_graph.analysis.measured import measured
from torchtitan_graph.analysis.scope_table import by_type, scope_table
from torchtitan_graph.analysis.scopes import Charge, charges
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.parallel.pipeline import StageGraph
from torchtitan_graph.steps.assembly import Assembly
from torchtitan_graph.steps.graphs import Graphs

DEPTH = 3  # a model, its blocks, and their calls


def step_table(
    assembly: Assembly, graphs: Graphs, *, by: str = "scope", depth: int = DEPTH, trace: Path | None = None
) -> list[str]:
    """Return the lines of a table of costs of the training step, or of each pipeline stage.

    For a stage it covers a microbatch and the parts run once a step; memory is left out, since the stage's parts run at
    different times.

    Args:
        by: "module" | "function" | "scope", which is both.
        depth: number of levels of calls.
        trace: a profile of a run of these graphs.

    Raises:
        UserError: the profile is not a trace, or of other graphs.
    """
    one_document = assembly.visible_in_one_document(assembly.options.rows[1])
    costs = dataclasses.replace(assembly.costs, visible=one_document)
    shown = _graphs(graphs)
    profile = measured(trace, list(itertools.chain.from_iterable(shown.values()))) if trace is not None else {}
    lines = []
    for title, parts in shown.items():
        charged: list[Charge] = []
        for gm in parts:
            charged += charges(gm, costs, profile.get(gm.meta["name"]))
        if len(parts) > 1:
            charged = [each._replace(cost=each.cost._replace(held=0)) for each in charged]
        shown_as = charged if by == "scope" else by_type(charged, by)
        lines += [f"{title}; estimates by the rates of {costs.rates.name}", *scope_table(shown_as, depth), ""]
    return lines


def _graphs(graphs: Graphs) -> dict[str, list[GraphModule]]:
    if isinstance(graphs.train, TracedResult):
        return {"training step": [graphs.train.gm]}
    if isinstance(graphs.train, StageGraph):
        parts = graphs.train.parts.by_name.values()
        return {"training step, a microbatch with what is done once a step": [part.gm for part in parts]}
    return {
        f"stage {number}, a microbatch with what is done once a step": [
            part.gm for part in stage.parts.by_name.values()
        ]
        for number, stage in graphs.train.items()
    }
