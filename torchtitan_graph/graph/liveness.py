"""How much memory a graph's values take: what is alive at once, by the operators' own word on what shares memory."""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.utils._pytree as pytree
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

import torchtitan_graph.ops  # noqa: F401 (registers the copies to the host's memory)
from torchtitan_graph.graph.edit import aliased, is_view

# They give their argument's memory without saying so in their schemas.
_SILENT_VIEWS = (torch.ops.aten._unsafe_view.default, torch.ops._c10d_functional.wait_tensor.default)
_OFFLOAD = torch.ops.torchtitan_graph.offload.default


class Peak(NamedTuple):
    """The most bytes that a graph's values hold at once, beside its inputs, and the node that runs then."""

    num_bytes: int
    node: Node


def peak_memory(gm: GraphModule) -> Peak:
    """Find when a graph holds most, each value being freed after its last use; outputs are held to the end.

    What an operator needs only while it runs is not counted, nor what an allocator rounds up.
    """
    held = held_memory(gm, size_of)
    node = max(held, key=held.__getitem__)
    return Peak(held[node], node)


def host_memory(gm: GraphModule) -> int:
    """Give the most bytes of the host's memory that copies of a graph's values take at once."""
    return max(held_memory(gm, lambda node: _num_bytes(node) if node.target is _OFFLOAD else 0).values())


def held_memory(gm: GraphModule, size: Callable[[Node], int]) -> dict[Node, int]:
    """Give what is held while each node runs, in bytes, where a memory takes as many as `size` says of its owner."""
    memories, nodes = Memories(gm), list(gm.graph.nodes)
    last_use = {owner: i for i, node in enumerate(nodes) for owner in memories.used(node)}
    freed_at: dict[int, int] = collections.Counter()
    for owner, i in last_use.items():
        freed_at[i] += size(owner)
    now, held = 0, {}
    for i, node in enumerate(nodes):
        now += sum(map(size, memories.taken(node)))
        held[node] = now
        now -= freed_at[i]
    return held


def output_memory(gm: GraphModule) -> int:
    """Give the bytes that a graph's outputs lie in, but for its inputs' memory."""
    owner, output = owners(gm), gm.graph.output_node()
    return sum(size_of(node) for node in {owner[x] for x in output.all_input_nodes})


class Memories:
    """When the memories of a graph's values are taken, and used. Each is called by its owner, see `owners`.

    All results of an operator that gives several are there while it runs, and until the last of them is picked.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.owner = owners(gm)
        self._results: dict[Node, list[Node]] = {}
        for node in gm.graph.nodes:
            if self.owner[node] is node and node.target is operator.getitem:
                self._results.setdefault(node.all_input_nodes[0], []).append(node)

    def results(self, node: Node) -> list[Node]:
        """Give the memories of those results of an operator with several that the graph picks."""
        return self._results.get(node, [])

    def taken(self, node: Node) -> list[Node]:
        """Give the memories that begin with a node."""
        is_own = self.owner[node] is node and node.target is not operator.getitem
        return [node] * is_own + self.results(node)

    def used(self, node: Node) -> set[Node]:
        """Give the memories that have to be there while a node runs."""
        return {owner for x in (*node.all_input_nodes, node) for owner in (self.owner[x], *self.results(x))}


def owners(gm: GraphModule) -> dict[Node, Node]:
    """Give for each node the one whose memory its value lies in: its own, unless it is a view or written in place."""
    owner: dict[Node, Node] = {}
    picked: dict[tuple[Node, object], Node] = {}
    for node in gm.graph.nodes:
        owner[node] = node
        if node.target is operator.getitem:
            (source,) = node.all_input_nodes
            # A part of `split`; of other tuples each element has memory of its own.
            owner[node] = owner[source] if is_view(source) else picked.setdefault((source, node.args[1]), node)
        elif node.target in _SILENT_VIEWS:
            owner[node] = owner[node.all_input_nodes[0]]
        elif sources := aliased(node):
            owner[node] = owner[sources[0][0]]
    return owner


def readers_of_memory(gm: GraphModule) -> dict[Node, set[Node]]:
    """Give who reads each memory, by its owner; views of it don't, but what reads them does."""
    owner, found = owners(gm), collections.defaultdict[Node, set[Node]](set)
    for node in gm.graph.nodes:
        for source in node.all_input_nodes:
            if owner[source] is not owner[node]:
                found[owner[source]].add(node)
    return found


def size_of(node: Node) -> int:
    """Give the bytes of the device's memory that a node's value lies in, of several results those that none picks; of
    inputs none."""
    return 0 if node.target is _OFFLOAD else _num_bytes(node)


def _num_bytes(node: Node) -> int:
    value = node.meta.get("val") if node.op in ("call_function", "call_module") else None
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    if not isinstance(value, (tuple, list)):
        return 0
    if node.target is not operator.getitem:
        # Views have no memory of their own, and a region's function only lists what it is given.
        if is_view(node) or not isinstance(node.target, (OpOverload, HigherOrderOperator)):
            return 0
        picked = {user.args[1] for user in node.users if user.target is operator.getitem}
        value = [x for i, x in enumerate(value) if i not in picked]
    return sum(x.untyped_storage().nbytes() for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor))
