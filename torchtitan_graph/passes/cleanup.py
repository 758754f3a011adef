"""Functionalization, and removal of aliases and unused nodes that tracing leaves."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import aliased, call, erase_unused, infer, is_view, value
from torchtitan_graph.ops.operator import operator_of

aten = torch.ops.aten


def cleanup(gm: GraphModule) -> GraphModule:
    """Drop detached aliases and unused nodes; turn in-place writes to the graph's own values into new values. Bitwise.

        y = detach(x); z = add_(y, 1); w = mul(y, 2)
        z = add(x, 1); w = mul(z, 2)

        y = empty(); v = slice(y, 0, 2); copy_(v, a); return y
        y = empty(); v = slice(y, 0, 2); w = copy(v, a); z = slice_scatter(y, w, 0, 2); return z

    After this pass a node's value never changes, so that other passes may recompute and move nodes; except that the
    loss's gradient is written over logits that nothing reads any more: no policy recomputes readers of such memory.

    Raises:
        UserError: a write to an input, one without a functional form, or one through a view that has no inverse while
            others look at the same memory; names the operator and the module.
    """
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    memory: dict[Node, list[Node]] = {}  # a node -> all nodes that share its memory, in one shared list
    for node in list(gm.graph.nodes):
        shared = aliased(node)
        if node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        elif any(is_write for _, is_write in shared):
            written = _written(node)
            together = memory.get(written, [written])
            if together[0].op in ("placeholder", "get_attr"):
                raise UserError(f"{_where(node)} writes in place to an input: compute a new tensor instead")
            read_later = {n for n in together if any(order[user] > order[node] for user in n.users)}
            if operator_of(node.target).overwrites and not read_later:
                continue
            is_seen = bool(read_later - {written})
            where, node.target = _where(node), _functional(node)
            infer(node)
            new = _as_stored(gm, node, written)
            order[new] = order[node]
            looks = {written: new}
            if is_seen:
                looks = _looks(gm, new, written, together, order, where)
                memory.update(dict.fromkeys(looks.values(), list(looks.values())))
                looks[new] = looks[written]
            for old, look in looks.items():
                _replace_from(old, look, order)
        elif shared and (node.target is not operator.getitem or is_view(shared[0][0])):  # else it owns it
            together = memory.setdefault(shared[0][0], [shared[0][0]])
            together.append(node)
            memory[node] = together
    erase_unused(gm)
    gm.recompile()
    return gm


def _looks(
    gm: GraphModule, new: Node, written: Node, together: list[Node], order: dict[Node, int], where: str
) -> dict[Node, Node]:
    """Insert the new value of a whole memory from one view's new value; return the new view of each node in that
    memory."""
    made: list[Node] = []

    def insert(target: Any, *args: Any, **kwargs: Any) -> Node:
        with gm.graph.inserting_after(made[-1] if made else new):
            made.append(call(gm.graph, new, target, *args, **kwargs))
        order[made[-1]] = order[new]
        return made[-1]

    # The memory's new value is built first, through each view in turn; then the views of it are taken again.
    base, whole, view = together[0], new, written
    while view is not base:
        whole, view = _put_back(insert, whole, view, base, where), view.args[0]  # type: ignore[assignment]
    needed = {written}
    for n in reversed(together):
        if n in needed or any(order[user] > order[new] for user in n.users):
            needed |= {n, *n.all_input_nodes}
    looks = {base: whole}
    for n in together[1:]:
        if n in needed:
            looks[n] = insert(n.target, looks[n.args[0]], *n.args[1:], **n.kwargs)  # type: ignore[index]
    return looks


def _put_back(insert: Callable[..., Node], new: Node, view: Node, base: Node, where: str) -> Node:
    """Insert the source of a view with a new value in the view's place; `base` is the node that made the memory."""
    of: Any = view.args[0]
    shape = value(of).shape if isinstance(value(of), torch.Tensor) else None
    if view.target in _SCATTER and not (view.target is aten.as_strided.default and _leaves_out(of, base)):
        return insert(_SCATTER[view.target], of, new, *view.args[1:], **view.kwargs)
    if view.target in _RESHAPED and shape is not None and all(isinstance(n, int) for n in shape):
        return insert(aten.reshape.default, new, list(shape))
    if view.target in (aten.t.default, aten.transpose.int):
        return insert(view.target, new, *view.args[1:])
    if view.target is aten.permute.default:
        dims = [d % len(shape) for d in view.args[1]]  # type: ignore[arg-type, operator, union-attr]
        return insert(aten.permute.default, new, [dims.index(d) for d in range(len(dims))])
    raise UserError(
        f"{where} writes in place to a view ({_operator(view)}) of what {_operator(base)} gave, which something else"
        " reads afterwards: compute a new tensor instead"
    )


def _leaves_out(of: Node, base: Node) -> bool:
    """Return whether `of` has fewer elements than its memory; `as_strided` may show the others."""
    return value(of).numel() != value(base).numel()


def _operator(node: Node) -> str:
    """Return the operator of a node as text; for a part of a tuple, the operator that made the tuple."""
    return str(node.args[0].target if node.target is operator.getitem else node.target)  # type: ignore[union-attr]


# Operators that write a new value back where a view was taken.
_SCATTER = {
    aten.as_strided.default: aten.as_strided_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
}
_RESHAPED = (
    *(aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
)


def _replace_from(old: Node, new: Node, order: dict[Node, int]) -> None:
    """Replace `old` by `new` in the nodes after `new`."""
    old.replace_all_uses_with(new, delete_user_cb=lambda user: order[user] > order[new])


def _as_stored(gm: GraphModule, node: Node, written: Node) -> Node:
    """Cast a new value to the dtype of the memory it was written to, where the operator alone would widen it."""
    if value(node).dtype == value(written).dtype:
        return node
    with gm.graph.inserting_after(node):
        cast = call(gm.graph, node, aten._to_copy.default, node, dtype=value(written).dtype)
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    return cast


def _written(node: Node) -> Node:
    """Return the one tensor that an in-place operator writes to: its first argument."""
    written = [source for source, is_write in aliased(node) if is_write]
    if written != [node.args[0]]:
        raise UserError(f"{_where(node)} writes to {written}, not to its first argument: compute a new tensor instead")
    return written[0]


def _functional(node: Node) -> torch._ops.OpOverload:
    """Return `aten::add` for `aten::add_`: the overload of equal arguments, `pow.Tensor_Scalar` for `pow_.Scalar`."""
    op: torch._ops.OpOverload = node.target  # type: ignore[assignment]
    packet, name = op._schema.name.split("::")
    functional = getattr(getattr(torch.ops, packet), name.removesuffix("_"), None)
    if name.endswith("_") and functional is not None:
        for overload in (getattr(functional, each) for each in functional.overloads()):
            if _takes(overload) == _takes(op):
                return overload  # type: ignore[no-any-return]
    raise UserError(f"{_where(node)} has no form that writes nothing: compute a new tensor instead")


def _takes(op: torch._ops.OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments]


def _where(node: Node) -> str:
    return f"cleanup: {node.target} in {meta.module(node) or 'the traced function'}"
