"""Policy: activations to offload to the host's memory. It only writes tags; `offload_activations` acts on them."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.keeping import movable
from torchtitan_graph.analysis.liveness import owners
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import aliased

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def tag_offload(gm: GraphModule, modules: Collection[str]) -> GraphModule:
    """Tag OFFLOAD the large activations of these modules that backward needs. Bitwise.

        h = mm(x, w); v = view(h); y = silu(v); ...; silu_backward(dy, v)      h is tagged, and v RECOMPUTE

    A view of a tagged activation is recomputed from the copy back. Weights and integers are never tagged, nor
    activations that are recomputed, written in place, or share memory with others that stay.
    """
    if not modules:
        return gm
    owner, may_move, needed = owners(gm), movable(gm, modules), _needed_in_backward(gm)
    sharing: dict[Node, list[Node]] = {}  # owner of a memory -> the nodes in it, in order
    for node in gm.graph.nodes:
        sharing.setdefault(owner[node], []).append(node)
    for root, members in sharing.items():
        kept = [n for n in members if n in needed and meta.tag(n) != meta.RECOMPUTE]
        if not kept or may_move.isdisjoint(members):
            continue
        # A collective's result is complete after its wait.
        first = next((n for n in members if n.target is _WAIT and meta.phase(n) == "forward"), kept[0])
        views = _views_between(first, [n for n in kept if n is not root or n is first])
        if first in may_move and views is not None:
            meta.write(first, tag=meta.OFFLOAD)
            for view in views:
                meta.write(view, tag=meta.RECOMPUTE)
    return gm


def _needed_in_backward(gm: GraphModule) -> set[Node]:
    """Return the forward nodes that backward, or its recomputation, reads."""
    needed: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        is_forward = node.op == "call_function" and meta.phase(node) == "forward"
        if is_forward and any(meta.phase(n) == "backward" or _is_made_again(n, needed) for n in node.users):
            needed.add(node)
    return needed


def _is_made_again(node: Node, needed: Container[Node]) -> bool:
    return meta.tag(node) == meta.RECOMPUTE and node in needed


def _views_between(first: Node, kept: Sequence[Node]) -> set[Node] | None:
    """Return the views from a node to others in the same memory; None if some are not derived from it."""
    found: set[Node] = set()
    for node in kept:
        while node is not first and node not in found:
            found.add(node)
            sources = [source for source, _ in aliased(node)] or node.all_input_nodes
            if len(sources) != 1 or sources[0].op != "call_function":
                return None
            (node,) = sources
    return found
