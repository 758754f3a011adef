"""A graph's communication: its collectives, by axis."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.graph.edit import value

GROUP_ARGUMENTS = ("group_name", "group")


class Traffic(NamedTuple):
    """The collectives of one kind along one axis: their number, and the least bytes that a rank receives in them."""

    number: int
    num_bytes: int


def traffic(gm: GraphModule, axes: Mapping[str, tuple]) -> dict[tuple[str, str], Traffic]:
    """Count a graph's collectives by (axis, kind).

    Args:
        axes: the axis and the degree of each group (and more, as in `Link`), by the group's name.

    An operator of any library counts if it takes the name of such a group, except waits; other groups, of a user's
    pass, do not. A rank receives: of an all-gather the others' parts, of a reduce-scatter the others' terms of its own
    part, of an all-reduce both, of an exchange all but its own part.
    """
    found: dict[tuple[str, str], Traffic] = {}
    for node in gm.graph.nodes:
        group = group_of(node)
        if group is not None and group in axes:
            axis, degree, *_ = axes[group]
            before = found.get((axis, kind_of(node)), Traffic(0, 0))
            found[axis, kind_of(node)] = Traffic(before.number + 1, before.num_bytes + received(node, degree))
    return found


def group_of(node: Node) -> str | None:
    """Return the name of a collective's group; None for other nodes."""
    if not isinstance(node.target, torch._ops.OpOverload) or (argument := _group_argument(node.target)) is None:
        return None
    place, name = argument
    given = node.args[place] if place < len(node.args) else node.kwargs.get(name)
    return given if isinstance(given, str) else None


@functools.cache
def _group_argument(target: torch._ops.OpOverload) -> tuple[int, str] | None:
    names = [argument.name for argument in target._schema.arguments]
    return next(((names.index(name), name) for name in GROUP_ARGUMENTS if name in names), None)


def kind_of(node: Node) -> str:
    """Return a collective's kind, the name of its operator."""
    return str(node.target._schema.name).partition("::")[2]  # type: ignore[union-attr]


def received(node: Node, degree: int) -> int:
    """Return the least bytes that a rank receives in a collective."""
    size, kind = num_bytes(value(node)), kind_of(node)
    if kind == "all_reduce":
        return 2 * size * (degree - 1) // degree
    if kind == "reduce_scatter_tensor":
        return size * (degree - 1)
    if is_permutation(node):
        return size
    return size * (degree - 1) // degree


def is_permutation(node: Node) -> bool:
    """Return whether a node is an exchange in which each rank receives from one other rank."""
    return node.target is torch.ops._c10d_functional.all_to_all_single.default and sum(map(bool, node.args[1])) == 1  # type: ignore[arg-type]


def num_bytes(values: Any) -> int:
    """Return the bytes of a node's value, a tensor or several."""
    if isinstance(values, torch.Tensor):
        return math.prod(values.shape) * values.element_size()
    return sum(map(num_bytes, values)) if isinstance(values, (tuple, list)) else 0


def stored_bytes(values: Any) -> int:
    """Return the bytes of memory of a node's value: an expanded dimension counts once."""
    if isinstance(values, torch.Tensor):
        # A stride that differs from call to call is no int, and never 0.
        repeats = [isinstance(step, int) and step == 0 for step in values.stride()]
        sizes = [size for size, repeated in zip(values.shape, repeats, strict=True) if not repeated]
        return math.prod(sizes) * values.element_size()
    return sum(map(stored_bytes, values)) if isinstance(values, (tuple, list)) else 0
