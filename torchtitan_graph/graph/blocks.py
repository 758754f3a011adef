"""A model's blocks: the block that a name or a node belongs to; and the loss, which is in none.

A block is named by its module in the whole model, such as `layers.3`, also on a rank that holds only some of them.
Weights are gathered, gradients reduced and activations recomputed block by block.
"""

from __future__ import annotations

import itertools
from collections.abc import Container

from torch.fx import GraphModule, Node

from torchtitan_graph.graph import meta


def block_of(what: str | Node, blocks: Container[str]) -> str | None:
    """Return the block that a module, a parameter or a graph's node belongs to; None if it is in none."""
    name = meta.module(what) if isinstance(what, Node) else what
    end = 0
    while end >= 0:
        end = name.find(".", end + 1)
        prefix = name if end < 0 else name[:end]
        if prefix and prefix in blocks:
            return prefix
    return None


def number_of(block: str) -> int:
    """Return a block's index in the whole model: the 3 of `layers.3`."""
    return int(block.rpartition(".")[2])


def loss_of(gm: GraphModule) -> set[Node]:
    """Return the nodes of the loss: those between the last module's forward and the first module's backward."""
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and meta.role(n) is None]
    last = max((i for i, n in enumerate(nodes) if meta.phase(n) == "forward" and meta.module(n)), default=-1)
    return set(itertools.takewhile(lambda n: not meta.module(n), nodes[last + 1 :]))
