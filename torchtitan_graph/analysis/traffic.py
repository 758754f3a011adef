"""A graph's communication: its collectives, by axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.graph.edit import value
from torchtitan_graph.ops.operator import OTHER_COLLECTIVE, Collective, group_argument, num_bytes, operator_of


class Traffic(NamedTuple):
    """The collectives of one kind along one axis: their number, and the least bytes that a rank receives in them."""

    number: int
    num_bytes: int


def traffic(gm: GraphModule, axes: Mapping[str, tuple]) -> dict[tuple[str, str], Traffic]:
    """Count a graph's collectives by (axis, kind).

    Args:
        axes: the axis and the degree of each group (and more, as in `Link`), by the group's name.

    An operator of any library counts if it takes the name of such a group, except waits; other groups, of a user's
    pass, do not.
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
    if operator_of(node.target).collective is None or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if (argument := group_argument(node.target)) is None:
        return None
    place, name = argument
    given = node.args[place] if place < len(node.args) else node.kwargs.get(name)
    return given if isinstance(given, str) else None


def kind_of(node: Node) -> str:
    """Return a collective's kind, the name of its operator."""
    return str(node.target._schema.name).partition("::")[2]  # type: ignore[union-attr]


def received(node: Node, degree: int) -> int:
    """Return the least bytes that a rank receives in a collective."""
    if is_permutation(node):
        return num_bytes(value(node))
    return collective_of(node).received(num_bytes(value(node)), degree)


def collective_of(node: Node) -> Collective:
    """Return the kind of a collective."""
    return operator_of(node.target).collective or OTHER_COLLECTIVE


def is_permutation(node: Node) -> bool:
    """Return whether a node is an exchange in which each rank receives from one other rank."""
    return node.target is torch.ops._c10d_functional.all_to_all_single.default and sum(map(bool, node.args[1])) == 1  # type: ignore[arg-type]
