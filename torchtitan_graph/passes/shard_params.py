"""Layout pass for sharding: parameters enter as shards, gradients leave as shards."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import Chain, feeding_users, recast, value
from torchtitan_graph.graph.signature import (
    TensorLayout,
    input_nodes,
    output_nodes,
    set_layouts,
    set_outputs,
    signature_of,
)
from torchtitan_graph.parallel.storage import Storage

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


_SUM = (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default, c10d.wait_tensor.default)


def shard_params(gm: GraphModule, storages: Mapping[str, Storage]) -> GraphModule:
    """Gather each parameter from its shards, reduce each gradient to its shard. A layout pass.

        w (4096, 512) -> use            ... -> dw (4096, 512)
        w (512, 512) -> all_gather -> use   ... -> dw (4096, 512) -> reduce_scatter (512, 512) [-> all_reduce]

    Rows that do not divide are padded outside the graph (parameters) and inside (gradients). With one rank on the axis
    that shards nothing is gathered; the axis that replicates adds the sum over copies. A buffer that has a storage, a
    quantised weight, is gathered as a parameter is, in bytes.
    """
    parameters, gradients = input_nodes(gm, "param"), output_nodes(gm, "grad")
    quantised = {name: node for name, node in input_nodes(gm, "buffer").items() if name in storages}
    for name, placeholder in (parameters | quantised).items():
        if storages[name].shard_degree > 1 and placeholder.users:
            _gather(name, placeholder, storages[name])
    reduced = {}
    for name, gradient in gradients.items():
        _move_up(gradient)
        reduced[name] = _reduce(name, gradient, storages[name])
    set_outputs(gm, "grad", reduced)
    set_layouts(gm, ("param", "grad"), storages)
    set_layouts(gm, ("buffer",), _layouts_of_buffers(gm) | {name: storages[name] for name in quantised})
    gm.recompile()
    return gm


def _gather(name: str, placeholder: Node, storage: Storage) -> None:
    placeholder.meta["val"] = recast(value(placeholder), value(placeholder).dtype, storage.padded_shape)
    degree, dim, dtype = storage.shard_degree, storage.dim, value(placeholder).dtype
    is_byte = dtype.itemsize == 1 and dtype.is_floating_point  # gloo has no such dtype
    with feeding_users(placeholder, role=meta.GATHER, param=name, phase="forward") as chain:
        if is_byte:
            chain.then(aten.view.dtype, torch.uint8)
        chain.then(c10d.all_gather_into_tensor.default, degree, storage.shard_group.group_name)
        chain.then(c10d.wait_tensor.default)
        if dim:  # the shards arrive concatenated along dim 0
            axes = list(range(len(storage.compute_shape) + 1))
            axes.insert(dim, axes.pop(0))
            chain.then(aten.view.default, [degree, *storage.padded_shape]).then(aten.permute.default, axes)
            chain.then(aten.clone.default, memory_format=torch.contiguous_format)
            chain.then(aten.view.default, list(storage.compute_shape))
        elif value(chain.last).shape[0] != storage.compute_shape[0]:
            chain.then(aten.slice.Tensor, 0, 0, storage.compute_shape[0])
        if is_byte:
            chain.then(aten.view.dtype, dtype)


def _layouts_of_buffers(gm: GraphModule) -> dict[str, TensorLayout]:
    return {slot.name: slot.layout for slot in signature_of(gm).inputs if slot.kind == "buffer"}


def _move_up(gradient: Node) -> None:
    """Move the sum that finishes a gradient over tensor parallel's ranks to where its terms are computed. It is traced
    last of all, and the reduction of a whole block would wait for it there."""
    chain = [gradient]
    while chain[0].target in _SUM:
        chain.insert(0, chain[0].args[0])  # type: ignore[arg-type]
    for before, node in itertools.pairwise(chain):
        before.append(node)


def _reduce(name: str, gradient: Node, storage: Storage) -> Node:
    degree, dim = storage.shard_degree, storage.dim
    padding = storage.padded_shape[dim] * degree - storage.compute_shape[dim]
    end = gradient.next
    chain = Chain(end, gradient, gradient)  # not marked as part of the reduction, as in FSDP2
    if not value(gradient).is_contiguous():
        # Collectives refuse it, and fused optimizers would read its memory in the parameter's order.
        chain.then(aten.clone.default, memory_format=torch.contiguous_format)
    if dim and degree > 1:  # the ranks' parts, concatenated along dim 0
        sizes, axes = list(storage.compute_shape), list(range(len(storage.compute_shape) + 1))
        sizes[dim : dim + 1] = [degree, storage.padded_shape[dim]]
        axes.insert(0, axes.pop(dim))
        chain.then(aten.view.default, sizes).then(aten.permute.default, axes)
        chain.then(aten.clone.default, memory_format=torch.contiguous_format)
        chain.then(aten.view.default, [-1, *storage.padded_shape[1:]])
    chain = Chain(end, chain.last, gradient, role=meta.REDUCE, param=name)
    if padding:
        chain.then(aten.constant_pad_nd.default, [0, 0] * (len(storage.compute_shape) - 1) + [0, padding], 0.0)
    if degree > 1:
        chain.then(c10d.reduce_scatter_tensor.default, "sum", degree, storage.shard_group.group_name)
        chain.then(c10d.wait_tensor.default)
    if storage.replicate_degree > 1:
        chain.then(c10d.all_reduce.default, "sum", storage.replicate_group.group_name).then(c10d.wait_tensor.default)
    return chain.last
