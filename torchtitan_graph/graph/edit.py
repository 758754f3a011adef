"""Edit a graph: new nodes with their shapes, dtypes and origin."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from torchtitan_graph.graph import meta


def value(node: Node) -> Any:
    """Give the fake tensor (or tuple of them) that stands for a node's value."""
    return node.meta["val"]


def call(graph: Graph, source: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a call at the graph's insertion point. Phase and module are those of `source`; its value is inferred."""
    node = graph.call_function(target, args, kwargs)
    meta.inherit(node, source)
    infer(node)
    return node


def infer(node: Node) -> None:
    """Compute the node's fake value from those of its inputs."""
    args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
    fakes = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    with fakes[0].fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def is_view(node: Node) -> bool:
    """Tell whether a node only looks at its first argument's memory (`getitem` of a tuple included)."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    return not schema.is_mutable and any(a.alias_info is not None for a in schema.arguments)


def aliased(node: Node) -> list[tuple[Node, bool]]:
    """Give the inputs whose memory a node's value shares or that it writes to, and whether it writes."""
    if node.target is operator.getitem:
        return [(node.args[0], False)]  # type: ignore[list-item]
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema, found = node.target._schema, []
    for i, argument in enumerate(schema.arguments):
        given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None:
            sources = given if isinstance(given, (list, tuple)) else [given]
            found += [(x, argument.alias_info.is_write) for x in sources if isinstance(x, Node)]
    return found


def erase_dead(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erase those of the nodes, last first, that nothing uses; FX itself never drops a wait for a collective."""
    for node in nodes:
        if not node.users:
            graph.erase_node(node)
