"""Attention within segments of rows: documents, or parts of them, each causal, with a window or without. Its cost is
that of the pairs in segments; there is no mask of rows.

On a GPU, one call of flash attention's variable-length kernels does all segments; on a CPU, torch's kernel runs for
pieces of segments (Note [Pieces]). Eager mode and the graph call the same operators, so they have the same bits.

Note [Numbers of segments]
To launch a kernel, the host needs a batch's number of segments and the length of the longest. The operators read both
from a tensor in the host's memory, made with the batch. So nothing waits for the device, and one graph is valid for all
batches: its input of the segments' places has the largest possible size.

Note [Sinks]
A sink adds exp(sink) to a softmax's denominator. With the logarithm of the larger sum, and the result divided by it,
the formulas of the gradients of queries, keys and values stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from torchtitan_graph.ops.loss import wide
from torchtitan_graph.ops.operator import Attention, num_bytes, operator
from torchtitan_graph.ops.pieces import ROWS_AT_A_TIME, Call, calls_of
from torchtitan_graph.ops.varlen_cpu import attend_in_pieces, gradients_in_pieces
from torchtitan_graph.torch_private.flash import packed_bytes, varlen_backward, varlen_forward


@dataclasses.dataclass(frozen=True)
class Segments:
    """The segments of B rows of L tokens, in place of a mask: a token sees its segment's tokens up to itself, or the
    last of them.

    begins  (B * L + 1,) int32, on the device: the first token of each segment, counted over all rows, then B * L to
            the end
    sizes   (3,) int64, in the host's memory: the number of segments, the tokens of the longest, and the most that a
            token sees; 0: all
    places  int64, in the host's memory: the places of the queries in a row; of no size: one at each place
    """

    begins: Tensor
    sizes: Tensor
    places: Tensor


if Segments not in pytree.SUPPORTED_NODES:
    pytree.register_dataclass(Segments)


def segments_of(begins_BL: Tensor, device: torch.device, window: int = 0, places_L: Tensor | None = None) -> Segments:
    """Return the segments of rows for a device.

    Args:
        begins_BL: boolean, True where a segment begins: at each row's first token, too. If it is on a device, the host
            waits for it; on meta, nothing is read.
        window: the most tokens that a token sees, its own among them; 0: all of its segment.
        places_L: places of the queries in a row; None: one at each place.
    """
    if begins_BL.is_meta:
        begins = torch.empty(begins_BL.numel() + 1, dtype=torch.int32, device="meta")
        places = torch.zeros(0 if places_L is None else len(places_L), dtype=torch.int64, device="cpu")
        return Segments(begins, torch.tensor([*begins_BL.shape, window], device="cpu"), places)
    places = torch.zeros(0, dtype=torch.int64, device="cpu") if places_L is None else places_L.cpu()
    first = begins_BL.cpu().flatten().nonzero().squeeze(1)
    begins = torch.full((begins_BL.numel() + 1,), begins_BL.numel(), dtype=torch.int32, device="cpu")
    begins[: len(first)] = first
    sizes = torch.tensor([len(first), int(begins.diff().max()), window], device="cpu")
    if device.type == "cuda":
        begins = begins.pin_memory()
    return Segments(begins.to(device, non_blocking=True), sizes, places)


def _empty_results(q_BLNH: Tensor) -> tuple[Tensor, Tensor]:
    B, L, N, H = q_BLNH.shape
    return q_BLNH.new_empty(B * L, N, H), q_BLNH.new_empty(N, B * L, dtype=wide(q_BLNH.dtype))


def _fake_attention(q_BLNH: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    out_TNH, lse_NT = _empty_results(q_BLNH)
    return out_TNH.view(q_BLNH.shape), lse_NT


def _fake_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, ...]:
    sinks_N = rest[-2]
    of_sinks = sinks_N if isinstance(sinks_N, Tensor) else q.new_empty(0)
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, of_sinks))


def _scratch(q_BLNH: Tensor, k_BLKH: Tensor, copies: int) -> int:
    """Return the most bytes of a call's temporaries on a CPU: `copies` of a row's queries, which may be a single
    piece, or, if rows are short, of those of a call of several pieces, whose arguments are copied, too."""
    if q_BLNH.device.type != "cpu":
        return 0
    B, L = k_BLKH.shape[:2]
    row = num_bytes(q_BLNH) // (q_BLNH.shape[0] * q_BLNH.shape[1])
    return copies * row * max(L, min(2 * ROWS_AT_A_TIME, B * L))


def _scratch_of_forward(q_BLNH: Tensor, k_BLKH: Tensor, *_: object, **__: object) -> int:
    """Return the bytes of forward's temporaries, where a document may be as long as its row."""
    return _scratch(q_BLNH, k_BLKH, 2) + packed_bytes(q_BLNH[:1])  # keys are as many as queries, once expanded


def _scratch_of_backward(d_out_BLNH: Tensor, q_BLNH: Tensor, k_BLKH: Tensor, *_: object, **__: object) -> int:
    """Return the bytes of backward's temporaries; where keys are in half precision, the sums of two gradients, too."""
    is_half = wide(k_BLKH.dtype) != k_BLKH.dtype
    sums = 2 * k_BLKH.numel() * wide(k_BLKH.dtype).itemsize if is_half and k_BLKH.device.type == "cpu" else 0
    return _scratch(q_BLNH, k_BLKH, 6) + sums


