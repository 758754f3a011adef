"""Mechanism: offload of tagged activations to the host's memory, from forward to backward."""

from __future__ import annotations

import collections
from collections.abc import Container

from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.liveness import size_of
from torchtitan_graph.analysis.timeline import Timeline
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.blocks import block_of, boundaries
from torchtitan_graph.graph.edit import call, value
from torchtitan_graph.log import logger
from torchtitan_graph.ops.copies import arrived, offload, reload


def offload_activations(gm: GraphModule, blocks: Container[str]) -> GraphModule:
    """Copy OFFLOAD nodes to the host when their block's forward ends, and back a block before backward reads them.
    Bitwise.

        a = f(x); ...; dx = f_backward(dy, a)
        a = f(x); h = offload(a); ...; k = arrived(h, a); ...; b = reload(k); ...; dx = f_backward(dy, arrived(b, k))

    A copy has the next block's time to arrive; then the device memory of the original is free. Activations that the
    last block's backward reads would be needed back at once: they stay. A copy back is not started before its own
    block's backward where that would raise the step's peak memory.
    """
    tagged = [node for node in gm.graph.nodes if meta.tag(node) == meta.OFFLOAD]
    if not tagged:
        return gm
    nodes = list(gm.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    found = boundaries([(block_of(node, blocks), meta.phase(node) == "backward") for node in nodes])
    begins = [nodes[i] for i in found.begins]
    moves: list[tuple[int, Node, list[Node]]] = []  # the backward's number, the node, its readers there
    kept: dict[Node, Node] = {}
    for node in reversed(tagged):  # each is inserted before those already there
        block = block_of(node, blocks) or ""
        uses = sorted(user for user in node.users if meta.phase(user) == "backward")
        way = found.way(block, order[uses[0]]) if uses else None
        if way is not None:
            kept[node] = _send(gm, node, nodes[found.ends[block]], nodes[way[0]])
            moves.append((way[1], node, uses))
    coming: dict[int, list[Node]] = collections.defaultdict(list)
    for number, node, uses in sorted(reversed(moves), key=lambda move: order[move[2][0]]):
        coming[number].append(_fetch(gm, node, kept[node], uses, begins[number]))
    _fetch_early(gm, begins, coming)
    size = sum(value(node).untyped_storage().nbytes() for node in kept)
    logger.info(f"offload_activations: {len(moves)} values, {size / 2**30:.3f} GiB to the host and back")
    gm.recompile()
    return gm


def _send(gm: GraphModule, node: Node, end: Node, next_end: Node) -> Node:
    """Start a device-to-host copy of a node behind `end`, wait for it behind `next_end`, and return the wait."""
    with gm.graph.inserting_after(end):
        copy = call(gm.graph, node, offload, node)
    with gm.graph.inserting_after(next_end):
        return call(gm.graph, node, arrived, copy, node)


def _fetch(gm: GraphModule, node: Node, kept: Node, uses: list[Node], begin: Node) -> Node:
    """Start the copy back at `begin`, make backward read it, and return the start."""
    with gm.graph.inserting_before(begin):
        start = call(gm.graph, node, reload, kept, value(node).device.type)
    with gm.graph.inserting_before(uses[0]):
        back = call(gm.graph, node, arrived, start, kept)
    for made in (start, back):
        meta.write(made, phase="backward")
    for use in uses:
        use.replace_input_with(node, back)
    return start


def _fetch_early(gm: GraphModule, begins: list[Node], coming: dict[int, list[Node]]) -> None:
    """Prefetch the activations of each block's backward when the block before begins, as far as the peak allows."""
    timeline = Timeline(gm)
    for number, starts in coming.items():
        earliest, until = (timeline.place[begins[i]] for i in (number - 1, number))
        for start in starts:
            timeline.start_earlier([start], until, earliest, size_of(start), partway=False)
