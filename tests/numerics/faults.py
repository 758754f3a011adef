"""Faults that the checks of this folder must catch: in a graph, in the data, in a tensor."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from matrix import Cell, microbatches
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.traffic import is_permutation
from torchtitan_graph.data.batch import IGNORE_INDEX, Batch
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import call, value
from torchtitan_graph.graph.signature import output_nodes, set_outputs
from torchtitan_graph.ops.loss import cross_entropy_backward_

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
SUMS = (c10d.reduce_scatter_tensor.default, c10d.all_reduce.default)


# --- in a graph: each is a pass that breaks its promise -------------------------------------------------------------


def _sums(gm: GraphModule, role: str | None) -> list[Node]:
    found = [node for node in gm.graph.nodes if node.target in SUMS and meta.role(node) == role]
    assert found, "the fault has no place in this graph"
    return found


def gather_in_another_order_on_one_rank(gm: GraphModule) -> GraphModule:
    if dist.get_rank() == 1:
        first, second = gm.graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)[:2]
        for node in (*second.all_input_nodes, second):
            if node.op != "placeholder":
                first.prepend(node)
    return gm


def average_one_reduction(gm: GraphModule) -> GraphModule:
    (wait,) = _sums(gm, meta.REDUCE)[0].users
    return _scale(gm, wait, 0.5)


def take_the_largest_in_one_reduction(gm: GraphModule) -> GraphModule:
    node = _sums(gm, meta.REDUCE)[0]
    node.args = (node.args[0], "max", *node.args[2:])
    gm.recompile()
    return gm


def drop_one_reduction(gm: GraphModule) -> GraphModule:
    return _drop(gm, _sums(gm, meta.REDUCE)[0])


def drop_one_sum_of_activations(gm: GraphModule) -> GraphModule:
    return _drop(gm, _sums(gm, None)[0])


def scale_one_gather(gm: GraphModule) -> GraphModule:
    node = next(n for n in gm.graph.nodes if n.target is c10d.all_gather_into_tensor.default)
    (wait,) = node.users
    return _scale(gm, wait, 1.125)


def scale_one_gather_on_one_rank(gm: GraphModule) -> GraphModule:
    return scale_one_gather(gm) if dist.get_rank() == 0 else gm  # the rank whose batch has targets


def _scale(gm: GraphModule, node: Node, factor: float) -> GraphModule:
    users = list(node.users)
    with gm.graph.inserting_after(node):
        scaled = call(gm.graph, node, aten.mul.Tensor, node, factor)
    for user in users:
        user.replace_input_with(node, scaled)
    gm.recompile()
    return gm


def _drop(gm: GraphModule, node: Node) -> GraphModule:
    """Let a rank's own numbers stand for the sum: of a reduce_scatter, its first part."""
    (wait,) = node.users
    with gm.graph.inserting_before(node):
        own = call(gm.graph, node, aten.slice.Tensor, node.args[0], 0, 0, value(node).shape[0])
    wait.replace_all_uses_with(own)
    gm.graph.erase_node(wait)
    gm.graph.erase_node(node)
    gm.recompile()
    return gm


def merge_unequal(gm: GraphModule) -> GraphModule:
    """Take what two blocks do to different values for one and the same."""
    first, second, *_ = gm.graph.find_nodes(op="call_function", target=aten.silu.default)
    second.replace_all_uses_with(first)
    gm.recompile()
    return gm


def recompute_another(gm: GraphModule) -> GraphModule:
    """Compute again in backward what one elementwise operator made, from another block's values."""
    silus = gm.graph.find_nodes(op="call_function", target=aten.silu.default)
    first, second, *_ = [node for node in silus if meta.phase(node) == "backward"]
    second.args = first.args
    gm.recompile()
    return gm


def lose_a_write(gm: GraphModule) -> GraphModule:
    """Take for a sum in backward what it was before the last term was added in place."""
    sums = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    last = [node for node in sums if meta.phase(node) == "backward"][-1]
    last.replace_all_uses_with(last.args[0])
    gm.recompile()
    return gm


def cast_one_parameter_too_narrow(gm: GraphModule) -> GraphModule:
    casts = gm.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    cast = next(node for node in casts if meta.role(node) == meta.GATHER)
    with gm.graph.inserting_before(cast):
        narrow = call(gm.graph, cast, aten._to_copy.default, cast.args[0], dtype=torch.float8_e4m3fn)
    cast.args = (narrow,)
    gm.recompile()
    return gm


def swap_two_parts_of_a_bucket(gm: GraphModule) -> GraphModule:
    """Give two weights of one shape each other's part of what was gathered."""
    parts = [node for node in gm.graph.nodes if node.target is operator.getitem and meta.role(node) == meta.GATHER]
    first, second = _first_alike(parts, lambda node: (node.args[0], value(node).shape))
    first.args, second.args = second.args, first.args
    gm.recompile()
    return gm


