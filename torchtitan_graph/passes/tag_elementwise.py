"""Policy: recomputation of elementwise results. It only writes tags; `rematerialize` acts on them."""

from __future__ import annotations

from collections.abc import Container

from torch.fx import GraphModule

from torchtitan_graph.analysis.keeping import elementwise_again, forward_of
from torchtitan_graph.graph import meta


def tag_elementwise(gm: GraphModule, blocks: Container[str]) -> GraphModule:
    """Tag RECOMPUTE the results of elementwise operators, where backward then keeps less. Bitwise.

        a = mm(x, w); s = silu(a); y = mm(s, v)       s is tagged, a is kept: backward needs both

    Each block keeps a minimum cut. No product is recomputed, and tags of other policies stay. Nodes outside the blocks
    come last, since the blocks' recomputation reads them too.
    """
    forward = forward_of(gm, blocks)
    for name in sorted(forward.groups, key=lambda name: name is None):
        for node in elementwise_again(forward.groups[name], forward):
            meta.write(node, tag=meta.RECOMPUTE)
    return gm
