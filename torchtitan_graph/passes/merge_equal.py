"""Common-subexpression elimination."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchtitan_graph.analysis.liveness import owners
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import erase_unused


def merge_equal(gm: GraphModule) -> GraphModule:
    """Eliminate common subexpressions: equal operators on equal arguments, while the first value is alive. Bitwise.

        m = pad(mask); attend(q, m); n = pad(mask); attend(r, n); ...; attend_backward(dq, m)
        m = pad(mask); attend(q, m); attend(r, m); ...; attend_backward(dq, m)

    A value that would have to stay alive until its second reader is computed twice: so memory is nowhere higher than
    before. Outputs of the graph are not merged, for an optimizer may write to them; nor are collectives and nodes of
    layout passes.
    """
    owner, place = owners(gm), {node: i for i, node in enumerate(gm.graph.nodes)}
    last_use = {owner[x]: i for node, i in place.items() for x in (*node.all_input_nodes, node)}
    last_use |= dict.fromkeys(gm.graph.find_nodes(op="placeholder"), len(place))
    given = {owner[node] for node in gm.graph.output_node().all_input_nodes}
    alike: dict[tuple, list[Node]] = {}  # an operator and its inputs -> the first node for each of its other arguments
    equal: dict[Node, Node] = {}  # a node -> the first node with its value
    for node in list(gm.graph.nodes):
        if not _is_pure(node):
            equal[node] = node
            continue
        others = alike.setdefault((node.target, *map(equal.__getitem__, node.all_input_nodes)), [])
        text = _arguments(node, equal) if others else ""
        first = equal[node] = next((n for n in others if _arguments(n, equal) == text), node)
        if first is node:
            others.append(node)
        if first is not node and owner[node] not in given and last_use[owner[first]] >= place[node]:
            last_use[owner[first]] = max(last_use[owner[first]], last_use[owner[node]])
            node.replace_all_uses_with(first)
            meta.stand_for(first, (first, node))
    erase_unused(gm)
    gm.recompile()
    return gm


def _arguments(node: Node, equal: Mapping[Node, Node]) -> str:
    """Return a node's arguments as text: 1, 1.0 and True differ."""
    return repr(map_arg((node.args, node.kwargs), equal.__getitem__))


def _is_pure(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    is_random = torch.Tag.nondeterministic_seeded in node.target.tags
    return not (is_random or node.target._schema.is_mutable or meta.role(node))
