"""A pass over the training graph, for `compile.extra_passes`."""

import torch
from torch.fx import GraphModule

from torchtitan_graph.graph.edit import call, value

aten = torch.ops.aten


def double_by_adding(gm: GraphModule) -> GraphModule:
    """Add what is doubled to itself. Bitwise.

    y = mul(x, 2.0)
    y = add(x, x)
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        x, factor = node.args
        if factor == 2 and value(x).is_floating_point():  # an integer times 2.0 is a float
            with gm.graph.inserting_before(node):
                node.replace_all_uses_with(call(gm.graph, node, aten.add.Tensor, x, x))
            gm.graph.erase_node(node)
    gm.recompile()
    return gm
