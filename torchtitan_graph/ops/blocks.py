"""Custom operators of MX formats: rows whose blocks of 32 numbers have a scale each, and a GPU's products of groups of
such rows. https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf, section 6.3.

Rows come sorted by group; `offsets_E[e]`, int32, is where group e ends. Numbers are e4m3. torch has the kernels for
GPUs of compute capability 10.0. They read scales as bytes, in tiles of 128 rows and 4 blocks (`_tiles`), and each
group's begin with a tile of their own: rows and blocks get places, and nothing waits for the host, unless it is
emulated.
"""

import functools
import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_graph.ops.experts import clear_behind, flops_of_groups, one_for_each_group
from torchtitan_graph.ops.float8 import (
    aligned_ends,
    equal_groups_of_places,
    fake_outer,
    flops_of_columns,
    in_sixteens,
    is_by_kernel,
    num_places_of,
    places_of,
    rows_in_sixteens,
    spread_columns,
)
from torchtitan_graph.ops.operator import equal_groups, operator

BLOCK = 32  # numbers of a row with one scale
_TILE_ROWS, _TILE_BLOCKS = 128, 4
_NAN = 255  # a scale's byte is its exponent plus 127, or this


def _largest_exponent(dtype: torch.dtype) -> int:
    """Return the exponent of the largest power of two in a format."""
    return math.frexp(torch.finfo(dtype).max)[1] - 1


