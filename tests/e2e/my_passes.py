"""A pass of a user's own, found on PYTHONPATH by the name `my_passes.swap_sums`."""

import torch
from torch.fx import GraphModule, Node


def swap_sums(gm: GraphModule) -> GraphModule:
    """Swap the terms of sums. Bitwise.

    y = add(a, b)
    y = add(b, a)
    """
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        a, b = node.args
        if isinstance(b, Node) and a.meta["val"].dtype == b.meta["val"].dtype and not node.kwargs:
            node.args = (b, a)
    gm.recompile()
    return gm
