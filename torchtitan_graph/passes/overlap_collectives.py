"""Start collectives early and wait for them late, so that they run beside the arithmetic."""

from __future__ import annotations

import itertools

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.graph import meta

c10d = torch.ops._c10d_functional


def overlap_collectives(gm: GraphModule) -> GraphModule:
    """Start each gather when the one before is waited for; wait for each reduction when the next one starts. Bitwise.

        a' = wait(start(a)); use(a'); b' = wait(start(b)); use(b')
        sa = start(a); sb = start(b); a' = wait(sa); use(a'); b' = wait(sb); use(b')

    At most one bucket is gathered ahead: memory stays at two blocks' weights. The first gather of backward is not
    started in forward, where it would lie through the loss, the step's peak.
    """
    gathers: list[Node] = []
    reductions: list[Node] = []
    for node in gm.graph.nodes:
        if node.target is c10d.wait_tensor.default:
            {meta.GATHER: gathers, meta.REDUCE: reductions}.get(meta.role(node) or "", []).append(node)
    for before, wait in itertools.pairwise(gathers):
        if meta.phase(before) != meta.phase(wait):
            continue
        for node in _made_from_placeholders(wait.args[0]):  # type: ignore[arg-type]
            before.prepend(node)
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for wait, after in itertools.pairwise(reductions):
        start = after.args[0]
        if wait is not start.args[0]:  # type: ignore[union-attr]
            for node in _results(wait, order, limit=order[start]):  # type: ignore[index]
                start.prepend(node)  # type: ignore[union-attr]
    gm.recompile()
    return gm


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
