"""What the training step's modules and functions cost, as a table."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from pathlib import Path

from torch.fx import GraphModule

from torchtitan_graph.errors import UserError
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
    profile = measured(trace) if trace is not None else None
    lines = []
    for title, parts in _graphs(graphs).items():
        charged: list[Charge] = []
        for gm in parts:
            seconds = None if profile is None else _of_graph(profile, gm)
            charged += charges(gm, costs, seconds)
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


def _of_graph(profile: Mapping[str, Mapping[str, float]], gm: GraphModule) -> Mapping[str, float]:
    """Give the seconds that a profile has of a graph's nodes; parts of tuples have none."""
    name = gm.meta["name"]
    found = profile.get(name, {})
    calls = [node.name for node in gm.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    if missing := [node for node in calls if node not in found]:
        raise UserError(
            f"the profile has nothing of {len(missing)} of the {len(calls)} nodes of {name}, such as {missing[0]}: it "
            f"is of another graph, for it has {', '.join(sorted(profile))}. Profile a run of this configuration"
        )
    return found
