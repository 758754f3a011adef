"""Attention within segments of rows: documents, or parts of them. Its cost is that of the pairs in segments; there is
no mask.

On a GPU, one call of flash attention's variable-length kernels does all segments; on a CPU, torch's causal kernel runs
for each segment. Eager mode and the graph call the same operators, so they have the same bits.

Note [Numbers of segments]
To launch a kernel, the host needs a batch's number of segments and the length of the longest. The operators read both
from a tensor in the host's memory, made with the batch. So nothing waits for the device, and one graph is valid for all
batches: its input of the segments' places has the largest possible size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from torchtitan_graph.ops.loss import wide
from torchtitan_graph.ops.operator import Attention, num_bytes, operator
from torchtitan_graph.torch_private.flash import causal_backward, causal_forward, varlen_backward, varlen_forward


@dataclasses.dataclass(frozen=True)
class Segments:
    """The segments of B rows of L tokens, in place of a mask: a token sees its segment's tokens up to itself.

    begins  (B * L + 1,) int32, on the device: the first token of each segment, counted over all rows, then B * L to
            the end
    sizes   (2,) int64, in the host's memory: the number of segments, and the tokens of the longest
    """

    begins: Tensor
    sizes: Tensor


if Segments not in pytree.SUPPORTED_NODES:
    pytree.register_dataclass(Segments)


def segments_of(begins_BL: Tensor, device: torch.device) -> Segments:
    """Return the segments of rows for a device.

    Args:
        begins_BL: boolean, True where a segment begins: at each row's first token, too. If it is on a device, the host
            waits for it; on meta, nothing is read.
    """
    if begins_BL.is_meta:
        begins = torch.empty(begins_BL.numel() + 1, dtype=torch.int32, device="meta")
        return Segments(begins, torch.tensor(begins_BL.shape, device="cpu"))
    first = begins_BL.cpu().flatten().nonzero().squeeze(1)
    begins = torch.full((begins_BL.numel() + 1,), begins_BL.numel(), dtype=torch.int32, device="cpu")
    begins[: len(first)] = first
    sizes = torch.tensor([len(first), int(begins.diff().max())], device="cpu")
    if device.type == "cuda":
        begins = begins.pin_memory()
    return Segments(begins.to(device, non_blocking=True), sizes)


def _empty_results(q_BLNH: Tensor) -> tuple[Tensor, Tensor]:
    B, L, N, H = q_BLNH.shape
    return q_BLNH.new_empty(B * L, N, H), q_BLNH.new_empty(N, B * L, dtype=wide(q_BLNH.dtype))


def _fake_attention(q_BLNH: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    out_TNH, lse_NT = _empty_results(q_BLNH)
    return out_TNH.view(q_BLNH.shape), lse_NT


def _fake_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _repeated_heads(q_BLNH: Tensor, k_BLKH: Tensor, *rest: object, **_: object) -> int:
    """Return the bytes of the keys and values that are repeated on a CPU, for each query head of a group."""
    repeats = q_BLNH.device.type == "cpu" and q_BLNH.shape[2] > k_BLKH.shape[2]
    return 2 * num_bytes(q_BLNH) if repeats else 0


def _whole_rows(floats: Sequence[Tensor], number: int) -> Tensor:
    """Return the `sizes` or, for another number of integers, the `begins` of segments that are whole rows."""
    B, L = floats[0].shape[:2]
    return torch.tensor([B, L]) if number == 2 else (torch.arange(number) * L).clamp(max=B * L)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q_BLNH, k_BLKH, v_BLKH, begins, sizes, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q_BLNH, k_BLKH, v_BLKH, *output, begins, sizes)


def _backward(ctx, d_out_BLNH: Tensor, *unused: None):  # type: ignore[no-untyped-def]
    return *varlen_attention_backward(d_out_BLNH, *ctx.saved_tensors, ctx.scale), None, None, None


@operator(
    _fake_attention,
    setup=_save,
    backward=_backward,
    attention=Attention(length=1),
    scratch=_repeated_heads,
    recompute="costly",
    examples=_whole_rows,
)
def varlen_attention(
    q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, begins: Tensor, sizes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention within segments, with grouped queries: each of the K key heads serves N/K query heads.

    Args:
        v_BLKH: values, as wide as keys.
        begins, sizes: those of `Segments`.
        scale: factor of the products of queries and keys.

    Returns:
        the result (B, L, N, H), and the logarithms of the sums of exponentials (N, B * L), which backward reads.
    """
    q_TNH, k_TKH, v_TKH = _in_one_row(q_BLNH, k_BLKH, v_BLKH)
    if q_TNH.is_cuda:
        number, longest = sizes.tolist()
        out_TNH, lse_NT = varlen_forward(q_TNH, k_TKH, v_TKH, begins[: number + 1], longest, scale)
        return out_TNH.reshape(q_BLNH.shape), lse_NT
    out_TNH, lse_NT = _empty_results(q_BLNH)
    q_NTH, k_NTH, v_NTH = _by_head(q_TNH, k_TKH, v_TKH)
    for at in _places(begins, sizes):
        out_NLH, lse_NT[:, at] = causal_forward(q_NTH[:, at], k_NTH[:, at], v_NTH[:, at], scale)
        out_TNH[at] = out_NLH.transpose(0, 1)
    return out_TNH.view(q_BLNH.shape), lse_NT


