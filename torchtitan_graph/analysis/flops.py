"""Count the FLOPs of a traced step.

Convention: a multiply-add is two operations; matrix products, convolutions and attention count, elementwise work does
not; forward and backward count once, before any recomputation; products that all ranks of context parallel repeat count
once among them; attention counts the pairs of positions that its mask allows.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Container, Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

import torchtitan_graph.ops  # noqa: F401 (registers the operators)
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.graph.edit import value
from torchtitan_graph.graph.signature import input_nodes

aten = torch.ops.aten

_OWN = torch.ops.torchtitan_graph
GROUPED_MM = _OWN.grouped_mm.default
_GROUPED = (
    *(GROUPED_MM, _OWN.grouped_outer.default),
    *(_OWN.scaled_grouped_mm.default, _OWN.scaled_grouped_outer.default),
)
VARLEN = (_OWN.varlen_attention.default, _OWN.varlen_attention_backward.default)

# Matrix products per head: forward has scores, (L, H) x (H, L), and outputs, (L, L) x (L, width of values); backward
# the gradients of queries and keys, as large as the first, and of values and scores, as large as the second. The scores
# that fused kernels recompute in backward are recomputation.
ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    VARLEN[0],
    torch.ops.higher_order.flex_attention,
)
_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    VARLEN[1],
    torch.ops.higher_order.flex_attention_backward,
)


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of one microbatch on one device: `matmul`, and `attention`, by block, as if every position saw every
    other."""

    matmul: int
    attention: Mapping[str, int]

    def of(self, visible: Mapping[str, float], length: float = 1.0) -> float:
        """Return the FLOPs where a block's mask allows the fraction `visible` of all pairs, and rows have the fraction
        `length` of the traced tokens."""
        attention = sum(count * visible[block] for block, count in self.attention.items())
        return self.matmul * length + attention * length**2

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
    """Return an attention's FLOPs, forward or backward, as if every position saw every other; 0 for other nodes."""
    if runs_backward(node):
        # The gradient of the output comes first, then query, key and value; flex has query, key, value first.
        return 2 * _products(node, 0 if node.target is _BACKWARD[-1] else 1)
    return _products(node, 0) if node.target in ATTENTION else 0


def runs_backward(node: Node) -> bool:
    """Return whether a node is an attention's backward."""
    return node.target in _BACKWARD


def matmul_flops(node: Node) -> int:
    """Return a matrix product's FLOPs; 0 for other nodes."""
    if node.target in (aten.mm.default, aten.bmm.default, aten._scaled_mm.default):
        return 2 * math.prod(value(node).shape) * _shape(node, 0)[-1]
    if node.target in (aten.addmm.default, aten.baddbmm.default):
        return 2 * math.prod(value(node).shape) * _shape(node, 1)[-1]
    if node.target is aten._grouped_mm.default:
        a, b = _shape(node, 0), _shape(node, 1)  # groups are parts of a matrix, or matrices of a stack
        return 2 * math.prod(a[-2:] if len(b) == 2 else a) * b[-1]
    if node.target is aten.convolution.default:
        return _convolution(_shape(node, 0), _shape(node, 1), value(node).shape, node.args[6])
    if node.target is aten.convolution_backward.default:
        forward = _convolution(_shape(node, 1), _shape(node, 2), _shape(node, 0), node.args[7])
        return forward * sum(node.args[10][:2])  # type: ignore[arg-type, index, misc]
    if node.target in _GROUPED:  # each number of the rows meets a row of its group's matrix, or of the other's
        return 2 * _shape(node, 0).numel() * value(node).shape[-1]
    return 0


def _convolution(x: Sequence[int], weight: Sequence[int], out: Sequence[int], is_transposed: object) -> int:
    """Return a convolution's FLOPs: each number of the larger of input and output meets the weights of one channel."""
    return 2 * math.prod(x if is_transposed else out) * math.prod(weight[1:])


def _computed_alike(gm: GraphModule, group: str) -> set[str]:
    """Return the modules whose products every rank of a group repeats: of parameters, and of values gathered over the
    group. Latent attention expands whole rows of its latent."""
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    alike = set(input_nodes(gm, "param").values())
    for node in gm.graph.nodes:
        gathered = node.target is gather and node.args[2] == group
        if gathered or (node.all_input_nodes and alike.issuperset(node.all_input_nodes)):
            alike.add(node)
    return {meta.module(node) for node in alike if matmul_flops(node)} - {""}


def _products(node: Node, query: int) -> int:
    """Return the FLOPs of the forward's two products of an attention whose query, key and value begin at the argument
    `query`."""
    numbers, Lk = _shape(node, query).numel(), _shape(node, query + 1)[1 if node.target in VARLEN else 2]
    values: Node = node.args[query + 2]  # type: ignore[assignment]
    while values.target is aten.constant_pad_nd.default:
        values = values.args[0]  # type: ignore[assignment]
    H = _shape(node, query)[-1]
    return 2 * (numbers // H) * Lk * (H + value(values).shape[-1])


def _shape(node: Node, argument: int) -> torch.Size:
    return value(node.args[argument]).shape  # type: ignore[arg-type]
