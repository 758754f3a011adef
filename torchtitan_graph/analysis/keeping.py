"""Each block's forward values as input of a minimum cut: which may be saved for backward, and which recomputed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.cut import Value, computed_again
from torchtitan_graph.analysis.liveness import owners, size_of
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.graph.collectives import gathered_weights
from torchtitan_graph.graph.edit import aliased, is_view
from torchtitan_graph.ops.operator import operator_of

WORTH = 32  # a byte saved till backward costs as much as so many bytes read and written
SMALLEST = 2**20  # bytes: the smallest tensor that is offloaded
START = 2**16  # launching an operator costs as much as so many bytes read and written


class Forward(NamedTuple):
    """Forward's nodes, by block; under None those outside the blocks.

    owner    the node that owns the memory of a node's value
    weights  gathered weights and their views, which are in no group: no activations
    held     memories that backward reads in any case
    written  memories that are written to: nodes that read them can't be recomputed later
    """

    groups: Mapping[str | None, list[Node]]
    owner: Mapping[Node, Node]
    weights: Container[Node]
    held: Container[Node]
    written: Container[Node]


def forward_of(gm: GraphModule, blocks: Container[str]) -> Forward:
    """Group forward's nodes by block."""
    owner, weights = owners(gm), gathered_weights(gm)
    held = {owner[node] for node in gm.graph.nodes if is_wanted(node)}
    groups: dict[str | None, list[Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and meta.phase(node) == "forward" and node not in weights:
            groups.setdefault(block_of(node, blocks), []).append(node)
    return Forward(groups, owner, weights, held, written_memories(gm, owner))


def values_of(
    nodes: list[Node], forward: Forward, cost: Callable[[Node], int | None], worth: int = 1
) -> dict[Node, Value]:
    """Return the values of a block for a cut, and of the earlier values that it reads; without nodes that are
    recomputed in any case.

    Args:
        cost: of recomputing a node's value from its inputs; None: it can't be.
        worth: the cost of a byte.
    """
    owner, values, place = forward.owner, dict[Node, Value](), dict[Node, int]()

    def add(node: Node, value: Value) -> int:
        values[node], place[node] = value, len(place)
        return place[node]

    def place_of(node: Node) -> int:
        if node in place:
            return place[node]
        node = owner[node]  # made before the block
        price = 0 if node in forward.held else size_of(node) * worth
        return place[node] if node in place else add(node, Value(price, None, (), False))

    for node in nodes:
        is_free = meta.tag(node) is None and not any(owner[x] in forward.written for x in node.all_input_nodes)
        again = cost(node) if is_free else None
        if again is not None:
            is_own = owner[node] is node
            is_kept = is_own and isinstance(node.meta["val"], torch.Tensor)  # a tuple's elements are
            inputs = tuple(place_of(n) for n in node.all_input_nodes if not _is_there(n, forward))
            keep = size_of(node) * worth if is_kept else None
            add(node, Value(keep, again if is_own else 0, inputs, is_wanted(node)))
        elif meta.tag(node) != meta.RECOMPUTE:
            add(node, Value(size_of(node) * worth, None, (), is_wanted(node)))
    return values


def elementwise_again(nodes: list[Node], forward: Forward) -> set[Node]:
    """Return the elementwise results of a block that are cheaper recomputed than saved: a minimum cut."""

    def cost(node: Node) -> int | None:
        return moved(node) if _is_cheap(node, forward.owner) else None

    values = values_of(nodes, forward, cost, WORTH)
    return chosen(values, forward, computed_again(tuple(values.values())))


def chosen(values: Mapping[Node, Value], forward: Forward, places: Container[int]) -> set[Node]:
    """Return the nodes whose values at these indices are recomputed. A view of a saved value is not."""
    found = {node for i, node in enumerate(values) if i in places}
    return {node for node in found if forward.owner[node] in found}


def written_memories(gm: GraphModule, owner: Mapping[Node, Node]) -> set[Node]:
    """Return the owners of the memories that a graph writes to in place."""
    return {owner[x] for node in gm.graph.nodes for x, is_write in aliased(node) if is_write}


def movable(gm: GraphModule, modules: Container[str]) -> set[Node]:
    """Return the large activations of these modules that may be offloaded to the host's memory till backward: no
    weights, nothing that is written in place, no outputs."""
    if not modules:
        return set()
    owner, weights = owners(gm), gathered_weights(gm)
    stay = {owner[node] for node in gm.graph.output_node().all_input_nodes} | written_memories(gm, owner)
    return {
        node
        for node, root in owner.items()
        if root.op == "call_function" and root not in stay and root not in weights
        if meta.phase(node) == "forward" and block_of(node, modules) and _is_large(node)
    }


def is_wanted(node: Node) -> bool:
    """Return whether a node's value is read in backward, or by a recomputed node."""
    return any(meta.phase(user) == "backward" or meta.tag(user) == meta.RECOMPUTE for user in node.users)


def moved(node: Node) -> int:
    """Return the bytes that an operator reads and writes, plus the cost of its launch in bytes."""
    tensors = [x.meta.get("val") for x in (node, *node.all_input_nodes)]
    return START + sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))


def _is_large(node: Node) -> bool:
    """Return whether a value is large enough to be offloaded, and fills its whole storage."""
    x = node.meta.get("val")
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return False
    size = x.numel() * x.element_size()
    return size >= SMALLEST and size == x.untyped_storage().nbytes()


def _is_there(node: Node, forward: Forward) -> bool:
    """Return whether a value is free for backward: an input, a weight, or recomputed in any case."""
    is_made = forward.owner[node].op == "call_function"
    return not is_made or node in forward.weights or meta.tag(node) == meta.RECOMPUTE


def _is_cheap(node: Node, owner: Mapping[Node, Node]) -> bool:
    if node.target is operator.getitem:
        return owner[node] is not node  # a part of `split`, not of an operator with several results
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return is_view(node) or operator_of(node.target).elementwise or _is_constant(node)


def _is_constant(node: Node) -> bool:
    return not node.all_input_nodes and node.target.namespace == "aten"  # type: ignore[union-attr]
