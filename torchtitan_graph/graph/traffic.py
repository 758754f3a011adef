"""What a graph sends: its collectives, by axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node

from torchtitan_graph.graph.edit import value

GROUP_ARGUMENTS = ("group_name", "group")


class Traffic(NamedTuple):
    """The collectives of one kind along one axis: how many, and the bytes that a rank receives in them at least."""

    number: int
    num_bytes: int


def traffic(gm: GraphModule, axes: Mapping[str, tuple[str, int]]) -> dict[tuple[str, str], Traffic]:
    """Count a graph's collectives by (axis, kind).

    Args:
        axes: the axis and the degree of each group, by the group's name.

    An operator of any library counts that takes the name of such a group, but for those that only wait; other groups,
    of a user's pass, do not. Received are: of an all-gather the others' parts, of a reduce-scatter the others' terms of
    one's own part, of an all-reduce both, of an exchange all but what stays.
    """
    found: dict[tuple[str, str], Traffic] = {}
    for node in gm.graph.nodes:
        group = group_of(node)
        if group is not None and group in axes:
            kind = str(node.target._schema.name).partition("::")[2]
            axis, degree = axes[group]
            before = found.get((axis, kind), Traffic(0, 0))
            found[axis, kind] = Traffic(before.number + 1, before.num_bytes + _received(node, kind, degree))
    return found


def group_of(node: Node) -> str | None:
    """Name the group that a node communicates over, if it does."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    names = [argument.name for argument in node.target._schema.arguments]
    for name in filter(names.__contains__, GROUP_ARGUMENTS):
        place = names.index(name)
        given = node.args[place] if place < len(node.args) else node.kwargs.get(name)
        return given if isinstance(given, str) else None
    return None


def _received(node: Node, kind: str, degree: int) -> int:
    size = _bytes(value(node))
    if kind == "all_reduce":
        return 2 * size * (degree - 1) // degree
    if kind == "reduce_scatter_tensor":
        return size * (degree - 1)
    return size * (degree - 1) // degree


def _bytes(values: Any) -> int:
    return sum(math.prod(x.shape) * x.element_size() for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor))
