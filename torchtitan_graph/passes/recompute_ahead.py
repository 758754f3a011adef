"""Recomputation of a layer alongside the backward of the one above it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.cost import Costs
from torchtitan_graph.analysis.interleave import Room, interleaved, seconds_of, stream_of
from torchtitan_graph.analysis.liveness import Memories, held_memory, in_one_part, peaks, scratch_of, size_of
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import put_in_order


def recompute_ahead(gm: GraphModule, costs: Costs, part_of: Callable[[Node], str] = in_one_part) -> GraphModule:
    """Reorder what backward computes again to run where backward waits, one layer ahead at most. Bitwise.

        a2 = f2(x2); s = start(dy(a2)); use(wait(s)); a1 = f1(x1); ...
        a2 = f2(x2); s = start(dy(a2)); a1 = f1(x1); use(wait(s)); ...

    A layer is computed again from an input that was kept, and so needs nothing of the layers above it. Nothing changes
    unless the estimate is shorter (see Note [Interleaving]) and no part's peak memory is higher.
    """
    # For a pipeline's stage `part_of` returns the part that a node runs in.
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    begin = next((i for i, node in enumerate(nodes) if meta.phase(node) == "backward" and not meta.role(node)), 0)
    before, stream = nodes[:begin], stream_of(nodes[begin:])
    if not stream.early or not any(costs.link(node) for node in nodes):
        return gm
    costs = dataclasses.replace(costs, known={})
    memories = Memories(gm)
    held = held_memory(gm, size_of, part_of, memories=memories)
    bound = peaks(held, part_of)
    sizes = {node: sum(map(size_of, memories.taken(node))) + scratch_of(node) for node in stream.early}
    room = Room(stream, held, {node: bound[part_of(node)] for node in held}, sizes)
    order = [*before, *interleaved([stream], costs, before, room)]
    if seconds_of(gm, order, costs) < seconds_of(gm, nodes, costs):
        put_in_order(order)
        now = peaks(held_memory(gm, size_of, part_of), part_of)
        if any(now[part] > most for part, most in bound.items()):
            put_in_order(nodes)
        gm.recompile()
    return gm
