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
    call = _runs(gm, blocks, "forward")
    if not any(number > 1 for number in call.values()):
        return gm
    call |= _of_backward(_runs(gm, blocks, "backward"), call, blocks)
    weights = {node: name for node, name in gathered_weights(gm).items() if name not in reshard.whole}
    for node in reversed(gm.graph.nodes):
        if node in weights and node not in call:  # the gather itself belongs to the first call that reads it
            call[node] = min((call[user] for user in node.users if user in call), default=1)
    copies: dict[tuple[Node, int], Node] = {}

    def copied(node: Node, number: int) -> Node:
        """Return the copy of a gathered weight for a call; insert it, its inputs first, at the insertion point."""
        if (node, number) not in copies:
            inputs = {n: copied(n, number) for n in node.all_input_nodes if n in weights}
            copies[node, number] = copy_node(gm.graph, node, lambda n: inputs.get(n, n))
        return copies[node, number]

    for node in [n for n in gm.graph.nodes if n in call and meta.role(n) is None]:
        number, is_forward = call[node], meta.phase(node) == "forward"
        for weight in (n for n in node.all_input_nodes if n in weights and call[n] != number):
            if is_forward or (weight, number) in copies:
                with gm.graph.inserting_before(node):
                    node.replace_input_with(weight, copied(weight, number))
    gm.recompile()
    return gm


def _runs(gm: GraphModule, blocks: Container[str], phase: str) -> dict[Node, int]:
    """Return by node the number of its block's run in a phase, from 1: another begins where other blocks have run."""
    found: dict[Node, int] = {}
    count = collections.Counter[str]()
    last = None
    for node in gm.graph.nodes:
        if node.op != "call_function" or meta.phase(node) != phase or meta.role(node) is not None:
            continue
        if (block := block_of(node, blocks)) is not None:
            count[block] += block != last
            found[node], last = count[block], block
    return found


def _of_backward(runs: dict[Node, int], call: dict[Node, int], blocks: Container[str]) -> dict[Node, int]:
    """Return by node of backward the call of its block that it belongs to: the one whose values its run reads."""
    read: dict[tuple[str | None, int], collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for node, number in runs.items():
        block = block_of(node, blocks)
        read[block, number].update(call[n] for n in node.all_input_nodes if n in call and block_of(n, blocks) == block)
    most = {run: max(found, key=found.__getitem__) for run, found in read.items() if found}
    return {node: most.get((block_of(node, blocks), number), 1) for node, number in runs.items()}
