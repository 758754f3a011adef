"""Overlap of the gather of keys and values with the computation of queries."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.graph import meta

c10d = torch.ops._c10d_functional


def overlap_context(gm: GraphModule, modules: Container[str]) -> GraphModule:
    """Start each module's collectives before all else in its attention, and wait where the result is needed. Bitwise.

        q = ...; k = ...; a = wait(start(k)); attend(q, a)
        k = ...; s = start(k); q = ...; a = wait(s); attend(q, a)

    In backward likewise: the gradients of queries are computed while those of keys and values are reduced.
    """
    for wait in gm.graph.find_nodes(op="call_function", target=c10d.wait_tensor.default):
        if meta.module(wait) in modules:
            start: Node = wait.args[0]  # type: ignore[assignment]
            _start_early(start)
            _wait_late(wait)
    gm.recompile()
    return gm


def _start_early(start: Node) -> None:
    """Move the nodes before `start` in its attention that it does not depend on behind it."""
    needed, others, node = {start}, [], start.prev
    while _in_the_attention_of(start, node):
        if needed.isdisjoint(node.users):
            others.append(node)
        else:
            needed.add(node)
        node = node.prev
    for node in others:
        start.append(node)


def _wait_late(wait: Node) -> None:
    """Move a wait, and its dependents, to the end of its attention, past its block's rematerialized nodes."""
    held, node = {wait: None}, wait.next
    while _in_the_attention_of(wait, node) or (
        _in_the_block_of(wait, node) and held.keys().isdisjoint(node.all_input_nodes)
    ):
        if not held.keys().isdisjoint(node.all_input_nodes):
            held[node] = None
        node = node.next
    for each in held:
        node.prepend(each)


def _in_the_attention_of(collective: Node, node: Node) -> bool:
    """Return whether a node may be moved with those of a collective's attention, which include nodes of no module: sums
    of gradients, and nodes that passes inserted."""
    attention, _, _ = meta.module(collective).rpartition(".")
    inside = f"{meta.module(node)}.".startswith(f"{attention}.")
    among = meta.role(node) is not None or not meta.module(node)
    return node.op in ("call_function", "get_attr") and meta.phase(node) == meta.phase(collective) and (inside or among)


def _in_the_block_of(collective: Node, node: Node) -> bool:
    block = meta.module(collective).rsplit(".", 2)[0]
    same_phase = node.op == "call_function" and meta.phase(node) == meta.phase(collective)
    return same_phase and meta.module(node).startswith(f"{block}.")
