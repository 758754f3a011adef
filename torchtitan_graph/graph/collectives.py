"""The all-gathers of parameters and the reductions of gradients, found by the roles that layout passes wrote on
nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch.fx import GraphModule, Node

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import fact, is_view
from torchtitan_graph.graph.signature import output_nodes
from torchtitan_graph.ops.operator import operator_of


def gathered_weights(gm: GraphModule) -> dict[Node, str]:
    """Return the forward nodes that gather a parameter, and the views of their results, with the parameter's name.

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
    """Return `node` and all it is computed from except the graph's inputs, in topological order."""
    if node.op == "placeholder":
        return []
    found = [n for source in node.all_input_nodes for n in made_from_inputs(source)]
    return [*dict.fromkeys(found), node]


def with_dynamic_rows(nodes: Iterable[Node]) -> set[Node]:
    """Return those of a graph's nodes, in order, whose value has a number of rows that depends on data: rows that
    other ranks sent to this rank's experts, and values with a row for each."""
    found: set[Node] = set()
    for node in nodes:
        declared = operator_of(node.target).dynamic_rows
        if not found.isdisjoint(node.all_input_nodes) if declared is None else fact(declared, node):
            found.add(node)
    return found


class Reduction(NamedTuple):
    """A parameter's gradient and its reduction.

    gradient  autograd's, in the compute layout
    nodes     the chain of nodes that reduce it, in order; empty for a gradient that is not reduced
    """

    gradient: Node
    nodes: list[Node]

    @property
    def result(self) -> Node:
        return self.nodes[-1] if self.nodes else self.gradient


def reductions(gm: GraphModule) -> dict[str, Reduction]:
    """Return each parameter's reduction; valid until reductions are bucketed."""
    found = {}
    for name, node in output_nodes(gm, "grad").items():
        nodes: list[Node] = []
        while meta.role(node) == meta.REDUCE:
            nodes.insert(0, node)
            node = node.all_input_nodes[0]  # an asynchronous copy that has arrived also reads its source
        found[name] = Reduction(node, nodes)
    return found
