"""Views of results whose strides a trace does not know."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.graph.edit import is_view

aten = torch.ops.aten

# Operators whose results have other strides than fake tensors say, where the strides of their arguments differ: for a
# trace torch computes the strides by a decomposition, in another order of the arguments than the kernel.
_OTHER_STRIDES = (
    *(aten.elu_backward.default, aten.hardsigmoid_backward.default, aten.hardswish_backward.default),
    *(aten.hardtanh_backward.default, aten.softplus_backward.default, aten.log_sigmoid_forward.default),
    *(aten.native_layer_norm_backward.default, aten._log_softmax_backward_data.default),
)


def reshape_unknown(gm: GraphModule) -> None:
    """Replace a view of such a result by a reshape: what autograd does in eager mode, where it sees the strides. It is
    a view where that is possible, and a copy where not."""
    unknown = set[Node]()
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _OTHER_STRIDES:
            unknown.add(node)
        elif any(source in unknown for source in node.all_input_nodes):
            if node.target is aten.view.default:
                node.target = aten.reshape.default
            elif is_view(node) or torch.Tag.pointwise in getattr(node.target, "tags", ()):
                unknown.add(node)
