"""Mechanism: offload of tagged activations to the host's memory, from forward to backward."""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Container

import torch
from torch.fx import GraphModule, Node

import torchtitan_graph.ops  # noqa: F401 (registers the operators)
from torchtitan_graph.analysis.liveness import held_memory, size_of
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.graph.edit import call, value
from torchtitan_graph.log import logger

_OPS = torch.ops.torchtitan_graph
_OFFLOAD, _RELOAD, _ARRIVED = _OPS.offload.default, _OPS.reload.default, _OPS.arrived.default


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
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    ends = _ends_of_forward(gm, blocks)
    next_end = {block: ends[after] for block, after in itertools.pairwise(ends)}
    begins = _begins_of_backward(gm, blocks, list(ends))
    places = [order[node] for node in begins]
    moves: list[tuple[int, Node, list[Node]]] = []  # the first backward that reads a node, the node, its readers
    for node in tagged:
        uses = sorted((user for user in node.users if meta.phase(user) == "backward"), key=order.__getitem__)
        number = bisect.bisect(places, order[uses[0]]) - 1 if uses else 0
        if number > 0 and block_of(node, blocks) in next_end:
            moves.append((number, node, uses))
    kept = {}
    for _, node, _ in reversed(moves):  # each is inserted before those already there
        block = block_of(node, blocks) or ""
        kept[node] = _send(gm, node, ends[block], next_end[block])
    coming: dict[int, list[Node]] = collections.defaultdict(list)
    for number, node, uses in sorted(moves, key=lambda move: order[move[2][0]]):
        coming[number].append(_fetch(gm, node, kept[node], uses, begins[number]))
    _fetch_early(gm, begins, coming)
    size = sum(value(node).untyped_storage().nbytes() for node in kept)
    logger.info(f"offload_activations: {len(moves)} values, {size / 2**30:.3f} GiB to the host and back")
    gm.recompile()
    return gm


def _ends_of_forward(gm: GraphModule, blocks: Container[str]) -> dict[str, Node]:
    """Return the last node of each block's forward, in order."""
    ends: dict[str, Node] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and meta.phase(node) == "forward" and (block := block_of(node, blocks)):
            ends.pop(block, None)
            ends[block] = node
    return ends


def _begins_of_backward(gm: GraphModule, blocks: Container[str], forward: list[str]) -> list[Node]:
    """Return the first node of each block's backward. Nodes of an earlier block before that of a later block,
    rematerialized values that both read, don't count."""
    begins: list[Node] = []
    waiting = list(forward)
    for node in gm.graph.nodes:
        if waiting and meta.phase(node) == "backward" and block_of(node, blocks) == waiting[-1]:
            begins.append(node)
            waiting.pop()
    return begins


def _send(gm: GraphModule, node: Node, end: Node, next_end: Node) -> Node:
    """Start a device-to-host copy of a node behind `end`, wait for it behind `next_end`, and return the wait."""
    with gm.graph.inserting_after(end):
        copy = call(gm.graph, node, _OFFLOAD, node)
    with gm.graph.inserting_after(next_end):
        return call(gm.graph, node, _ARRIVED, copy, node)


def _fetch(gm: GraphModule, node: Node, kept: Node, uses: list[Node], begin: Node) -> Node:
    """Start the copy back at `begin`, make backward read it, and return the start."""
    with gm.graph.inserting_before(begin):
        start = call(gm.graph, node, _RELOAD, kept, value(node).device.type)
    with gm.graph.inserting_before(uses[0]):
        back = call(gm.graph, node, _ARRIVED, start, kept)
    for made in (start, back):
        meta.write(made, phase="backward")
    for use in uses:
        use.replace_input_with(node, back)
    return start


def _fetch_early(gm: GraphModule, begins: list[Node], coming: dict[int, list[Node]]) -> None:
    """Prefetch the activations of each block's backward when the block before begins, as far as the peak allows."""
    held = held_memory(gm, size_of)
    peak, most, number = max(held.values()), [0] * len(begins), -1
    place = {node: i for i, node in enumerate(begins)}
    for node, num_bytes in held.items():
        number = place.get(node, number)
        if number >= 0:
            most[number] = max(most[number], num_bytes)
    for number, starts in coming.items():
        for start in starts:
            if most[number - 1] + size_of(start) <= peak:
                most[number - 1] += size_of(start)
                begins[number - 1].prepend(start)
