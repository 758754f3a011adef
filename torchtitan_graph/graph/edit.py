"""Edit a graph: new nodes with their shapes, dtypes and origin."""

from __future__ import annotations

import functools
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
    """Compute the node's fake value from those of its inputs.

    Layers are alike: what was found for inputs of the same layouts is given again. It is kept on the fake mode, and
    lives no longer than the values themselves.
    """
    args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
    leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
    fake_mode = next(x for x in leaves if isinstance(x, torch.Tensor)).fake_mode  # type: ignore[attr-defined]
    known = vars(fake_mode).setdefault("inferred", {})
    key = (node.target, spec, tuple(map(_layout, leaves)))
    if key not in known:
        with fake_mode:
            known[key] = node.target(*args, **kwargs)  # type: ignore[operator]
    node.meta["val"] = known[key]


def _layout(leaf: Any) -> tuple:
    """Give all of an operator's argument that its result's layout may depend on."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device
    return type(leaf), leaf


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
    found = []
    for i, name, is_write in _shared_arguments(node.target):
        given = node.args[i] if i < len(node.args) else node.kwargs.get(name)
        sources = given if isinstance(given, (list, tuple)) else [given]
        found += [(x, is_write) for x in sources if isinstance(x, Node)]
    return found


@functools.cache
def _shared_arguments(target: torch._ops.OpOverload) -> list[tuple[int, str, bool]]:
    """Give the arguments whose memory an operator's value shares or that it writes to: place, name, whether it writes.
    To read a schema takes longer than to look at a node."""
    arguments = enumerate(target._schema.arguments)
    return [(i, a.name, a.alias_info.is_write) for i, a in arguments if a.alias_info is not None]


def erase_dead(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erase those of the nodes, last first, that nothing uses; FX itself never drops a wait for a collective."""
    for node in nodes:
        if not node.users:
            graph.erase_node(node)
