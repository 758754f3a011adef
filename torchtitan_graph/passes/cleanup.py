"""Remove what tracing leaves behind."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import aliased, call, erase_unused, infer, is_view, value

aten = torch.ops.aten


def cleanup(gm: GraphModule) -> GraphModule:
    """Drop detached aliases and unused nodes; turn in-place writes to the graph's own values into new values. Bitwise.

        y = detach(x); z = add_(y, 1); w = mul(y, 2)
        z = add(x, 1); w = mul(z, 2)

    After this pass a node's value never changes, so that other passes may recompute and move nodes.

    Raises:
        UserError: a write that another view of the same memory would see, one to an input, or one without a functional
            form; names the operator and the module.
    """
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    current: dict[Node, Node] = {}  # a node whose value was overwritten, or an alias -> the node that holds it now

    def now(node: Node) -> Node:
        while node in current:
            node = current[node]
        return node

    memory: dict[Node, list[Node]] = {}  # a node -> all that lie in the same memory, in one shared list
    for node in gm.graph.nodes:
        if not current.keys().isdisjoint(node.all_input_nodes):
            node.args, node.kwargs = map_arg(node.args, now), map_arg(node.kwargs, now)
        shared = aliased(node)
        if node.target in (aten.detach.default, aten.alias.default):
            current[node] = node.args[0]
            continue
        if any(is_write for _, is_write in shared):
            written = _written(node)
            others = [n for n in memory.get(written, ()) if n is not written]
            seen = [n for n in others if any(order[user] > order[node] for user in n.users)]
            if seen or written.op in ("placeholder", "get_attr"):
                what = f"memory that {seen[0].name} shows as well" if seen else "an input"
                raise UserError(f"{_where(node)} writes in place to {what}: compute a new tensor instead")
            node.target = _functional(node)
            infer(node)
            current[written] = _as_stored(gm, node, written)
            order[current[written]] = order[node]
        elif shared and (node.target is not operator.getitem or is_view(shared[0][0])):  # else it has its own
            together = memory.setdefault(shared[0][0], [shared[0][0]])
            together.append(node)
            memory[node] = together
    erase_unused(gm)
    gm.recompile()
    return gm


def _as_stored(gm: GraphModule, node: Node, written: Node) -> Node:
    """Cast a new value to the dtype of the memory that it was written to, where the operator alone would widen it."""
    if value(node).dtype == value(written).dtype:
        return node
    with gm.graph.inserting_after(node):
        cast = call(gm.graph, node, aten._to_copy.default, node, dtype=value(written).dtype)
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    return cast


def _written(node: Node) -> Node:
    """Give the one tensor that an in-place operator writes to: its first argument."""
    written = [source for source, is_write in aliased(node) if is_write]
    if written != [node.args[0]]:
        raise UserError(f"{_where(node)} writes to {written}, not to its first argument: compute a new tensor instead")
    return written[0]


def _functional(node: Node) -> torch._ops.OpOverload:
    """Give `aten::add` for `aten::add_`: the overload that takes the same, for `pow_.Scalar` is `pow.Tensor_Scalar`."""
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
