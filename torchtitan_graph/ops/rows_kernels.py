"""Rows in another order on a GPU, in Triton: each program computes one row. There is no tuning.

Imported on a GPU alone: a CPU's torch brings no Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # numbers of a row at a time
_WARPS = 4


@triton.jit
def _sums(rows, index, out, COPIES: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    for begin in range(0, D, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), dtype=WIDE)
        for copy in range(COPIES):
            row = tl.load(index + token * COPIES + copy).to(tl.int64)
            total += tl.load(rows + row * D + at, mask=at < D, other=0.0).to(WIDE)
        tl.store(out + token * D + at, total, mask=at < D)


@triton.jit
def _scored(rows, scores, index, out, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(index + place).to(tl.int64)
    score = tl.load(scores + row).to(WIDE)
    for begin in range(0, D, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(rows + row * D + at, mask=at < D, other=0.0).to(WIDE)
        tl.store(out + place * D + at, x * score, mask=at < D)


@triton.jit
def _scored_backward(  # type: ignore[no-untyped-def]
    grads, index, rows, scores, of_rows, of_scores, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(index + row).to(tl.int64)
    score = tl.load(scores + row).to(WIDE)
    total = tl.zeros((BLOCK,), dtype=WIDE)
    for begin in range(0, D, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        gradient = tl.load(grads + place * D + at, mask=at < D, other=0.0).to(WIDE)
        total += gradient * tl.load(rows + row * D + at, mask=at < D, other=0.0).to(WIDE)
        tl.store(of_rows + row * D + at, gradient * score, mask=at < D)
    tl.store(of_scores + row, tl.sum(total, axis=0))


def write_sums(out_TD: Tensor, rows_SD: Tensor, index_S: Tensor, copies: int) -> None:
    """Write the result of `rows.sums_of_rows`; `out` is contiguous."""
    _launch(_sums, out_TD, rows_SD, index_S, out_TD, COPIES=copies)


def write_scored(out_SD: Tensor, rows_SD: Tensor, scores_S1: Tensor, index_S: Tensor) -> None:
    """Write the result of `rows.scored_rows`; `out` is contiguous."""
    _launch(_scored, out_SD, rows_SD, scores_S1, index_S, out_SD)


def write_scored_gradients(
    of_rows_SD: Tensor, of_scores_S1: Tensor, grads_UD: Tensor, index_S: Tensor, rows_SD: Tensor, scores_S1: Tensor
) -> None:
    """Write the results of `rows.scored_rows_backward`; both are contiguous."""
    _launch(_scored_backward, of_rows_SD, grads_UD, index_S, rows_SD, scores_S1, of_rows_SD, of_scores_S1)


def _launch(kernel, one_each: Tensor, *tensors: Tensor, **constants: int) -> None:  # type: ignore[no-untyped-def]
    """Run a program for each row of `one_each`."""
    if one_each.numel():
        number, width = one_each.shape
        kernel[(number,)](
            *(x.contiguous() for x in tensors),
            **constants, D=width, WIDE=tl.float64 if one_each.dtype == torch.float64 else tl.float32,
            BLOCK=min(_BLOCK, triton.next_power_of_2(width)), num_warps=_WARPS,
        )  # fmt: skip
