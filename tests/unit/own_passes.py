"""Passes of a user's own, right and wrong."""

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from torchtitan_graph.graph.edit import call
from torchtitan_graph.graph.signature import Signature, signature_of

NUMBER = 3
SEEN: list[Signature] = []


def keep(gm: GraphModule) -> GraphModule:
    return gm


def count(gm: GraphModule) -> GraphModule:
    SEEN.append(signature_of(gm))
    return gm


def takes_two(gm: GraphModule, level: int) -> GraphModule:
    return gm


def gives_nothing(gm: GraphModule) -> None:
    pass


def forgets_signature(gm: GraphModule) -> GraphModule:
    return GraphModule(gm, gm.graph)


def uses_before(gm: GraphModule) -> GraphModule:
    (first,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    (second,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default)
    second.append(first)
    return gm


def drops_output(gm: GraphModule) -> GraphModule:
    gm.graph.output_node().args = ((),)
    return gm


def adds_without_shape(gm: GraphModule) -> GraphModule:
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    with gm.graph.inserting_after(node):
        gm.graph.call_function(torch.ops.aten.neg.default, (node,))
    return gm


def cosine_without_recompiling(gm: GraphModule) -> GraphModule:
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
        node.target = torch.ops.aten.cos.default
    return gm


# --- on the graphs of models ------------------------------------------------------------------------------------------

aten = torch.ops.aten


def silus(gm: GraphModule) -> list[torch.fx.Node]:
    return list(gm.graph.find_nodes(op="call_function", target=aten.silu.default))


def double_silu(gm: GraphModule) -> GraphModule:
    """Compute other numbers."""
    for node in silus(gm):
        with gm.graph.inserting_after(node):
            twice = call(gm.graph, node, aten.add.Tensor, node, node)
        node.replace_all_uses_with(twice, delete_user_cb=lambda user, twice=twice: user is not twice)
    return gm


def round_silu(gm: GraphModule) -> GraphModule:
    """Compute other numbers, but for rounding the same."""
    for node in silus(gm):
        with gm.graph.inserting_after(node):
            off = call(gm.graph, node, aten.mul.Tensor, node, 1 + 1e-6)
        node.replace_all_uses_with(off, delete_user_cb=lambda user, off=off: user is not off)
    return gm


def trip_over_silu(gm: GraphModule) -> GraphModule:
    if silus(gm):
        raise IndexError("there is a silu")
    return gm


def forget_a_shape(gm: GraphModule) -> GraphModule:
    """Say that a transposed matrix is the matrix."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.t.default):
        node.meta["val"] = node.args[0].meta["val"]
    return gm


def swap_gathers_on_odd_ranks(gm: GraphModule) -> GraphModule:
    target = torch.ops._c10d_functional.all_gather_into_tensor.default
    first, second, *_ = [*gm.graph.find_nodes(op="call_function", target=target), None, None]
    if dist.get_rank() % 2 and second is not None:
        move_up(second, first)
    return gm


def move_up(node: torch.fx.Node, place: torch.fx.Node) -> None:
    """Put a node, and what it needs, before another."""
    order = {n: i for i, n in enumerate(place.graph.nodes)}
    for source in node.all_input_nodes:
        if order[source] > order[place]:
            move_up(source, place)
    place.prepend(node)
