"""Policy: recomputation of activations in backward. It only writes tags; `rematerialize` acts on them."""

from __future__ import annotations

import operator
from collections.abc import Container

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.blocks import block_of, number_of
from torchtitan_graph.graph.collectives import gathered_weights
from torchtitan_graph.ops.operator import operator_of
from torchtitan_graph.parallel.recompute import KeptOps, Recompute

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def tag_recomputation(gm: GraphModule, blocks: Container[str], recompute: Recompute) -> GraphModule:
    """Tag the forward nodes of blocks SAVE or RECOMPUTE. Bitwise.

        h = norm(x); y = mm(h, w); z = silu(y)    by operator: mm is tagged SAVE, the others RECOMPUTE

    Modules named in options come first. A block's output, the next one's input, is saved: recomputation starts there.
    So are a dispatch's values that the host reads. Gathered weights are no activations; `tag_resharding` decides on
    them.
    """
    weights = gathered_weights(gm)
    kept: dict[str, KeptOps] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or meta.phase(node) == "backward" or node in weights:
            continue
        block = block_of(node, blocks)
        if block is None:
            continue
        again: bool | None = None
        leaves = any(meta.phase(user) == "forward" and block_of(user, blocks) != block for user in node.users)
        if leaves or _is_read_by_host(node):
            again = False
        else:
            if recompute.by_op:  # products are counted whichever rule decides: the others' alternation stays
                again = not _keeps(node, kept.setdefault(block, KeptOps()))
            elif recompute.whole_block(number_of(block)):
                again = True
            if (named := recompute.named(meta.module(node))) is not None:
                again = named
        if again is not None:
            meta.write(node, tag=meta.RECOMPUTE if again else meta.SAVE)
    return gm


def _keeps(node: Node, kept: KeptOps) -> bool:
    if node.target in (operator.getitem, _WAIT):  # the wait of a kept collective is kept
        source: Node = node.args[0]  # type: ignore[assignment]
        return meta.tag(source) == meta.SAVE
    return kept.keeps(node.target)


def _is_read_by_host(node: Node) -> bool:
    source = node.args[0] if node.target is _WAIT else node
    return isinstance(source, Node) and operator_of(source.target).recompute == "never"
