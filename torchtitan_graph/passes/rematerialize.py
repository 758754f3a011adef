"""Mechanism: rematerialization in backward of tagged activations."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import copy_node, erase_unused


def rematerialize(gm: GraphModule) -> GraphModule:
    """Rematerialize RECOMPUTE nodes: backward reads copies, each made just before its first use there. Bitwise.

        a = f(x) [RECOMPUTE]; y = g(a); ...; dx = g_backward(dy, a)
        a = f(x); y = g(a); ...; a' = f(x); dx = g_backward(dy, a')

    A copy's inputs are copies too, back to the first that is not tagged; so `a` lives no longer than forward needs it.
    """
    copies: dict[Node, Node] = {}

    def copied(node: Node) -> Node:
        """Return the copy of a tagged node; insert it and its inputs' copies, inputs first, at the insertion point."""
        pending = [node]
        while pending:
            needed = [n for n in pending[-1].all_input_nodes if _is_recomputed(n) and n not in copies]
            if needed:
                pending += needed
                continue
            original = pending.pop()
            if original not in copies:
                copies[original] = copy_node(gm.graph, original, lambda n: copies.get(n, n))
                meta.write(copies[original], phase="backward", tag=None)
                meta.recomputed(copies[original])
        return copies[node]

    for node in list(gm.graph.nodes):
        if node.op != "call_function" or meta.phase(node) == "forward":
            continue
        for argument in node.all_input_nodes:
            if _is_recomputed(argument):
                with gm.graph.inserting_before(node):
                    node.replace_input_with(argument, copied(argument))
    erase_unused(gm)  # a gather whose forward use was only a view for backward
    gm.recompile()
    return gm


def _is_recomputed(node: Node) -> bool:
    return meta.tag(node) == meta.RECOMPUTE
