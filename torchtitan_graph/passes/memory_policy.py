"""Policy: what the backward pass gathers and computes again. It only writes tags; `rematerialize` acts on them."""

from __future__ import annotations

import operator
import re

from torch.fx import GraphModule, Node

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import is_view
from torchtitan_graph.parallel.recompute import KeptOps, Recompute

_BLOCK = re.compile(r"layers\.(\d+)\.")


def memory_policy(
    gm: GraphModule, recompute: Recompute, reshard_after_forward: bool, reshard_root: bool = False
) -> GraphModule:
    """Tag forward nodes SAVE or RECOMPUTE: gathers of blocks' weights, to reshard, and blocks by `recompute`. Bitwise.

        full = wait(all_gather(shard)); w = t(full); y = mm(x, w)     all before mm are tagged RECOMPUTE: backward
                                                                      gathers again and nothing holds `full` till then

    A gather's views are tagged with it, because backward reads the weight through views made in forward. Weights
    outside the blocks (embedding, final norm, output) stay gathered, as FSDP2's root group does, unless `reshard_root`.
    """
    gathered: dict[Node, str] = {}
    kept: dict[int, KeptOps] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or meta.phase(node) == "backward":
            continue
        parent = node.args[0] if node.args and isinstance(node.args[0], Node) else node
        if meta.role(node) == meta.GATHER or (is_view(node) and parent in gathered):
            gathered[node] = meta.param(node) or gathered[parent]
            if reshard_root if _block(gathered[node]) is None else reshard_after_forward:
                meta.write(node, tag=meta.RECOMPUTE)
            continue
        block = _block(meta.module(node) + ".")
        if block is None:
            continue
        if _leaves_block(node, block):
            meta.write(node, tag=meta.SAVE)  # the next block's input: its recomputation starts here
        elif recompute.whole_block(block):
            meta.write(node, tag=meta.RECOMPUTE)
        elif recompute.by_op:
            is_part = node.target is operator.getitem
            keeps = meta.tag(parent) == meta.SAVE if is_part else kept.setdefault(block, KeptOps()).keeps(node.target)
            meta.write(node, tag=meta.SAVE if keeps else meta.RECOMPUTE)
    return gm


def _block(name: str) -> int | None:
    found = _BLOCK.match(name)
    return int(found[1]) if found else None


def _leaves_block(node: Node, block: int) -> bool:
    return any(meta.phase(user) == "forward" and _block(meta.module(user) + ".") != block for user in node.users)
