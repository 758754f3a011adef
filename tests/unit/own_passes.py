"""Passes of a user's own, right and wrong."""

import torch
from torch.fx import GraphModule

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
