"""Partition the graph of a training step, or of a pipeline's stage, into parts that run at different times of a step.

    gather     once a step: weights, from their shards
    forward    of a microbatch
    backward   of a microbatch; or its two halves
      input      the gradient of the stage's input, for which the previous stage waits
      weight     the gradients of the weights, for which no stage waits
    reduce     once a step: gradients, summed over the microbatches, to their shards

The graph is traced whole and all passes except those after the partitioning have run on it: a part's nodes are the
graph's own. They are distinguished by their role, their phase and their inputs. Weights that are not gathered once a
step are gathered by forward and backward; so are gradients reduced by backward that are not reduced once a step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from torch.fx import Graph, GraphModule, Node

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import copy_node, is_view, value
from torchtitan_graph.graph.signature import Signature, Slot, input_nodes, layout_of, output_nodes

ONCE_A_STEP = ("gather", "reduce")  # the parts that run once a step, not by microbatch
ALL, NONE = (lambda name: True), (lambda name: False)  # of all parameters, of none


class Once(NamedTuple):
    """What is done once a step, by the names of parameters.

    gather  whether a weight is gathered once
    reduce  whether a gradient is reduced once
    """

    gather: Callable[[str], bool] = ALL
    reduce: Callable[[str], bool] = ALL

    def part_of(self, node: Node) -> str | None:
        """Return the part of a node that runs once a step, None for others."""
        role = meta.role(node)
        is_once = {meta.GATHER: self.gather, meta.REDUCE: self.reduce}.get(role or "", NONE)
        return role if is_once(meta.param(node) or "") else None


class Part(NamedTuple):
    """A part's graph. Inputs and outputs are values of the whole graph, by their names there."""

    gm: GraphModule
    reads: tuple[str, ...]
    gives: tuple[str, ...]


class Parts(NamedTuple):
    """The parts of a graph, in the order in which they run for a microbatch, and the names of its values.

    by_name   the parts
    outputs   kind -> name of an output -> the value
    sums      the values that are summed over the microbatches, those of `reduce` before it
    reduced   those of them that are reduced already, each microbatch's
    """

    by_name: Mapping[str, Part]
    outputs: Mapping[str, Mapping[str, str]]
    sums: tuple[str, ...]
    reduced: frozenset[str] = frozenset()


def part_of(node: Node, *, once: Once) -> str:
    """Return the part that a node will be in, with backward as one: the partition function of passes before the
    partitioning."""
    return once.part_of(node) or meta.phase(node)


def partition(gm: GraphModule, *, once: Once, split_backward: bool) -> Parts:
    """Partition the graph of a training step or of a stage.

    Views of weights and constants are computed again in each part that reads them: a view saved from one part to
    another would keep a gathered weight.

    Args:
        once: the weights and gradients that are gathered and reduced in parts of their own.
        split_backward: backward in two halves; else in one, in the traced order of nodes, which has a lower peak.
    """
    outputs = {kind: output_nodes(gm, kind) for kind in ("loss", "output", "state", "grad")}
    nodes = [n for n in gm.graph.nodes if n.op in ("call_function", "get_attr")]
    late = _made_in_backward(gm, nodes)
    gather = {n for n in nodes if once.part_of(n) == meta.GATHER}
    reduce = {n for n in nodes if once.part_of(n) == meta.REDUCE}
    free = _remade(nodes, late, {*input_nodes(gm, "param").values(), *gather})
    forward = set(nodes) - late - gather - free
    backward = [n for n in nodes if n in late and n not in reduce]
    grads = set(outputs["grad"].values())
    sums = [n for n in gm.graph.nodes if n not in reduce and (n in grads or any(user in reduce for user in n.users))]

    def part(inside: Set[Node], gives: Iterable[Node], readers: Iterable[Node] = ()) -> Part:
        """Return the part of the nodes `inside`, with outputs `gives` and the values that the later nodes `readers`
        read."""
        later = set(readers)
        crossing = [n for n in nodes if n in inside and not later.isdisjoint(n.users) and not _is_tuple(n)]
        return _cut(gm, inside | free, list(dict.fromkeys([*gives, *crossing])))

    dx = [node for name, node in outputs["output"].items() if name == "dx"]
    results = [node for kind in ("loss", "state") for node in outputs[kind].values() if node not in late]
    results += [node for name, node in outputs["output"].items() if name == "y"]
    late_state = [node for node in outputs["state"].values() if node in late]
    found = {
        "gather": part(gather, (), readers=set(nodes) - gather),
        "forward": part(forward, results, readers=backward),
    }
    if split_backward:
        first = _needed_for(dx, backward)
        second = set(backward) - first
        found["input"] = part(first, [*dx, *(n for n in (*sums, *late_state) if n in first)], readers=second)
        found["weight"] = part(second, [n for n in (*sums, *late_state) if n in second])
    else:
        found["backward"] = part(set(backward), [*dx, *sums, *late_state])
    found["reduce"] = part(reduce, outputs["grad"].values())
    names = {kind: {name: node.name for name, node in by_name.items()} for kind, by_name in outputs.items()}
    reduced = frozenset(n.name for n in sums if meta.role(n) == meta.REDUCE)
    return Parts(found, names, tuple(n.name for n in sums), reduced)


def _made_in_backward(gm: GraphModule, nodes: Sequence[Node]) -> set[Node]:
    """Return the nodes of backward, and all that depend on the incoming gradient, whatever their phase: a pass may have
    inserted some."""
    late = {node for name, node in input_nodes(gm, "input").items() if name == "dy"}
    for node in nodes:
        if meta.phase(node) == "backward" or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return late


def _remade(nodes: Sequence[Node], late: Set[Node], weights: Set[Node]) -> set[Node]:
    """Return the nodes that are free to compute again: constants, subgraphs, and forward's views of `weights`."""
    seen = set(weights)
    for node in nodes:
        if node.op == "get_attr" or (is_view(node) and node not in late and node.args[0] in seen):
            seen.add(node)
    return seen - weights


def _needed_for(wanted: Iterable[Node], nodes: Sequence[Node]) -> set[Node]:
    """Return the nodes that `wanted` depends on. A tuple does not leave a part: its picked elements stay with it."""
    needed, found = set(wanted), set()
    for node in reversed(nodes):
        if node in needed:
            found.add(node)
            needed.update(node.all_input_nodes)
    return found | {n for n in nodes if n.target is operator.getitem and n.args[0] in found}


def _is_tuple(node: Node) -> bool:
    return isinstance(value(node), (tuple, list))


def _cut(gm: GraphModule, inside: Set[Node], gives: Sequence[Node]) -> Part:
    wanted: set[Node] = set()
    pending = list(gives)
    while pending:
        node = pending.pop()
        if node in inside and node not in wanted:
            wanted.add(node)
            pending += node.all_input_nodes
    reads = [n for n in gm.graph.nodes if n not in wanted and (n in gives or not wanted.isdisjoint(n.users))]
    graph = Graph()
    new: dict[Node, Node] = {}
    for node in reads:
        new[node] = graph.placeholder(node.name)
        new[node].meta = dict(node.meta)
        meta.own_annotations(new[node])
    for node in gm.graph.nodes:
        if node in wanted:
            new[node] = copy_node(graph, node, new.__getitem__)
    graph.output([new[node] for node in gives])
    cut = GraphModule(gm, graph)
    inputs = tuple(Slot(n.name, "input", layout_of(value(n))) for n in reads)
    cut.meta["signature"] = Signature(inputs, tuple(Slot(n.name, "output", layout_of(value(n))) for n in gives))
    return Part(cut, tuple(n.name for n in reads), tuple(n.name for n in gives))
