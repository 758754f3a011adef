"""Policy: which elementwise results backward computes again. It only writes tags; `rematerialize` acts on them."""

from __future__ import annotations

from collections.abc import Container

from torch.fx import GraphModule

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.keeping import elementwise_again, forward_of


def tag_elementwise(gm: GraphModule, blocks: Container[str]) -> GraphModule:
    """Tag RECOMPUTE what elementwise operators make, where backward then keeps less. Bitwise.

        a = mm(x, w); s = silu(a); y = mm(s, v)       s is tagged, a is kept: backward needs both

    What each block keeps is a minimum cut. No product is computed again, and nothing that another policy tagged
    changes. What stands outside the blocks is chosen last: what they compute again asks for it as well.
    """
    forward = forward_of(gm, blocks)
    for name in sorted(forward.groups, key=lambda name: name is None):
        for node in elementwise_again(forward.groups[name], forward):
            meta.write(node, tag=meta.RECOMPUTE)
    return gm
