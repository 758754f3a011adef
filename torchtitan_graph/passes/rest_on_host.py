"""Layout pass for parameters and gradients in the host's memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import Chain, feeding_users, value
from torchtitan_graph.graph.signature import input_nodes, output_nodes, set_outputs
from torchtitan_graph.ops.copies import arrived, landed, offload, reload
from torchtitan_graph.parallel.storage import Storage


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
    for name, placeholder in parameters.items():
        device = value(placeholder).device.type
        placeholder.meta["val"] = value(placeholder).to("cpu")
        if placeholder.users:
            with feeding_users(placeholder, role=meta.GATHER, param=name, phase="forward") as chain:
                chain.then(reload, device).then(arrived, placeholder)
    ends, end = {}, gm.graph.output_node()
    for name, gradient in gradients.items():
        marks = {"role": meta.REDUCE, "param": name, "phase": "backward"}
        sent = Chain(gradient.next, gradient, gradient, **marks)
        sent.then(offload).then(arrived, gradient)
        # All stand at the end: the host waits in the first for all copies, and the others return at once.
        ends[name] = Chain(end, sent.last, gradient, **marks).then(landed).last
    set_outputs(gm, "grad", ends)
    gm.recompile()
    return gm
