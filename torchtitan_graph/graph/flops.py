"""Count the arithmetic of a traced step.

Convention: a multiply-add is two operations; matrix products and attention count, elementwise work does not; forward
and backward count once, before any recomputation; attention counts the pairs of positions that its mask leaves.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Container, Mapping

import torch
from torch.fx import GraphModule, Node

import torchtitan_graph.ops  # noqa: F401 (registers the grouped operators)
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.graph.edit import value

aten = torch.ops.aten

# Matrix products of size (L, H) x (H, L) per head: forward has scores and values; backward has the gradients of
# queries, keys, values and scores. The scores that fused kernels compute again in backward are recomputation.
ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
)
_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    torch.ops.higher_order.flex_attention_backward,
)

GROUPED_MM = torch.ops.torchtitan_graph.grouped_mm.default


@dataclasses.dataclass(frozen=True)
class Flops:
    """Operations of one microbatch on one device: `matmul`, and `attention`, by block, as if every position saw every
    other."""

    matmul: int
    attention: Mapping[str, int]

    def of(self, visible: Mapping[str, float]) -> float:
        """Give the operations where a block's mask leaves the fraction `visible` of all pairs."""
        return self.matmul + sum(count * visible[block] for block, count in self.attention.items())


def count_flops(gm: GraphModule, blocks: Container[str]) -> Flops:
    """Count the operations of a graph that no pass has changed; attention outside any block is counted under "".

    What attention pads (a sink's column, values as wide as keys) counts as it is computed.
    """
    matmul, attention = 0, collections.Counter[str]()
    for node in gm.graph.nodes:
        if node.target in (aten.mm.default, aten.bmm.default):
            matmul += 2 * math.prod(value(node).shape) * _shape(node, 0)[-1]
        elif node.target is aten.addmm.default:
            matmul += 2 * math.prod(value(node).shape) * _shape(node, 1)[-1]
        elif node.target is GROUPED_MM:
            matmul += 2 * _shape(node, 0).numel() * value(node).shape[-1]
        elif node.target is torch.ops.torchtitan_graph.grouped_outer.default:
            matmul += 2 * _shape(node, 0).numel() * _shape(node, 1)[-1]
        elif node.target in ATTENTION:
            attention[block_of(node, blocks) or ""] += 2 * _product(_shape(node, 0), _shape(node, 1))
        elif node.target in _BACKWARD:
            # The gradient of the output comes first, then query, key and value; flex has query, key, value first.
            q, k = (0, 1) if node.target is _BACKWARD[-1] else (1, 2)
            attention[block_of(node, blocks) or ""] += 4 * _product(_shape(node, q), _shape(node, k))
    return Flops(matmul, attention)


def _product(q_BNLH: torch.Size, k_BNLH: torch.Size) -> int:
    B, N, Lq, H = q_BNLH
    return 2 * B * N * Lq * k_BNLH[2] * H


def _shape(node: Node, argument: int) -> torch.Size:
    return value(node.args[argument]).shape  # type: ignore[arg-type]
