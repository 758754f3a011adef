"""Minimization of a graph on which a pass fails: the fewest outputs, and nodes between outputs and inputs."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from torchtitan_graph.formats.replay import plain_slot
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import copy_node
from torchtitan_graph.graph.signature import Signature, signature_of

Fails = Callable[[GraphModule], bool]


def shrink(gm: GraphModule, fails: Fails) -> GraphModule | None:
    """Return a part of the graph on which `fails` still holds; None if it does not hold where inputs are plain tensors.

    A part computes some of the graph's values from some others, which become its inputs; nothing else is changed. So
    the result is a true example: the pass fails on it, by itself. First the outputs are chosen, then the earliest
    values that fail, then the latest that may be inputs. Each choice is by bisection, then one by one.
    """
    outputs, cut = [n for n in dict.fromkeys(gm.graph.output_node().args[0]) if isinstance(n, Node)], set[Node]()  # type: ignore[arg-type]

    def fails_with(outputs: Sequence[Node], cut: Container[Node]) -> bool:
        return fails(part(gm, outputs, cut))

    if not fails_with(outputs, cut):
        return None
    outputs = _fewest(outputs, lambda chosen: bool(chosen) and fails_with(chosen, cut))
    if len(outputs) == 1:
        outputs = [_earliest(outputs[0], _needed(outputs, cut), lambda node: fails_with([node], cut))]
    inner = [n for n in _needed(outputs, cut) if _can_be_input(n) and n not in outputs]
    first = _bisect(len(inner), lambda count: fails_with(outputs, set(inner[:count])))
    cut = set(inner[:first])
    for node in reversed(inner[first:]):
        if node in _needed(outputs, cut) and fails_with(outputs, cut | {node}):
            cut.add(node)
    return part(gm, outputs, cut)


def _fewest(given: list[Node], fails: Callable[[list[Node]], bool]) -> list[Node]:
    """Return the fewest elements that still fail, dropped in halves, quarters and so on."""
    size = len(given)
    while size > 1:
        size = (size + 1) // 2
        for begin in range(0, len(given), size):
            chunk = given[begin : begin + size]
            if fails(chunk):
                return _fewest(chunk, fails) if len(chunk) > 1 else chunk
    for node in list(given):
        others = [n for n in given if n is not node]
        if fails(others):
            given = others
    return given


def _earliest(output: Node, nodes: Sequence[Node], fails: Callable[[Node], bool]) -> Node:
    """Return the first value above an output that still fails."""
    tensors = [n for n in nodes if n.op == "call_function" and isinstance(n.meta.get("val"), torch.Tensor)]
    count = _bisect(len(tensors), lambda count: not fails(tensors[count - 1]))
    found = next((n for n in tensors[count : count + 3] if fails(n)), output)
    while above := next((n for n in _tensors_read(found) if fails(n)), None):
        found = above
    return found


def _tensors_read(node: Node) -> list[Node]:
    """Return the computed tensors that a node reads; for a tuple's element those that the tuple's operator reads."""
    found: list[Node] = []
    for source in node.all_input_nodes:
        if source.op == "call_function":
            found += [source] if isinstance(source.meta.get("val"), torch.Tensor) else _tensors_read(source)
    return found


def _bisect(size: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number, up to `size`, for which a monotone condition holds."""
    low, high = 0, size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _can_be_input(node: Node) -> bool:
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)


def _needed(outputs: Sequence[Node], cut: Container[Node]) -> list[Node]:
    """Return the nodes that the outputs depend on, in the graph's order, inputs included."""
    found: dict[Node, None] = {}
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting += [] if node in cut else node.all_input_nodes
    return [node for node in outputs[0].graph.nodes if node in found]


def part(gm: GraphModule, outputs: Sequence[Node], cut: Container[Node]) -> GraphModule:
    """Return the graph of these outputs alone, with the nodes of `cut` as inputs; all of them plain tensors."""
    kinds = _words(gm)
    graph, copies = Graph(), dict[Node, Node]()
    nodes = _needed(outputs, cut)
    inputs = [node for node in nodes if node.op == "placeholder" or node in cut]
    for node in inputs:
        copies[node] = graph.create_node("placeholder", node.name, name=node.name)
        copies[node].meta["val"] = node.meta["val"]
        meta.write(copies[node], phase=meta.phase(node), module=meta.module(node))
    for node in nodes:
        if node not in copies:
            copies[node] = copy_node(graph, node, copies.__getitem__)
    graph.output([copies[node] for node in outputs])
    smaller = GraphModule(gm, graph)
    given = [plain_slot(kinds.get(node, f"input {node.name}"), node) for node in inputs]
    found = [plain_slot(kinds.get(node, f"output {node.name}"), node) for node in outputs]
    smaller.meta["signature"] = Signature(tuple(given), tuple(found))
    return smaller


def _words(gm: GraphModule) -> dict[Node, str]:
    """Return the kind and the name of each input and output of the graph, by node."""
    found: dict[Node, str] = {}
    signature, values = signature_of(gm), iter(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    placeholders = iter(gm.graph.find_nodes(op="placeholder"))
    for slots, nodes in ((signature.outputs, values), (signature.inputs, placeholders)):
        for slot in slots:
            for i in range(slot.layout.num_tensors):
                found[next(nodes)] = f"{slot.kind} {slot.name}{f' {i}' if i else ''}"
    return found
