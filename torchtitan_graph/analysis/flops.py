"""Count the FLOPs of a traced step.

Convention: a multiply-add is two operations; matrix products, convolutions and attention count, elementwise work does
not; forward and backward count once, before any recomputation; products that all ranks of context parallel repeat count
once among them; attention counts the pairs of positions that its mask allows.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Container, Mapping

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.traffic import group_of
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.graph.edit import fact, value
from torchtitan_graph.graph.signature import input_nodes
from torchtitan_graph.ops.operator import ALL_GATHER, operator_of

_PAD = torch.ops.aten.constant_pad_nd.default


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of one microbatch on one device: `matmul`, and `attention`, by block, as if every position saw every
    other."""

    matmul: int
    attention: Mapping[str, int]

    def of(self, visible: Mapping[str, float], length: float = 1.0, filled: float = 1.0) -> float:
        """Return the FLOPs where a block's mask allows the fraction `visible` of all pairs, rows have the fraction
        `length` of the traced tokens, and the fraction `filled` of those is no padding."""
        attention = sum(count * visible[block] for block, count in self.attention.items())
        return self.matmul * length * filled + attention * length**2

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.matmul + other.matmul, {**self.attention, **other.attention})  # no block is in two graphs


def count_flops(gm: GraphModule, blocks: Container[str], whole_rows: tuple[str, int] = ("", 1)) -> Flops:
    """Return the FLOPs of a graph that no pass has changed; attention outside any block is counted under "".

    An attention sink counts where it is computed as a key's column. Values count at their own width, even if a kernel
    needs them padded to the keys' width.

    Args:
        whole_rows: the name and the degree of the group that gathers whole rows, if one does.
    """
    group, degree = whole_rows
    alike = _computed_alike(gm, group) if degree > 1 else set()
    matmul, attention = 0, collections.Counter[str]()
    for node in gm.graph.nodes:
        if count := attention_flops(node):
            attention[block_of(node, blocks) or ""] += count
        else:
            matmul += matmul_flops(node) // (degree if meta.module(node) in alike else 1)
    return Flops(matmul, attention)


def flops_of(node: Node) -> int:
    """Return a node's FLOPs, attention's as if every position saw every other."""
    return attention_flops(node) or matmul_flops(node)


def attention_flops(node: Node) -> int:
    """Return an attention's FLOPs, forward or backward, as if every position saw every other; 0 for other nodes.

    Forward has two matrix products per head: scores, (L, H) x (H, L), and outputs, (L, L) x (L, width of values).
    Backward has the gradients of queries and keys, as large as the first, and of values and scores, as large as the
    second. The scores that fused kernels recompute in backward are recomputation.
    """
    attention = operator_of(node.target).attention
    if attention is None:
        return 0
    query, key, values = node.args[attention.query :][:3]
    while values.target is _PAD:  # type: ignore[union-attr]
        values = values.args[0]  # type: ignore[union-attr, assignment]
    q, k, v = (value(x) for x in (query, key, values))  # type: ignore[arg-type]
    H = q.shape[-1]
    products = 2 * (q.numel() // H) * k.shape[attention.length] * (H + v.shape[-1])
    return products * (2 if attention.is_backward else 1)


def matmul_flops(node: Node) -> int:
    """Return a matrix product's FLOPs; 0 for other nodes."""
    op = operator_of(node.target)
    return 0 if op.flops is None or op.attention or op.elementwise else fact(op.flops, node)


def _computed_alike(gm: GraphModule, group: str) -> set[str]:
    """Return the modules whose products every rank of a group repeats: of parameters, and of values gathered over the
    group. Latent attention expands whole rows of its latent."""
    alike = set(input_nodes(gm, "param").values())
    for node in gm.graph.nodes:
        gathered = operator_of(node.target).collective is ALL_GATHER and group_of(node) == group
        if gathered or (node.all_input_nodes and alike.issuperset(node.all_input_nodes)):
            alike.add(node)
    return {meta.module(node) for node in alike if matmul_flops(node)} - {""}
