"""What the training step's modules and functions cost, as a table."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

from torch.fx import GraphModule

from torchtitan_graph.graph.cost import Costs
from torchtitan_graph.graph.measured import measured
from torchtitan_graph.graph.scope_table import by_type, scope_table
from torchtitan_graph.graph.scopes import Charge, charges
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.steps.graphs import Graphs

DEPTH = 3  # a model, its blocks, and what these call


def step_table(
    model: Decoder,
    graphs: Graphs,
    seq_len: int,
    costs: Costs,
    *,
    by: str = "scope",
    depth: int = DEPTH,
    trace: Path | None = None,
) -> list[str]:
    """Give the lines of a table: of a run of the training step, or of each of a pipeline's stages.

    Of a stage it is a microbatch with what is done once a step. What is held is then not told, for the stage's parts
    run at different times.

    Args:
        seq_len: of rows of one document, which attention counts for.
        costs: what nodes take.
        by: "module" | "function" | "scope", which is both.
        depth: how many calls below the whole.
        trace: a profile of a run of these graphs.

    Raises:
        UserError: the profile is no trace, or of other graphs.
    """
    costs = dataclasses.replace(costs, visible=model.visible_in_one_document(seq_len))
    shown = _graphs(graphs)
    profile = measured(trace, list(itertools.chain.from_iterable(shown.values()))) if trace is not None else {}
    lines = []
    for title, parts in shown.items():
        charged: list[Charge] = []
        for gm in parts:
            charged += charges(gm, costs, profile.get(gm.meta["name"]))
        if len(parts) > 1:
            charged = [each._replace(cost=each.cost._replace(held=0)) for each in charged]
        told = charged if by == "scope" else by_type(charged, by)
        lines += [f"{title}; estimates by the rates of {costs.rates.name}", *scope_table(told, depth), ""]
    return lines


def _graphs(graphs: Graphs) -> dict[str, list[GraphModule]]:
    if not isinstance(graphs.train, dict):
        return {"training step": [graphs.train.gm]}
    return {
        f"stage {number}, a microbatch with what is done once a step": [
            part.gm for part in stage.parts.by_name.values()
        ]
        for number, stage in graphs.train.items()
    }