def wait_for_another(gm: GraphModule) -> GraphModule:
    """Use one block's gathered weights where another's are waited for."""
    waits = [n for n in gm.graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)]
    gathers = [node for node in waits if meta.role(node) == meta.GATHER]
    first, second = _first_alike(gathers, lambda node: value(node).shape)
    second.replace_all_uses_with(first)
    gm.recompile()
    return gm


def fetch_another(gm: GraphModule) -> GraphModule:
    """Let one parameter's copy from the host be used for another."""
    arrived = gm.graph.find_nodes(op="call_function", target=torch.ops.torchtitan_graph.arrived.default)
    fetched = [node for node in arrived if meta.role(node) == meta.GATHER]
    first, second = _first_alike(fetched, lambda node: value(node).shape)
    second.replace_all_uses_with(first)
    gm.recompile()
    return gm


def use_before_it_is_there(gm: GraphModule) -> GraphModule:
    """Read what was gathered over the sequence before anything is in it."""
    waits = gm.graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)
    wait = next(n for n in waits if meta.role(n) is None and "gather" in str(n.args[0].target))
    with gm.graph.inserting_after(wait):
        empty = call(gm.graph, wait, aten.zeros_like.default, wait)
    wait.replace_all_uses_with(empty, delete_user_cb=lambda user: user is not empty)
    gm.recompile()
    return gm


def forget_a_part(gm: GraphModule) -> GraphModule:
    """Multiply nothing in the place of the rows of one other rank."""
    waits = gm.graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)
    return _scale(gm, next(n for n in waits if is_permutation(n.args[0])), 0.0)


def scale_every_silu(gm: GraphModule) -> GraphModule:
    for node in gm.graph.find_nodes(op="call_function", target=aten.silu.default):
        _scale(gm, node, 1.01)
    return gm


def _first_alike(nodes: list[Node], key: Callable[[Node], Any]) -> tuple[Node, Node]:
    seen: dict[Any, Node] = {}
    for node in nodes:
        if seen.setdefault(key(node), node) is not node:
            return seen[key(node)], node
    raise AssertionError("the fault has no place in this graph")


def begin_at_the_first_class(gm: GraphModule) -> GraphModule:
    """Look for targets in the columns of the logits as if each rank's began with the first class."""
    (terms,) = gm.graph.find_nodes(op="call_function", target=torch.ops.torchtitan_graph.cross_entropy_terms.default)
    columns = terms.args[1]
    if columns.target is aten.sub.Tensor:  # not on the rank that has the first
        columns.replace_all_uses_with(columns.args[0])
    gm.recompile()
    return gm


def shift_the_labels_of_the_gradient(gm: GraphModule) -> GraphModule:
    (back,) = gm.graph.find_nodes(op="call_function", target=cross_entropy_backward_)
    logits, labels, *others = back.args
    with gm.graph.inserting_before(back):
        back.args = (logits, call(gm.graph, back, aten.roll.default, labels, [1]), *others)
    gm.recompile()
    return gm


def forget_the_sum_of_exponentials(gm: GraphModule) -> GraphModule:
    """Compute the logits' gradient without the logarithm of the sum of their exponentials."""
    (back,) = gm.graph.find_nodes(op="call_function", target=cross_entropy_backward_)
    logits, columns, largest, log, scale = back.args
    with gm.graph.inserting_before(back):
        back.args = (logits, columns, largest, call(gm.graph, back, aten.zeros_like.default, log), scale)
    gm.recompile()
    return gm


def drop_gradients_of_sinks(gm: GraphModule) -> GraphModule:
    sinks = {name: node for name, node in output_nodes(gm, "grad").items() if name.endswith("sinks")}
    assert sinks, "the fault has no place in this graph"
    outputs = {}
    for name, node in sinks.items():
        with gm.graph.inserting_after(node):
            outputs[name] = call(gm.graph, node, aten.zeros_like.default, node)
    set_outputs(gm, "grad", outputs)
    gm.recompile()
    return gm


# --- in the data ----------------------------------------------------------------------------------------------------


def shift_the_mask(cell: Cell, dp_rank: int, step: int) -> tuple[list[Batch], Tensor]:
    batches, num_tokens = microbatches(cell, dp_rank, step)
    return [batch._replace(documents_BL=batch.documents_BL.roll(1, 1)) for batch in batches], num_tokens


def drop_a_microbatch(cell: Cell, dp_rank: int, step: int) -> tuple[list[Batch], Tensor]:
    batches, num_tokens = microbatches(cell, dp_rank, step)
    return batches[:-1], num_tokens


def count_own_targets_only(cell: Cell, dp_rank: int, step: int) -> tuple[list[Batch], Tensor]:
    batches, _ = microbatches(cell, dp_rank, step)
    return batches, torch.stack([(batch.labels_BL != IGNORE_INDEX).sum() for batch in batches]).sum()


# --- in a tensor ----------------------------------------------------------------------------------------------------


def flip_lowest_bit(tensor: Tensor) -> None:
    """Flip the lowest bit of this rank's last element."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local.detach().view(-1)[-1:].view(torch.uint8)[0] ^= 1
