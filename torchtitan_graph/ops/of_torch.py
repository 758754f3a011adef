"""The declarations of torch's own operators: what their tags, schemas and torch's FLOP formulas don't say."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchtitan_graph.ops.operator import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Attention,
    declare,
    equal_groups,
    num_bytes,
)
from torchtitan_graph.torch_private.distributed import is_gloo
from torchtitan_graph.torch_private.flash import packed_bytes

aten, c10d, higher_order = torch.ops.aten, torch.ops._c10d_functional, torch.ops.higher_order


# --- matrix products ------------------------------------------------------------------------------------------------


def _grouped_product(a: Tensor, b: Tensor, *rest: object, **_: object) -> int:
    rows = a.shape[-2:] if b.dim() == 2 else a.shape  # groups are parts of a matrix, or matrices of a stack
    return 2 * math.prod(rows) * b.shape[-1]


def _convolution_backward(dy: Tensor, x: Tensor, weight: Tensor, *rest: Any, **_: object) -> int:
    """Return twice the FLOPs of forward if both gradients are wanted: there each number of the larger of input and
    output meets the weights of one channel. torch's formula counts other groups of channels as well."""
    _, _, _, _, is_transposed, _, _, wanted = rest
    return 2 * math.prod((x if is_transposed else dy).shape) * math.prod(weight.shape[1:]) * sum(wanted[:2])


def _matrix_times_vector(*args: Any, **_: object) -> int:
    """Return the FLOPs of mv(a, x), dot(x, y), addmv(y, a, x) or addbmm(y, a, b), of which torch has no formula."""
    a, b = args[-2:]
    return 2 * math.prod(a.shape) * (b.shape[-1] if b.dim() == 3 else 1)


for product in (aten.mv.default, aten.dot.default, aten.addmv.default, aten.addbmm.default):
    declare(product, flops=_matrix_times_vector)
for product in (aten.mm.default, aten.addmm.default, aten.bmm.default):
    declare(product, recompute="alternate")
declare(aten._grouped_mm.default, flops=_grouped_product, examples=equal_groups)
declare(aten.convolution_backward.default, flops=_convolution_backward)


# --- attention ------------------------------------------------------------------------------------------------------


def _copied_gradient(dout_BNLH: Tensor, *rest: object, **_: object) -> int:
    """Return the bytes of the copy that a CPU's kernel makes of a gradient whose heads are not adjacent."""
    return 0 if dout_BNLH.transpose(1, 2).is_contiguous() else num_bytes(dout_BNLH)


def _packed(q_BNLH: Tensor, k_BNLH: Tensor, *rest: object, **_: object) -> int:
    return packed_bytes(k_BNLH)


for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
    forward, backward = (getattr(aten, f"_scaled_dot_product_{kernel}{end}").default for end in ("", "_backward"))
    declare(forward, attention=Attention(), scratch=_packed, recompute="costly")
    declare(backward, attention=Attention(query=1, is_backward=True))
declare(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, scratch=_copied_gradient)
declare(higher_order.flex_attention, attention=Attention(), recompute="costly")
declare(higher_order.flex_attention_backward, attention=Attention(is_backward=True))


# --- collectives ----------------------------------------------------------------------------------------------------


def _gathered_by_gloo(x: Tensor, degree: int, group: str, *, out_val: Tensor) -> int:
    """Return the bytes of the copy that gloo gathers into; it is freed soon after the start, when all have arrived."""
    return num_bytes(out_val) if is_gloo(group) else 0


def _summed_by_gloo(x: Tensor, operation: str, degree: int, group: str, **_: object) -> int:
    """Return the bytes of the copy that gloo sums in; it stays until the wait, in place of the input."""
    return num_bytes(x) if is_gloo(group) else 0


declare(c10d.all_gather_into_tensor.default, collective=ALL_GATHER, holds_input=True, scratch=_gathered_by_gloo)
declare(
    c10d.reduce_scatter_tensor.default,
    collective=REDUCE_SCATTER,
    holds_input=True,
    scratch=_summed_by_gloo,
    recompute="costly",
)
declare(c10d.all_reduce.default, collective=ALL_REDUCE)
declare(c10d.all_to_all_single.default, collective=ALL_TO_ALL, holds_input=True, recompute="never")
declare(c10d.wait_tensor.default, waits=True)


# --- memory ---------------------------------------------------------------------------------------------------------


def _taken_rows(*args: object, out_val: Tensor, **_: object) -> int:
    return 2 * num_bytes(out_val)


for op in (aten.embedding.default, aten.index_select.default, aten.gather.default):
    declare(op, num_bytes=_taken_rows)
for op in (
    *(aten._to_copy.default, aten.clone.default, aten._unsafe_view.default, aten.cat.default, aten.stack.default),
    *(aten.constant_pad_nd.default, aten.index_select.default),
):
    declare(op, elementwise=True)
for op in (
    *(aten.copy_.default, aten.copy.default, aten.fill_.Scalar, aten.zero_.default),
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
):
    declare(op, reads_first=False)


# --- compiled regions -----------------------------------------------------------------------------------------------

# Scatter-adds. Inductor's code adds atomically, in an order that differs from run to run. torch's own kernels give the
# same bits in each run (on a GPU those of scatters do with debug.deterministic).
for packet in (
    *(aten.embedding_dense_backward, aten.index_put, aten.index_put_, aten._unsafe_index_put),
    *(aten._unsafe_masked_index_put_accumulate, aten._index_put_impl_, aten.put, aten.index_add),
    *(aten.index_reduce, aten.scatter_add, aten.scatter_reduce),
):
    declare(packet, compiles=False)
# A call of a subgraph, with gradients: Inductor's code of it is wrong on a CPU (2.13).
declare(higher_order.invoke_subgraph, compiles=False)


# --- integers that are legal arguments ------------------------------------------------------------------------------

declare(aten.searchsorted.Tensor, examples=equal_groups)
