"""A model's blocks: the block that a name or a node belongs to; and the loss, which is in none.

A block is named by its module in the whole model, such as `layers.3`, also on a rank that holds only some of them.
Weights are gathered, gradients reduced and activations recomputed block by block.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Container, Sequence
from typing import NamedTuple

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


class Boundaries(NamedTuple):
    """Where blocks end in forward and begin in backward, as indices of nodes.

    ends    of each block, the last node of forward, in order
    begins  the first nodes of the blocks' backward, in order: the last block's comes first
    """

    ends: dict[str, int]
    begins: list[int]

    def way(self, block: str | None, use: int) -> tuple[int, int] | None:
        """Return when a block's value that backward uses at `use` is not needed: from the end of the next block's
        forward, to the beginning of a block's backward, by its number in `begins`. None if the last block's backward
        uses it."""
        number, names = bisect.bisect(self.begins, use) - 1, list(self.ends)
        if number <= 0 or block not in names[:-1]:
            return None
        return self.ends[names[names.index(block) + 1]], number


def boundaries(nodes: Sequence[tuple[str | None, bool]]) -> Boundaries:
    """Return where blocks begin and end.

    Args:
        nodes: each node's block, and whether it runs in backward. Nodes of an earlier block before a later block's
            backward, rematerialized values that both read, don't begin it.
    """
    ends: dict[str, int] = {}
    for i, (block, is_backward) in enumerate(nodes):
        if block and not is_backward:
            ends.pop(block, None)
            ends[block] = i
    begins, waiting = list[int](), list(ends)
    for i, (block, is_backward) in enumerate(nodes):
        if waiting and is_backward and block == waiting[-1]:
            begins.append(i)
            waiting.pop()
    return Boundaries(ends, begins)


def loss_of(gm: GraphModule) -> set[Node]:
    """Return the nodes of the loss: those between the last module's forward and the first module's backward."""
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and meta.role(n) is None]
    last = max((i for i, n in enumerate(nodes) if meta.phase(n) == "forward" and meta.module(n)), default=-1)
    return set(itertools.takewhile(lambda n: not meta.module(n), nodes[last + 1 :]))
