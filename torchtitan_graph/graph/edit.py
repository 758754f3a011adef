"""Edit a graph: insert nodes with their fake values and origin."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from torchtitan_graph.graph import meta
from torchtitan_graph.torch_private.tracing import set_arguments


def value(node: Node) -> Any:
    """Return the fake tensor (or tuple of them) that stands for a node's value."""
    return node.meta["val"]


def fact(of_call: Callable[..., Any], node: Node) -> Any:
    """Return a fact about a call, from a function of its fake arguments and result; see `ops.operator.Operator`. Layers
    are alike: it is cached by the layouts of these, on the graph."""
    known, out = vars(node.graph).setdefault("facts", {}), node.meta.get("val")
    key = (of_call, node.target, _layout(node.args), _layout(node.kwargs), _layout(out))
    try:
        return known[key]
    except KeyError:
        keep = True
    except TypeError:  # a size that may differ from call to call has no hash
        keep = False
    args, kwargs = map_arg((node.args, node.kwargs), lambda x: x.meta.get("val"))
    found = of_call(*args, **kwargs, out_val=out)
    if keep:
        known[key] = found
    return found


def call(graph: Graph, source: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a call at the graph's insertion point, with phase and module of `source` and an inferred fake value."""
    node = _create(graph, "call_function", target, args, kwargs)
    meta.inherit(node, source)
    infer(node)
    return node


class Chain:
    """Calls that are inserted before a node, each of the result of the one before it.

    at      the node before which they are inserted
    last    the last one; at first the node that they begin from
    source  where they take phase and module from; `marks` are their other metadata
    """

    def __init__(self, at: Node, last: Node, source: Node, **marks: Any) -> None:
        self._at, self.last, self._source, self._marks = at, last, source, marks

    def then(self, target: Any, *args: Any, **kwargs: Any) -> Chain:
        """Insert a call of an operator on the last result and other arguments."""
        graph = self._at.graph
        with graph.inserting_before(self._at):
            self.last = call(graph, self._source, target, self.last, *args, **kwargs)
        meta.write(self.last, **self._marks)
        return self


@contextlib.contextmanager
def feeding_users(node: Node, **marks: Any) -> Iterator[Chain]:
    """Insert the calls of the yielded chain, which begins at a node, before the node's first user; on leaving the
    context, its users read the last call instead."""
    users = list(node.users)
    chain = Chain(min(users), node, min(users), **marks)
    yield chain
    for user in users:
        user.replace_input_with(node, chain.last)


def copy_node(graph: Graph, node: Node, transform: Callable[[Node], Any]) -> Node:
    """Copy a node, possibly of another graph, to the graph's insertion point, as FX's `node_copy` does."""
    args, kwargs = map_arg(node.args, transform), map_arg(node.kwargs, transform)
    new = _create(graph, node.op, node.target, args, kwargs, node.name)
    new.meta.update(node.meta)
    meta.own_annotations(new)
    return new


def copy_graph(gm: GraphModule) -> GraphModule:
    """Return a copy of a graph. In FX's own copy, nodes share their annotations with the original's."""
    copied = copy.deepcopy(gm)
    for inner in copied.modules():
        for node in inner.graph.nodes if isinstance(inner, GraphModule) else ():
            meta.own_annotations(node)
    return copied


def _create(graph: Graph, op: str, target: Any, args: Any, kwargs: Any, name: str | None = None) -> Node:
    """Create a node and set its arguments afterwards: FX searches arguments passed at creation for symbolic numbers,
    which a graph here never has, and that takes as long as all the rest."""
    node = graph.create_node(op, target, name=name)
    set_arguments(node, args, kwargs)
    return node


def infer(node: Node) -> None:
    """Compute the node's fake value from those of its inputs.

    Layers are alike: the result is cached by the layouts of the inputs. The cache is on the fake mode, and lives no
    longer than the values themselves.
    """
    leaves = torch.utils._pytree.tree_leaves(value(node.all_input_nodes[0]))
    fake_mode = next(x for x in leaves if isinstance(x, torch.Tensor)).fake_mode  # type: ignore[attr-defined]
    known = vars(fake_mode).setdefault("inferred", {})
    key = (node.target, _layout(node.args), _layout(node.kwargs))
    if key not in known:
        args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
        with fake_mode:
            known[key] = node.target(*args, **kwargs)  # type: ignore[operator]
    node.meta["val"] = known[key]


def recast(x: Any, dtype: torch.dtype, shape: Sequence[int] | None = None) -> Any:
    """Return a fake tensor of another dtype and the same layout; or of another shape, contiguous. Cached as in
    `infer`."""
    known = vars(x.fake_mode).setdefault("inferred", {})
    key = ("recast", _layout(x), dtype, shape and tuple(shape))
    if key not in known:
        known[key] = x.to(dtype) if shape is None else x.new_empty(shape, dtype=dtype)
    return known[key]


def _layout(argument: Any) -> tuple:
    """Return everything in an operator's argument that its result's layout may depend on, as a cache key."""
    if isinstance(argument, Node):
        argument = argument.meta.get("val")
    if isinstance(argument, torch.Tensor):
        x = argument
        return x.shape, x.stride(), x.storage_offset(), x.dtype, x.device
    if isinstance(argument, (list, tuple)):
        return len(argument), *map(_layout, argument)
    if isinstance(argument, dict):
        return tuple((name, _layout(x)) for name, x in argument.items())
    return type(argument), argument


def is_view(node: Node) -> bool:
    """Return whether a node's value is a view of its first argument (`getitem` of a tuple included)."""
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and _gives_a_view(node.target)


@functools.cache
def _gives_a_view(target: torch._ops.OpOverload) -> bool:
    return not target._schema.is_mutable and bool(shared_arguments(target))


def aliased(node: Node) -> list[tuple[Node, bool]]:
    """Return the inputs that a node's value may alias or that it writes to, and whether it writes."""
    if node.target is operator.getitem:
        return [(node.args[0], False)]  # type: ignore[list-item]
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    found = []
    for i, name, is_write in shared_arguments(node.target):
        given = node.args[i] if i < len(node.args) else node.kwargs.get(name)
        sources = given if isinstance(given, (list, tuple)) else [given]
        found += [(x, is_write) for x in sources if isinstance(x, Node)]
    return found


@functools.cache
def shared_arguments(target: torch._ops.OpOverload) -> list[tuple[int, str, bool]]:
    """Return the arguments that an operator's result may alias or that it writes to: place, name, whether it writes.
    Cached: parsing a schema takes longer than visiting a node."""
    arguments = enumerate(target._schema.arguments)
    return [(i, a.name, a.alias_info.is_write) for i, a in arguments if a.alias_info is not None]


def put_in_order(nodes: Sequence[Node]) -> None:
    """Move nodes of one graph behind the first of them, in an order."""
    for before, node in itertools.pairwise(nodes):
        if before.next is not node:
            before.append(node)


def erase_unused(gm: GraphModule) -> None:
    """Erase unused nodes without side effects, in subgraphs as well. FX's `eliminate_dead_code` does the same, but
    first checks the whole graph, and tests every node for side effects, not only the unused."""
    for node in reversed(gm.graph.nodes):
        if not node.users and not node.is_impure():
            gm.graph.erase_node(node)
    for node in gm.graph.find_nodes(op="get_attr"):
        if isinstance(nested := getattr(gm, str(node.target)), GraphModule):
            erase_unused(nested)


def erase_dead(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erase those of `nodes` that are unused, last first; FX itself never erases a wait for a collective."""
    for node in nodes:
        if not node.users:
            graph.erase_node(node)


def shape_of(val: object) -> str:
    """Return a value's dtype and shape, as `float32[4, 8]`; of a tuple, each one's."""
    if isinstance(val, torch.Tensor):
        return f"{str(val.dtype).removeprefix('torch.')}{list(val.shape)}"
    return f"({', '.join(map(shape_of, val))})" if isinstance(val, (tuple, list)) else ""