def _fake_blocks(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    width = -(-x.shape[-1] // BLOCK) * BLOCK
    scales = x.new_empty(*x.shape[:-1], width // BLOCK, dtype=torch.float32)
    return x.new_empty(*x.shape[:-1], width, dtype=dtype), scales


@operator(_fake_blocks)
def scaled_blocks(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows (..., D), padded by zeros to whole blocks of 32 numbers, each block divided by its scale and rounded
    to a float8 format; and the scales (..., blocks), fp32.

    A scale is the largest power of two up to the block's largest magnitude, divided by that of the format; larger
    values are then clamped to the format's largest number. It is at least 2**-126; it is nan if a number in the block
    is not finite.
    """
    limit, largest_exponent = torch.finfo(dtype).max, _largest_exponent(dtype)
    if x.is_cuda:
        from torchtitan_graph.ops.float8_kernels import write_scaled_blocks

        found = _fake_blocks(x, dtype)
        write_scaled_blocks(*found, x, largest_exponent)
        return found
    if missing := -x.shape[-1] % BLOCK:
        x = F.pad(x, (0, missing))
    blocks = x.unflatten(-1, (x.shape[-1] // BLOCK, BLOCK)).float()
    magnitude = blocks.abs().amax(-1, keepdim=True)
    exponent = ((magnitude.view(torch.int32) >> 23) - largest_exponent).clamp(min=1)  # a magnitude has no sign
    scale = torch.where(magnitude.isfinite(), (exponent << 23).view(torch.float32), math.nan)
    # A cast alone gives inf in e5m2; in e4m3 it depends on the device.
    numbers = (blocks / scale).clamp(-limit, limit).to(dtype)
    return numbers.flatten(-2).contiguous(), scale.squeeze(-1).contiguous()


def _fake_columns(x_SF: Tensor, offsets_E: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    num_places, columns = num_places_of(x_SF.shape[0], offsets_E.shape[0], BLOCK), x_SF.shape[1]
    scales = x_SF.new_empty(columns, num_places // BLOCK, dtype=torch.float32)
    return x_SF.new_empty(columns, num_places, dtype=dtype), scales


@operator(_fake_columns, examples=equal_groups)
def columns_in_blocks(x_SF: Tensor, offsets_E: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return columns in blocks of 32 rows of a group, (F, P), and their scales (F, P / 32): `scaled_blocks` of them,
    where each group begins at a multiple of 32 places and has zeros behind it, one without rows a block of them. P
    depends on the number of rows alone.
    """
    if x_SF.is_cuda:
        from torchtitan_graph.ops.float8_kernels import write_columns_in_blocks

        found = _fake_columns(x_SF, offsets_E, dtype)
        write_columns_in_blocks(*found, x_SF, *rows_of_blocks(offsets_E, found[1].shape[1]), _largest_exponent(dtype))
        return found
    place_S, _, num_places = places_of(offsets_E, x_SF.shape[0], BLOCK, least=1)
    return scaled_blocks(spread_columns(x_SF, place_S, num_places), dtype)


def rows_of_blocks(offsets_E: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Return the first row of each block of places, and how many rows it has, at most 32; 0 behind the last group."""
    ends_E = aligned_ends(offsets_E, BLOCK, least=1).long()
    begins_E, first_row_E = (torch.cat([each.new_zeros(1), each[:-1]]) for each in (ends_E, offsets_E.long()))
    place_B = torch.arange(num_blocks, device=offsets_E.device) * BLOCK
    group_B = torch.searchsorted(ends_E, place_B, right=True).clamp(max=offsets_E.shape[0] - 1)
    first_B = place_B + (first_row_E - begins_E)[group_B]
    return first_B, (offsets_E[group_B] - first_B).clamp(0, BLOCK)


@operator(lambda q, scale: torch.empty_like(q, dtype=torch.float32), elementwise=True)
def of_blocks(q: Tensor, scale: Tensor) -> Tensor:
    """Return the numbers (..., D), fp32, that those in blocks stand for. As aten's views it would name the number of
    rows, which may depend on data."""
    return (q.unflatten(-1, (scale.shape[-1], BLOCK)).float() * scale[..., None]).flatten(-2)


def _fake_mm(x_SD: Tensor, scale_SB: Tensor, w_EFD: Tensor, scale_EFB: Tensor, offsets_E: Tensor) -> Tensor:
    return x_SD.new_empty(x_SD.shape[0], w_EFD.shape[1], dtype=torch.bfloat16)


@operator(_fake_mm, flops=flops_of_groups, recompute="alternate", examples=equal_groups)
def blocked_grouped_mm(x_SD: Tensor, scale_SB: Tensor, w_EFD: Tensor, scale_EFB: Tensor, offsets_E: Tensor) -> Tensor:
    """Return each group's rows times its own matrix, transposed, both in blocks: (S, D) x (E, F, D) -> (S, F), bf16."""
    num_rows, num_groups, width = x_SD.shape[0], w_EFD.shape[0], w_EFD.shape[1]
    if num_rows == 0:  # no rows in any group
        return x_SD.new_empty(0, width, dtype=torch.bfloat16)
    place_S, _, num_places = places_of(offsets_E, num_rows, _TILE_ROWS)
    bytes_SB, bytes_EFB = _in_tiles_of(_bytes(scale_SB)), _in_tiles_of(_bytes(scale_EFB), rows=True)
    bytes_PB = bytes_SB.new_zeros(num_places, bytes_SB.shape[1]).index_copy(0, place_S, bytes_SB)
    w_EFD = in_sixteens(w_EFD, rows=True)
    scales = _tiles(bytes_PB).view_as(bytes_PB), _tiles(bytes_EFB.flatten(0, 1)).view(num_groups, -1)
    out_SF = _product(x_SD, scales[0], w_EFD.transpose(1, 2), scales[1], offsets_E)[:, :width].contiguous()
    return clear_behind(out_SF, offsets_E)


@operator(
    fake_outer,
    flops=functools.partial(flops_of_columns, BLOCK),
    dynamic_rows=one_for_each_group,
    records=is_by_kernel,
    examples=lambda tensors, number: equal_groups_of_places(tensors, number, BLOCK),
)
def blocked_grouped_outer(
    x_DP: Tensor, scale_DB: Tensor, y_FP: Tensor, scale_FB: Tensor, offsets_E: Tensor, emulate: bool
) -> Tensor:
    """Return the sum of outer products of each group's rows, of `columns_in_blocks`: (D, P), (F, P) -> (E, D, F), bf16;
    or fp32, if emulated, where the host reads the offsets."""
    rows, columns = x_DP.shape[0], y_FP.shape[0]
    # The kernel writes nothing for a group without rows: each has a block, of zeros.
    ends_E = aligned_ends(offsets_E, BLOCK, least=1)
    if emulate:
        out_EDF = x_DP.new_empty(len(ends_E), rows, columns, dtype=torch.float32)
        for out_DF, (begin, end) in zip(out_EDF, itertools.pairwise([0, *ends_E.tolist()]), strict=True):
            parts = slice(begin, end), slice(begin // BLOCK, end // BLOCK)
            x, y = (of_blocks(q[:, parts[0]], scale[:, parts[1]]) for q, scale in ((x_DP, scale_DB), (y_FP, scale_FB)))
            torch.mm(x, y.t(), out=out_DF)  # in fp32 under autocast too, unlike `@`
        return out_EDF
    scales = [_by_group(_bytes(each), ends_E // BLOCK) for each in (scale_DB, scale_FB)]
    x_DP, y_FP = (rows_in_sixteens(each) for each in (x_DP, y_FP))
    return _product(x_DP, scales[0], y_FP.t(), scales[1], ends_E)[:, :rows, :columns].contiguous()


def _product(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offsets_E: Tensor) -> Tensor:
    by_block, in_tiles = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    return F.scaled_grouped_mm(  # type: ignore[attr-defined, no-any-return]  # torch's stubs leave it out
        a,
        b,
        scale_a.view(torch.float8_e8m0fnu),
        by_block,
        scale_b.view(torch.float8_e8m0fnu),
        by_block,
        swizzle_a=in_tiles,
        swizzle_b=in_tiles,
        offs=offsets_E,
        output_dtype=torch.bfloat16,
    )


def _bytes(scale: Tensor) -> Tensor:
    """Return scales, powers of two or nan, as a kernel's bytes."""
    return torch.where(scale.isnan(), _NAN, scale.view(torch.int32) >> 23).to(torch.uint8)


def _in_tiles_of(scales: Tensor, rows: bool = False) -> Tensor:
    """Return scales padded by zeros to whole tiles' blocks; with `rows` their rows too."""
    return F.pad(scales, (0, -scales.shape[-1] % _TILE_BLOCKS, 0, -scales.shape[-2] % _TILE_ROWS if rows else 0))


def _tiles(scales_RB: Tensor) -> Tensor:
    """Return scales of whole tiles in the kernel's order: tile by tile, rows of tiles first; in a tile its rows by
    their number modulo 32, then by the rest, and each row's four blocks."""
    rows, blocks = scales_RB.shape[0] // _TILE_ROWS, scales_RB.shape[1] // _TILE_BLOCKS
    return scales_RB.view(rows, 4, 32, blocks, _TILE_BLOCKS).permute(0, 3, 2, 1, 4).reshape(rows, blocks, -1)


def _by_group(scales_RB: Tensor, ends_E: Tensor) -> Tensor:
    """Return scales whose blocks are in groups in the kernel's order: group by group, each in tiles of its own.
    `ends_E` is where each group's blocks end."""
    scales_RB = F.pad(scales_RB, (0, 0, 0, -scales_RB.shape[0] % _TILE_ROWS))
    place_B, _, num_places = places_of(ends_E, scales_RB.shape[1], _TILE_BLOCKS)
    placed_RP = scales_RB.new_zeros(scales_RB.shape[0], num_places).index_copy(1, place_B, scales_RB)
    tiles_RTN = _tiles(placed_RP)
    rows, num_tiles, size = tiles_RTN.shape
    # Where each group's tiles end; what is left behind the last group is one more.
    ends_G = torch.cat([aligned_ends(ends_E, _TILE_BLOCKS) // _TILE_BLOCKS, ends_E.new_full((1,), num_tiles)])
    sizes_G = torch.diff(ends_G, prepend=ends_G.new_zeros(1))
    column_T = torch.arange(num_tiles, device=ends_G.device, dtype=ends_G.dtype)
    group_T = torch.searchsorted(ends_G, column_T, right=True)
    begin_T, size_T = (ends_G - sizes_G)[group_T], sizes_G[group_T]
    row_R1 = torch.arange(rows, device=ends_G.device, dtype=ends_G.dtype).unsqueeze(1)
    at_RT = begin_T * rows + row_R1 * size_T + (column_T - begin_T)
    out = tiles_RTN.new_empty(rows * num_tiles, size)
    return out.index_copy(0, at_RT.flatten().long(), tiles_RTN.flatten(0, 1)).view_as(placed_RP)
