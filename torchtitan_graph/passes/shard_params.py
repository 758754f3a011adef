"""Storage layout, first half: parameters arrive as shards, gradients leave as shards."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import call, value
from torchtitan_graph.graph.signature import input_nodes, output_nodes, set_layouts, set_outputs
from torchtitan_graph.parallel.storage import Storage

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def shard_params(gm: GraphModule, storages: Mapping[str, Storage]) -> GraphModule:
    """Gather each parameter from its shards, reduce each gradient to its shard. A layout pass.

        w (4096, 512) -> use            ... -> dw (4096, 512)
        w (512, 512) -> all_gather -> use   ... -> dw (4096, 512) -> reduce_scatter (512, 512) [-> all_reduce]

    Rows that do not divide are padded outside the graph (parameters) and inside (gradients). With one rank on
    `dp_shard` nothing is gathered; `dp_replicate` adds the sum over copies.
    """
    parameters, gradients = input_nodes(gm, "param"), output_nodes(gm, "grad")
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for name, placeholder in parameters.items():
        if storages[name].shard_degree > 1 and placeholder.users:
            first = min(placeholder.users, key=order.__getitem__)
            _gather(gm, name, placeholder, first, storages[name])
    reduced = {name: _reduce(gm, name, gradient, storages[name]) for name, gradient in gradients.items()}
    set_outputs(gm, "grad", reduced)
    set_layouts(gm, ("param", "grad"), storages)
    gm.recompile()
    return gm


def _gather(gm: GraphModule, name: str, placeholder: Node, first: Node, storage: Storage) -> None:
    users = list(placeholder.users)
    placeholder.meta["val"] = value(placeholder).new_empty(storage.padded_shape)
    degree, rows = storage.shard_degree, storage.compute_shape[0]
    with gm.graph.inserting_before(first):
        start = call(
            gm.graph, first, c10d.all_gather_into_tensor.default, placeholder, degree, storage.group_name("dp_shard")
        )
        nodes = [start, call(gm.graph, first, c10d.wait_tensor.default, start)]
        if value(start).shape[0] != rows:
            nodes.append(call(gm.graph, first, aten.slice.Tensor, nodes[-1], 0, 0, rows))
    for node in nodes:
        meta.write(node, role=meta.GATHER, param=name, phase="forward")
    for user in users:
        user.replace_input_with(placeholder, nodes[-1])


def _reduce(gm: GraphModule, name: str, gradient: Node, storage: Storage) -> Node:
    node = gradient

    def then(target: torch._ops.OpOverload, *args: object) -> None:
        nonlocal node
        node = call(gm.graph, gradient, target, node, *args)
        meta.write(node, role=meta.REDUCE, param=name)

    padding = storage.padded_shape[0] * storage.shard_degree - storage.compute_shape[0]
    with gm.graph.inserting_before(gradient.next):
        if not value(gradient).is_contiguous():
            # Collectives refuse it, and fused optimizers would read its memory in the parameter's order.
            node = gradient = call(
                gm.graph, gradient, aten.clone.default, gradient, memory_format=torch.contiguous_format
            )
        if padding:
            then(aten.constant_pad_nd.default, [0, 0] * (len(storage.compute_shape) - 1) + [0, padding], 0.0)
        if storage.shard_degree > 1:
            then(c10d.reduce_scatter_tensor.default, "sum", storage.shard_degree, storage.group_name("dp_shard"))
            then(c10d.wait_tensor.default)
        if storage.replicate_degree > 1:
            then(c10d.all_reduce.default, "sum", storage.group_name("dp_replicate"))
            then(c10d.wait_tensor.default)
    return node
