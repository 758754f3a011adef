"""Rows in float8 on a GPU, in Triton. A program reads its row for the scale and, from the cache, again to divide it.
There is no tuning, so every run launches the same code.

Imported on a GPU alone: a CPU's torch brings no Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # numbers of a row that a program takes at a time
_WARPS = 4
_FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def _scaled_rows(  # type: ignore[no-untyped-def]
    x, out, scales, R, D, x_E, x_R, x_D, LEAST: tl.constexpr, LARGEST: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin_of_row = x + (row // R) * x_E + (row % R) * x_R
    largest = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, D, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        numbers = tl.load(begin_of_row + at.to(tl.int64) * x_D, mask=at < D, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(numbers), propagate_nan=tl.PropagateNan.ALL)
    # A maximum that leaves NaNs out: they are put back where any was.
    magnitude = tl.max(largest, 0)
    is_nan = tl.max((largest != largest).to(tl.int32), 0) > 0
    scale = tl.maximum(magnitude, LEAST) / LARGEST
    scale = tl.where(is_nan, float("nan"), scale)
    tl.store(scales + row, scale)
    for begin in range(0, D, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        numbers = tl.load(begin_of_row + at.to(tl.int64) * x_D, mask=at < D, other=0.0).to(tl.float32) / scale
        tl.store(out + row * D + at, _rounded(numbers, LARGEST, FORMAT), mask=at < D)


@triton.jit
def _scaled_columns(  # type: ignore[no-untyped-def]
    x, ends, aligned, out, scales, D, P, x_R, x_D, LEAST: tl.constexpr, LARGEST: tl.constexpr, FORMAT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    i = tl.arange(0, ROWS)[:, None]
    begin = tl.load(ends + group - 1, mask=group > 0, other=0).to(tl.int64)
    place = tl.load(aligned + group - 1, mask=group > 0, other=0).to(tl.int64)
    is_last = group == tl.num_programs(0) - 1
    end_of_places = tl.where(is_last, P, tl.load(aligned + group).to(tl.int64))  # zeros behind the last group too
    size, places = tl.load(ends + group).to(tl.int64) - begin, end_of_places - place
    is_column = (column < D)[None, :]
    largest = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, size, ROWS):
        row = first + i
        at = x + (begin + row) * x_R + column[None, :] * x_D
        numbers = tl.load(at, mask=(row < size) & is_column, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(numbers), propagate_nan=tl.PropagateNan.ALL)
    is_nan = tl.max((largest != largest).to(tl.int32), 0) > 0
    scale = tl.maximum(tl.max(largest, 0), LEAST) / LARGEST
    scale = tl.where(is_nan, float("nan"), scale)
    tl.store(scales + group * D + column, scale, mask=column < D)
    for first in range(0, places, ROWS):
        row = first + i
        at = x + (begin + row) * x_R + column[None, :] * x_D
        numbers = tl.load(at, mask=(row < size) & is_column, other=0.0).to(tl.float32) / scale[None, :]
        rounded = tl.where(row < size, _rounded(numbers, LARGEST, FORMAT), 0)
        tl.store(out + column[None, :] * P + place + row, rounded, mask=(row < places) & is_column)


@triton.jit
def _scaled_blocks(  # type: ignore[no-untyped-def]
    x, out, scales, R, D, WIDTH, x_E, x_R, x_D, EXPONENT: tl.constexpr, LARGEST: tl.constexpr, FORMAT: tl.constexpr,
    BLOCKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    begin_of_row = x + (row // R) * x_E + (row % R) * x_R
    numbers = tl.load(begin_of_row + at.to(tl.int64) * x_D, mask=at < D, other=0.0).to(tl.float32)
    scale = _scale_of_blocks(numbers, 1, EXPONENT)
    tl.store(scales + row * (WIDTH // SIZE) + block, scale, mask=block * SIZE < WIDTH)
    rounded = _rounded(numbers / scale[:, None], LARGEST, FORMAT)
    tl.store(out + row * WIDTH + at, rounded, mask=at < WIDTH)


@triton.jit
def _columns_in_blocks(  # type: ignore[no-untyped-def]
    x, first_rows, sizes, out, scales, D, P, x_R, x_D, EXPONENT: tl.constexpr, LARGEST: tl.constexpr,
    FORMAT: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, SIZE)[:, None]
    row = tl.load(first_rows + block) + i
    is_there = (i < tl.load(sizes + block)) & (column < D)[None, :]
    numbers = tl.load(x + row * x_R + column[None, :].to(tl.int64) * x_D, mask=is_there, other=0.0).to(tl.float32)
    scale = _scale_of_blocks(numbers, 0, EXPONENT)
    begin_of_column = column.to(tl.int64) * P + block * SIZE
    tl.store(scales + begin_of_column // SIZE, scale, mask=column < D)
    rounded = _rounded(numbers / scale[None, :], LARGEST, FORMAT)
    tl.store(out + begin_of_column[None, :] + i, rounded, mask=(column < D)[None, :])


@triton.jit
def _scale_of_blocks(numbers, DIM: tl.constexpr, EXPONENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scale of each block, which lies along a dim: see `blocks.scaled_blocks`."""
    is_finite = tl.min((tl.abs(numbers) < float("inf")).to(tl.int32), DIM) > 0  # a NaN is not less
    exponent = tl.maximum((tl.max(tl.abs(numbers), DIM).to(tl.int32, bitcast=True) >> 23) - EXPONENT, 1)
    return tl.where(is_finite, (exponent << 23).to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def _to_bytes(  # type: ignore[no-untyped-def]
    x, out, words, D, WIDTH, NUM_BYTES, LEAST: tl.constexpr, LARGEST: tl.constexpr, SIZE: tl.constexpr
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * SIZE + tl.arange(0, SIZE)
    numbers = tl.load(x + row * D + at, mask=at < D, other=0.0).to(tl.float32)
    is_nan = tl.max((numbers != numbers).to(tl.int32), 0) > 0
    scale = tl.maximum(tl.max(tl.abs(numbers), 0), LEAST) / LARGEST
    scale = tl.where(is_nan, float("nan"), scale)
    tl.store(out + row * NUM_BYTES + at, _rounded(numbers / scale, LARGEST, tl.float8e4nv), mask=at < WIDTH)
    tl.store(words + row * (NUM_BYTES // 4) + WIDTH // 4 + block, scale)


@triton.jit
def _of_bytes(  # type: ignore[no-untyped-def]
    given, words, out, D, WIDTH, NUM_BYTES, SIZE: tl.constexpr
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * SIZE + tl.arange(0, SIZE)
    numbers = tl.load(given + row * NUM_BYTES + at, mask=at < D, other=0).to(tl.float8e4nv, bitcast=True)
    scale = tl.load(words + row * (NUM_BYTES // 4) + WIDTH // 4 + block)
    tl.store(out + row * D + at, numbers.to(tl.float32) * scale, mask=at < D)


@triton.jit
def _rounded(numbers, LARGEST: tl.constexpr, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return numbers of a format as bytes; larger ones as its largest, which a NaN stays out of."""
    inside = tl.where(numbers > LARGEST, LARGEST, tl.where(numbers < -LARGEST, -LARGEST, numbers))
    return inside.to(FORMAT).to(tl.uint8, bitcast=True)


def write_scaled_rows(out: Tensor, scales: Tensor, x: Tensor, least: float) -> None:
    """Write the result of `float8.scaled_rows`; `out` and `scales` are contiguous, x (..., D) has any strides."""
    D = x.shape[-1]
    matrices = x if x.dim() == 3 else x.reshape(1, -1, D)
    E, R, _ = matrices.shape
    if E * R:
        _scaled_rows[(E * R,)](
            matrices, out.view(torch.uint8), scales, R, D, *matrices.stride(),
            LEAST=least, LARGEST=torch.finfo(out.dtype).max, FORMAT=_FORMATS[out.dtype],
            BLOCK=min(_BLOCK, triton.next_power_of_2(D)), num_warps=_WARPS,
        )  # fmt: skip


def write_scaled_columns(
    out_DP: Tensor, scale_ED: Tensor, x_SD: Tensor, ends_E: Tensor, aligned_E: Tensor, least: float
) -> None:
    """Write the result of `float8.scaled_columns`, given where groups of rows end, and where their places do; `out_DP`
    and `scale_ED` are contiguous."""
    (E, D), columns = scale_ED.shape, 64
    if E * D:
        _scaled_columns[(E, triton.cdiv(D, columns))](
            x_SD, ends_E, aligned_E, out_DP.view(torch.uint8), scale_ED, D, out_DP.shape[1], *x_SD.stride(),
            LEAST=least, LARGEST=torch.finfo(out_DP.dtype).max, FORMAT=_FORMATS[out_DP.dtype],
            ROWS=32, COLUMNS=columns, num_warps=_WARPS,
        )  # fmt: skip


def write_scaled_blocks(out: Tensor, scales: Tensor, x: Tensor, largest_exponent: int) -> None:
    """Write the result of `blocks.scaled_blocks`; `out` and `scales` are contiguous, x (..., D) has any strides."""
    D, width = x.shape[-1], out.shape[-1]
    matrices = x if x.dim() == 3 else x.reshape(1, -1, D)
    E, R, _ = matrices.shape
    size = width // scales.shape[-1]
    if E * R:
        _scaled_blocks[(E * R, triton.cdiv(width, _BLOCK))](
            matrices, out.view(torch.uint8), scales, R, D, width, *matrices.stride(),
            EXPONENT=largest_exponent, LARGEST=torch.finfo(out.dtype).max, FORMAT=_FORMATS[out.dtype],
            BLOCKS=_BLOCK // size, SIZE=size, num_warps=_WARPS,
        )  # fmt: skip


def write_columns_in_blocks(
    out_DP: Tensor, scale_DB: Tensor, x_SD: Tensor, first_B: Tensor, size_B: Tensor, largest_exponent: int
) -> None:
    """Write the result of `blocks.columns_in_blocks`, of which block b has `size_B[b]` rows of x from `first_B[b]` on,
    int64; `out_DP` and `scale_DB` are contiguous."""
    (D, P), num_blocks, columns = out_DP.shape, scale_DB.shape[1], 64
    if D * num_blocks:
        _columns_in_blocks[(num_blocks, triton.cdiv(D, columns))](
            x_SD, first_B, size_B, out_DP.view(torch.uint8), scale_DB, D, P, *x_SD.stride(),
            EXPONENT=largest_exponent, LARGEST=torch.finfo(out_DP.dtype).max, FORMAT=_FORMATS[out_DP.dtype],
            COLUMNS=columns, SIZE=P // num_blocks, num_warps=_WARPS,
        )  # fmt: skip


def write_bytes(out_SB: Tensor, x_SD: Tensor, width: int, block: int, least: float) -> None:
    """Write the result of `wire.to_float8_bytes`: rows of `width` numbers, zeros behind x's, then their scales."""
    (S, D), largest = x_SD.shape, torch.finfo(torch.float8_e4m3fn).max
    if S:
        _to_bytes[(S, triton.cdiv(width, block))](
            x_SD.contiguous(), out_SB, out_SB.view(torch.float32), D, width, out_SB.shape[1],
            LEAST=least, LARGEST=largest, SIZE=block, num_warps=1,
        )  # fmt: skip


def write_of_bytes(out_SD: Tensor, bytes_SB: Tensor, width: int, block: int) -> None:
    """Write the result of `wire.of_float8_bytes`, given bytes with rows of `width` numbers."""
    S, D = out_SD.shape
    if S:
        given_SB = bytes_SB.contiguous()
        _of_bytes[(S, triton.cdiv(D, block))](
            given_SB, given_SB.view(torch.float32), out_SD, D, width, given_SB.shape[1], SIZE=block, num_warps=1
        )
