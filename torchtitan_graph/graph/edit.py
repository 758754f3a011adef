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
    """Insert a call at the graph's insertion point. It inherits phase and module from `source`; its value is inferred."""
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


def erase_dead(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erase those of the nodes, last first, that nothing uses; FX itself never drops a wait for a collective."""
    for node in nodes:
        if not node.users:
            graph.erase_node(node)
