"""Layout pass for mixed precision: parameters are stored in one dtype and computed in another."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.collectives import reductions
from torchtitan_graph.graph.edit import Chain, feeding_users, recast, value
from torchtitan_graph.graph.signature import input_nodes, set_outputs
from torchtitan_graph.parallel.storage import Storage

aten = torch.ops.aten


def mixed_precision(gm: GraphModule, storages: Mapping[str, Storage]) -> GraphModule:
    """Cast each parameter before it is gathered, each gradient before it is reduced. A layout pass.

        w (bf16) -> all_gather -> use             ... -> dw (bf16) -> reduce_scatter
        w (fp32) -> cast -> all_gather -> use     ... -> dw (bf16) -> cast -> reduce_scatter (fp32)

    The graph was traced in the compute dtype: no arithmetic changes here but the precision of the reduction.
    """
    for name, placeholder in input_nodes(gm, "param").items():
        precision = storages[name].precision
        assert value(placeholder).dtype == precision.compute, f"{name} was traced in {value(placeholder).dtype}"
        if precision.storage == precision.compute:
            continue
        placeholder.meta["val"] = recast(value(placeholder), precision.storage)
        if placeholder.users:
            with feeding_users(placeholder, role=meta.GATHER, param=name, phase="forward") as chain:
                chain.then(aten._to_copy.default, dtype=precision.compute)
    outputs = {}
    for name, reduction in reductions(gm).items():
        precision, gradient = storages[name].precision, reduction.gradient
        wide = _cast(gradient, precision.reduce, name)
        if reduction.nodes:
            reduction.nodes[0].replace_input_with(gradient, wide)
            for node in reduction.nodes:
                node.meta["val"] = recast(value(node), precision.reduce)
        outputs[name] = _cast(reduction.result if reduction.nodes else wide, precision.storage, name)
    set_outputs(gm, "grad", outputs)
    gm.recompile()
    return gm


def _cast(node: Node, dtype: torch.dtype, name: str) -> Node:
    """Return a gradient in a dtype, cast right behind the node if it has another."""
    if value(node).dtype == dtype:
        return node
    chain = Chain(node.next, node, node, role=meta.REDUCE, param=name, phase="backward")
    return chain.then(aten._to_copy.default, dtype=dtype).last
