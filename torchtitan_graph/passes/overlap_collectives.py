"""Start collectives early and wait for them late, so that they run beside the arithmetic."""

from __future__ import annotations

import itertools

import torch
from torch.fx import GraphModule, Node

import torchtitan_graph.ops  # noqa: F401 (registers the exchange)
from torchtitan_graph.graph import meta

c10d = torch.ops._c10d_functional
_DISPATCH = (torch.ops.torchtitan_graph.exchange.default, c10d.all_to_all_single.default)


def overlap_collectives(gm: GraphModule) -> GraphModule:
    """Start each gather when the one before is waited for; wait for each reduction when the next one starts. Bitwise.

        a' = wait(start(a)); use(a'); b' = wait(start(b)); use(b')
        sa = start(a); sb = start(b); a' = wait(sa); use(a'); b' = wait(sb); use(b')

    At most one bucket is gathered ahead: memory stays at two blocks' weights. The first gather of backward is not
    started in forward, where it would lie through the loss, the step's peak. What is reduced in two stages (over
    shards, then over their copies) starts its second stage when the next bucket starts its first. Rows on their
    way to experts or back, and their counts, are sent as soon as they are there. Other waits stand right before their
    first use.
    """
    gathers: list[Node] = []
    reductions: list[list[Node]] = []  # the waits of each reduction, stage by stage
    others: list[Node] = []
    for node in gm.graph.nodes:
        if node.target is not c10d.wait_tensor.default:
            continue
        if meta.role(node) == meta.GATHER:
            gathers.append(node)
        elif meta.role(node) != meta.REDUCE:
            others.append(node)
        elif reductions and _start(node).args[0] is reductions[-1][-1]:
            reductions[-1].append(node)
        else:
            reductions.append([node])
    for before, wait in itertools.pairwise(gathers):
        if meta.phase(before) == meta.phase(wait):
            for node in _made_from_placeholders(_start(wait)):
                before.prepend(node)
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for start in (_start(wait) for wait in others if _start(wait).target in _DISPATCH):
        max(start.all_input_nodes, key=order.__getitem__).append(start)
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for wait in others:
        min(wait.users, key=order.__getitem__).prepend(wait)
    starts = [_start(stages[0]) for stages in reductions]
    for number, stages in enumerate(reductions):
        for later, wait in enumerate(stages, start=number + 1):
            place = starts[later] if later < len(starts) else gm.graph.output_node()
            for node in _results(wait, order, limit=order[place]):
                place.prepend(node)
    gm.recompile()
    return gm


def _start(wait: Node) -> Node:
    return wait.args[0]  # type: ignore[return-value]


def _made_from_placeholders(node: Node) -> list[Node]:
    """Give `node` and all it is computed from, inputs first."""
    if node.op == "placeholder":
        return []
    found = [n for source in node.all_input_nodes for n in _made_from_placeholders(source)]
    return [*dict.fromkeys(found), node]


def _results(node: Node, order: dict[Node, int], limit: int) -> list[Node]:
    """Give `node` and all that is computed from it and stands before place `limit`, in order."""
    found, pending = {node}, [node]
    while pending:
        for user in pending.pop().users:
            if order[user] < limit and user not in found:
                found.add(user)
                pending.append(user)
    return sorted(found, key=order.__getitem__)