def _whole_rows(floats: Sequence[Tensor], number: int) -> Tensor:
    """Return the `sizes`, the `begins` or the `places` of segments that are whole rows, by the number of integers."""
    B, L = floats[0].shape[:2]
    if number == 3:
        return torch.tensor([B, L, 0])
    return (torch.arange(number) * L).clamp(max=B * L) if number > B * L else torch.arange(number)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q_BLNH, k_BLKH, v_BLKH, begins, sizes, places, sinks_N, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q_BLNH, k_BLKH, v_BLKH, *output, begins, sizes, places, sinks_N)


def _backward(ctx, d_out_BLNH: Tensor, *unused: None):  # type: ignore[no-untyped-def]
    *saved, sinks_N = ctx.saved_tensors
    dq, dk, dv, d_sinks_N = varlen_attention_backward(d_out_BLNH, *saved, sinks_N, ctx.scale)
    return dq, dk, dv, None, None, None, None if sinks_N is None else d_sinks_N, None


@operator(
    _fake_attention,
    setup=_save,
    backward=_backward,
    attention=Attention(length=1),
    scratch=_scratch_of_forward,
    recompute="costly",
    examples=_whole_rows,
)
def varlen_attention(
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    begins: Tensor,
    sizes: Tensor,
    places: Tensor,
    sinks_N: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return attention within segments, with grouped queries: each of the K key heads serves N/K query heads.

    Args:
        v_BLKH: values, as wide as keys.
        begins, sizes, places: those of `Segments`; on a GPU without a window or places.
        sinks_N: a logit per head in the softmax's denominator; not on a GPU.
        scale: factor of the products of queries and keys.

    Returns:
        the result (B, L, N, H), and the logarithms of the sums of exponentials (N, B * L), which backward reads.
    """
    q_TNH, k_TKH, v_TKH = _in_one_row(q_BLNH, k_BLKH, v_BLKH)
    if q_TNH.is_cuda:
        number, longest, _ = sizes.tolist()
        out_TNH, lse_NT = varlen_forward(q_TNH, k_TKH, v_TKH, begins[: number + 1], longest, scale)
        return out_TNH.reshape(q_BLNH.shape), lse_NT
    out_TNH, lse_NT = _empty_results(q_BLNH)
    attend_in_pieces(out_TNH, lse_NT, q_TNH, k_TKH, v_TKH, _calls(begins, sizes, places, k_BLKH), scale)
    if sinks_N is not None:  # see Note [Sinks]
        total_NT = torch.logaddexp(lse_NT, sinks_N.type_as(lse_NT).unsqueeze(1))
        out_TNH *= (lse_NT - total_NT).exp().t().unsqueeze(-1)
        lse_NT = total_NT
    return out_TNH.view(q_BLNH.shape), lse_NT


@operator(
    _fake_backward,
    attention=Attention(query=1, length=1, is_backward=True),
    scratch=_scratch_of_backward,
    examples=_whole_rows,
)
def varlen_attention_backward(
    d_out_BLNH: Tensor,
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    out_BLNH: Tensor,
    lse_NT: Tensor,
    begins: Tensor,
    sizes: Tensor,
    places: Tensor,
    sinks_N: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values and sinks; that of no sinks has no size."""
    d_out_TNH, q_TNH, k_TKH, v_TKH, out_TNH = _in_one_row(d_out_BLNH, q_BLNH, k_BLKH, v_BLKH, out_BLNH)
    d_sinks_N = q_BLNH.new_empty(0)
    if q_TNH.is_cuda:
        number, longest, _ = sizes.tolist()
        dq, dk, dv = varlen_backward(
            d_out_TNH, q_TNH, k_TKH, v_TKH, out_TNH, lse_NT, begins[: number + 1], longest, scale
        )
        return dq.reshape(q_BLNH.shape), dk.reshape(k_BLKH.shape), dv.reshape(v_BLKH.shape), d_sinks_N
    given = d_out_TNH, q_TNH, k_TKH, v_TKH, out_TNH, lse_NT
    dq, dk, dv = gradients_in_pieces(*given, _calls(begins, sizes, places, k_BLKH), scale)
    if sinks_N is not None:
        weight_NT = (sinks_N.type_as(lse_NT).unsqueeze(1) - lse_NT).exp()
        delta_TN = (d_out_TNH.type_as(lse_NT) * out_TNH).sum(-1)
        d_sinks_N = -(weight_NT * delta_TN.t()).sum(1).type_as(sinks_N)
    return dq.view(q_BLNH.shape), dk.view(k_BLKH.shape), dv.view(v_BLKH.shape), d_sinks_N


def _in_one_row(*parts: Tensor) -> list[Tensor]:
    """Reshape (B, L, heads, width) to (B * L, heads, width), each head contiguous."""
    return [x.flatten(0, 1) if x.stride(-1) == 1 else x.contiguous().flatten(0, 1) for x in parts]


def _calls(begins: Tensor, sizes: Tensor, places: Tensor, k_BLKH: Tensor) -> tuple[Call, ...]:
    number, _, window = sizes.tolist()
    L = k_BLKH.shape[1]
    return calls_of(tuple(begins[: number + 1].tolist()), window or L, tuple(places.tolist()), L)
