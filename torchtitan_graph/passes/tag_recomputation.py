"""Policy: which activations the backward pass computes again. It only writes tags; `rematerialize` acts on them."""

from __future__ import annotations

import operator
from collections.abc import Container

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.blocks import block_of, number_of
from torchtitan_graph.graph.collectives import gathered_weights
from torchtitan_graph.parallel.recompute import HOST_READS, KeptOps, Recompute

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def tag_recomputation(gm: GraphModule, blocks: Container[str], recompute: Recompute) -> GraphModule:
    """Tag the forward nodes of blocks SAVE or RECOMPUTE. Bitwise.

        h = norm(x); y = mm(h, w); z = silu(y)    by operator: mm is tagged SAVE, the others RECOMPUTE

    What leaves a block, the next one's input, is saved: its recomputation starts there. So is what the host reads of a
    dispatch. Gathered weights are no activations; `tag_resharding` decides on them.
    """
    weights = gathered_weights(gm)
    kept: dict[str, KeptOps] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or meta.phase(node) == "backward" or node in weights:
            continue
        block = block_of(node, blocks)
        if block is None:
            continue
        leaves = any(meta.phase(user) == "forward" and block_of(user, blocks) != block for user in node.users)
        if leaves or _tells_the_host(node):
            meta.write(node, tag=meta.SAVE)
        elif recompute.whole_block(number_of(block)):
            meta.write(node, tag=meta.RECOMPUTE)
        elif recompute.by_op:
            if node.target is operator.getitem:
                source: Node = node.args[0]  # type: ignore[assignment]
                keeps = meta.tag(source) == meta.SAVE
            else:
                keeps = kept.setdefault(block, KeptOps()).keeps(node.target)
            meta.write(node, tag=meta.SAVE if keeps else meta.RECOMPUTE)
    return gm


def _tells_the_host(node: Node) -> bool:
    source = node.args[0] if node.target is _WAIT else node
    return isinstance(source, Node) and source.target in HOST_READS
