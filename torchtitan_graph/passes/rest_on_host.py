"""Layout pass for parameters and gradients in the host's memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import GraphModule

import torchtitan_graph.ops  # noqa: F401 (registers the operators)
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import call, value
from torchtitan_graph.graph.signature import input_nodes, output_nodes, set_outputs
from torchtitan_graph.parallel.storage import Storage

_OPS = torch.ops.torchtitan_graph


def rest_on_host(gm: GraphModule, storages: Mapping[str, Storage]) -> GraphModule:
    """Copy parameters from the host's memory before their gather, and reduced gradients to it. A layout pass.

        w -> all_gather -> use                      ... -> dw -> reduce_scatter -> return
        w -> arrived(reload) -> all_gather -> use   ... -> dw -> reduce_scatter -> landed(arrived(offload)) -> return

    A copy is part of a gather: where that is repeated for backward, so is the copy. Clipping and the optimizer's step,
    outside the graph, run on the host: the gradients' copies are complete when the graph ends.
    """
    parameters, gradients = input_nodes(gm, "param"), output_nodes(gm, "grad")
    if not any(storages[name].on_host for name in parameters):
        return gm
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for name, placeholder in parameters.items():
        users, device = list(placeholder.users), value(placeholder).device.type
        placeholder.meta["val"] = value(placeholder).to("cpu")
        if not users:
            continue
        first = min(users, key=order.__getitem__)
        with gm.graph.inserting_before(first):
            copy = call(gm.graph, first, _OPS.reload.default, placeholder, device)
            there = call(gm.graph, first, _OPS.arrived.default, copy, placeholder)
        for node in (copy, there):
            meta.write(node, role=meta.GATHER, param=name, phase="forward")
        for user in users:
            user.replace_input_with(placeholder, there)
    landed = {}
    for name, gradient in gradients.items():
        with gm.graph.inserting_before(gradient.next):
            copy = call(gm.graph, gradient, _OPS.offload.default, gradient)
            there = call(gm.graph, gradient, _OPS.arrived.default, copy, gradient)
        # All stand at the end: the host waits in the first for all copies, and the others return at once.
        with gm.graph.inserting_before(gm.graph.output_node()):
            landed[name] = call(gm.graph, gradient, _OPS.landed.default, there)
        for node in (copy, there, landed[name]):
            meta.write(node, role=meta.REDUCE, param=name, phase="backward")
    set_outputs(gm, "grad", landed)
    gm.recompile()
    return gm