@operator(
    _fake_backward,
    attention=Attention(query=1, length=1, is_backward=True),
    scratch=lambda d_out, *args, **_: _repeated_heads(*args),
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
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    d_out_TNH, q_TNH, k_TKH, v_TKH, out_TNH = _in_one_row(d_out_BLNH, q_BLNH, k_BLKH, v_BLKH, out_BLNH)
    if q_TNH.is_cuda:
        number, longest = sizes.tolist()
        gradients = varlen_backward(
            d_out_TNH, q_TNH, k_TKH, v_TKH, out_TNH, lse_NT, begins[: number + 1], longest, scale
        )
    else:
        gradients = tuple(map(torch.empty_like, (q_TNH, k_TKH, v_TKH)))  # type: ignore[assignment]
        q_NTH, k_NTH, v_NTH = _by_head(q_TNH, k_TKH, v_TKH)
        d_out_NTH, out_NTH = d_out_TNH.transpose(0, 1), out_TNH.transpose(0, 1)
        for at in _places(begins, sizes):
            d_out_NLH, q_NLH, k_NLH, v_NLH, out_NLH, lse_NL = (
                x[:, at] for x in (d_out_NTH, q_NTH, k_NTH, v_NTH, out_NTH, lse_NT)
            )
            parts = causal_backward(d_out_NLH, q_NLH, k_NLH, v_NLH, out_NLH, lse_NL, scale)
            for all_TKH, part_NLH in zip(gradients, parts, strict=True):
                all_TKH[at] = part_NLH.unflatten(0, (all_TKH.shape[1], -1)).sum(1).transpose(0, 1)
    dq, dk, dv = (g.reshape(x.shape) for g, x in zip(gradients, (q_BLNH, k_BLKH, v_BLKH), strict=True))
    return dq, dk, dv


def _in_one_row(*parts: Tensor) -> list[Tensor]:
    """Reshape (B, L, heads, width) to (B * L, heads, width), each head contiguous."""
    return [x.flatten(0, 1) if x.stride(-1) == 1 else x.contiguous().flatten(0, 1) for x in parts]


def _by_head(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (heads, T, width), keys and values repeated for each query head: a CPU's kernel has no groups."""
    groups = q_TNH.shape[1] // k_TKH.shape[1]
    k_TNH, v_TNH = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k_TKH, v_TKH))
    return q_TNH.transpose(0, 1), k_TNH.transpose(0, 1), v_TNH.transpose(0, 1)


def _places(begins: Tensor, sizes: Tensor) -> Iterator[slice]:
    """Yield the tokens of each segment."""
    bounds = begins[: int(sizes[0]) + 1].tolist()
    return (slice(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False))
