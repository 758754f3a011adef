"""Policy: which activations lie in the host's memory till backward. It only writes tags; `offload_activations` acts."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.graph.collectives import gathered_weights
from torchtitan_graph.graph.edit import aliased, value
from torchtitan_graph.graph.liveness import owners

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_SMALLEST = 2**20  # bytes that are worth a copy of their own


def tag_offload(gm: GraphModule, modules: Collection[str]) -> GraphModule:
    """Tag OFFLOAD the large activations of these modules that backward needs. Bitwise.

        h = mm(x, w); v = view(h); y = silu(v); ...; silu_backward(dy, v)      h is tagged, and v RECOMPUTE

    A view of what is tagged is made again, of the copy that comes back. Weights and integers are never tagged, nor
    what is computed again, written in place, or shares memory with what stays.
    """
    if not modules:
        return gm
    owner, weights, needed = owners(gm), gathered_weights(gm), _needed_in_backward(gm)
    results = {owner[node] for node in gm.graph.output_node().all_input_nodes}
    sharing: dict[Node, list[Node]] = {}  # whose values lie in a node's memory, in order
    for node in gm.graph.nodes:
        sharing.setdefault(owner[node], []).append(node)
    for root, members in sharing.items():
        kept = [n for n in members if n in needed and meta.tag(n) != meta.RECOMPUTE]
        if not kept or root.op != "call_function" or root in weights or root in results:
            continue
        # What a collective gives is there when it has been waited for.
        first = next((n for n in members if n.target is _WAIT and meta.phase(n) == "forward"), kept[0])
        views = _views_between(first, [n for n in kept if n is not root or n is first])
        is_written = any(is_write for n in members for _, is_write in aliased(n))
        if block_of(first, modules) and _is_large(first) and not is_written and views is not None:
            meta.write(first, tag=meta.OFFLOAD)
            for view in views:
                meta.write(view, tag=meta.RECOMPUTE)
    return gm


def _needed_in_backward(gm: GraphModule) -> set[Node]:
    """Give the nodes of forward that backward reads, or what it computes again."""
    needed: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        is_forward = node.op == "call_function" and meta.phase(node) == "forward"
        if is_forward and any(meta.phase(n) == "backward" or _is_made_again(n, needed) for n in node.users):
            needed.add(node)
    return needed


def _is_made_again(node: Node, needed: Container[Node]) -> bool:
    return meta.tag(node) == meta.RECOMPUTE and node in needed


def _views_between(first: Node, kept: Sequence[Node]) -> set[Node] | None:
    """Give the views that lead from a node to others in the same memory; None if some are not made of it."""
    found: set[Node] = set()
    for node in kept:
        while node is not first and node not in found:
            found.add(node)
            sources = [source for source, _ in aliased(node)] or node.all_input_nodes
            if len(sources) != 1 or sources[0].op != "call_function":
                return None
            (node,) = sources
    return found


def _is_large(node: Node) -> bool:
    """Tell whether a copy of a value is worth its while, and lies as it does: without gaps."""
    x = value(node)
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return False
    size = x.numel() * x.element_size()
    return size >= _SMALLEST and size == x.untyped_storage().nbytes()
