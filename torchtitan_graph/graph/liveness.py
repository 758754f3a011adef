"""How much memory a graph's values take: what is alive at once, by the operators' own word on what shares memory."""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

import torchtitan_graph.ops  # noqa: F401 (registers the copies to the host's memory)
from torchtitan_graph.graph import meta
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
    """Give the most bytes of the host's memory that copies of activations take at once."""
    return max(held_memory(gm, lambda node: _num_bytes(node) if _is_activation_away(node) else 0).values())


def _is_activation_away(node: Node) -> bool:
    return node.target is _OFFLOAD and meta.role(node) is None


def held_memory(gm: GraphModule, size: Callable[[Node], int]) -> dict[Node, int]:
    """Give what is held while each node runs, in bytes, where a memory takes as many as `size` says of its owner."""
    owner, nodes = owners(gm), list(gm.graph.nodes)
    last_use = {owner[x]: i for i, node in enumerate(nodes) for x in (*node.all_input_nodes, node)}
    freed_at: dict[int, int] = collections.Counter()
    for node, i in last_use.items():
        freed_at[i] += size(node)
    now, held = 0, {}
    for i, node in enumerate(nodes):
        now += size(node) if owner[node] is node else 0
        held[node] = now
        now -= freed_at[i]
    return held


def output_memory(gm: GraphModule) -> int:
    """Give the bytes that a graph's outputs lie in, but for its inputs' memory."""
    owner, output = owners(gm), gm.graph.output_node()
    return sum(size_of(node) for node in {owner[x] for x in output.all_input_nodes})


def owners(gm: GraphModule) -> dict[Node, Node]:
    """Give for each node the one whose memory its value lies in: its own, unless it is a view or written in place."""
    owner: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        owner[node] = node
        if node.target is operator.getitem:
            (source,) = node.all_input_nodes
            if is_view(source):  # a part of `split`; of other tuples each element has memory of its own
                owner[node] = owner[source]
        elif node.target in _SILENT_VIEWS:
            owner[node] = owner[node.all_input_nodes[0]]
        elif sources := aliased(node):
            owner[node] = owner[sources[0][0]]
    return owner


def size_of(node: Node) -> int:
    """Give the bytes of the device's memory that a node's value lies in; of inputs and tuples none."""
    return 0 if node.target is _OFFLOAD else _num_bytes(node)


def _num_bytes(node: Node) -> int:
    value = node.meta.get("val") if node.op in ("call_function", "call_module") else None
    return value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0
