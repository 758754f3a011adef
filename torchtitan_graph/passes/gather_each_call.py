"""Gathers of the weights of blocks that forward calls several times."""

from __future__ import annotations

import collections
from collections.abc import Container

from torch.fx import GraphModule, Node

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.graph.collectives import gathered_weights
from torchtitan_graph.graph.edit import copy_node
from torchtitan_graph.parallel.storage import Reshard


def gather_each_call(gm: GraphModule, blocks: Container[str], reshard: Reshard) -> GraphModule:
    """Gather a block's weights again for each of its calls in forward, where they are freed after forward. Bitwise.

        w = wait(all_gather(shard)); y = mm(x, w); ...other blocks...; z = mm(y, w)
        w = wait(all_gather(shard)); y = mm(x, w); ...other blocks...; w' = wait(all_gather(shard)); z = mm(y, w')

    A step that runs the whole model twice would else hold the weights of all blocks in between.
    """
    if not reshard.blocks:
        return gm
    call = _calls(gm, blocks)
    if not any(number > 1 for number in call.values()):
        return gm
    weights = gathered_weights(gm)
    copies: dict[tuple[Node, int], Node] = {}

    def copied(node: Node, number: int) -> Node:
        """Return the copy of a gathered weight for a call; insert it, its inputs first, at the insertion point."""
        if (node, number) not in copies:
            inputs = {n: copied(n, number) for n in node.all_input_nodes if n in weights}
            copies[node, number] = copy_node(gm.graph, node, lambda n: inputs.get(n, n))
        return copies[node, number]

    for node in list(gm.graph.nodes):
        number = call.get(node, 1)
        for weight in node.all_input_nodes if number > 1 else ():
            if weight in weights and call.get(weight, 1) != number:
                with gm.graph.inserting_before(node):
                    node.replace_input_with(weight, copied(weight, number))
    gm.recompile()
    return gm


def _calls(gm: GraphModule, blocks: Container[str]) -> dict[Node, int]:
    """Return which call of its block in forward each node is of, from 1: another begins where other blocks have run."""
    found: dict[Node, int] = {}
    count = collections.Counter[str]()
    last = None
    for node in gm.graph.nodes:
        if node.op != "call_function" or meta.phase(node) != "forward" or meta.role(node) == meta.GATHER:
            continue
        if (block := block_of(node, blocks)) is not None:
            count[block] += block != last
            found[node], last = count[block], block
    return found
