"""What layout passes made of parameters and gradients: the one reading of the roles that they wrote on nodes."""

from __future__ import annotations

from typing import NamedTuple

from torch.fx import GraphModule, Node

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import is_view
from torchtitan_graph.graph.signature import output_nodes


def gathered_weights(gm: GraphModule) -> dict[Node, str]:
    """Give the forward nodes that gather a parameter, and the views of what is gathered, with the parameter's name.

    Backward reads a weight through views made in forward: they live and die with it.
    """
    found: dict[Node, str] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or meta.phase(node) == "backward":
            continue
        parent = node.args[0] if node.args and isinstance(node.args[0], Node) else node
        if meta.role(node) == meta.GATHER or (parent in found and is_view(node)):
            found[node] = meta.param(node) or found[parent]
    return found


def made_from_inputs(node: Node) -> list[Node]:
    """Give `node` and all it is computed from but the graph's inputs, what is read first."""
    if node.op == "placeholder":
        return []
    found = [n for source in node.all_input_nodes for n in made_from_inputs(source)]
    return [*dict.fromkeys(found), node]


class Reduction(NamedTuple):
    """How a gradient comes to rest.

    gradient  as autograd made it, in the compute layout
    nodes     what is done to it, in order, one node feeding the next; empty where it rests as it was made
    """

    gradient: Node
    nodes: list[Node]

    @property
    def result(self) -> Node:
        return self.nodes[-1] if self.nodes else self.gradient


def reductions(gm: GraphModule) -> dict[str, Reduction]:
    """Give each parameter's reduction, as long as none are packed together."""
    found = {}
    for name, node in output_nodes(gm, "grad").items():
        nodes: list[Node] = []
        while meta.role(node) == meta.REDUCE:
            nodes.insert(0, node)
            node = node.all_input_nodes[0]  # a copy that has arrived holds what it was made of, too
        found[name] = Reduction(node, nodes)
    return found
