"""Policy: weights to gather again in backward. It only writes tags; `rematerialize` acts on them."""

from __future__ import annotations

from collections.abc import Container

from torch.fx import GraphModule

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.graph.collectives import gathered_weights
from torchtitan_graph.parallel.storage import Reshard


def tag_resharding(gm: GraphModule, blocks: Container[str], reshard: Reshard) -> GraphModule:
    """Tag gathers of the blocks' or the other weights RECOMPUTE, with the views of the gathered weights. Bitwise.

        full = wait(all_gather(shard)); w = t(full); y = mm(x, w)     all before mm are tagged

    Backward then gathers again, and nothing holds `full` till then.
    """
    for node, name in gathered_weights(gm).items():
        if reshard.frees(name, in_block=block_of(name, blocks) is not None):
            meta.write(node, tag=meta.RECOMPUTE)
    return gm
