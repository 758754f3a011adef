"""Custom operators: rows in float8, and a GPU's products of groups of such rows, with group sizes that depend on data.

Rows come sorted by group; `offsets_E[e]`, int32, is where group e ends. Numbers are e4m3, and each row along a
product's inner dim has its scale. Shapes do not depend on the sizes, so a graph holds each product as one node. torch
has the kernels for GPUs of compute capability 9.0 or more; nothing here waits for the host.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_graph.ops.experts import flops_of_groups, one_for_each_group
from torchtitan_graph.ops.operator import equal_groups, operator

# Numbers, and bytes: the kernel's alignment of widths, and of the begin of each group's columns.
ALIGNED = 16
_LEAST = 1e-12  # magnitude that is scaled up to the largest number


def _fake_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


@operator(_fake_rows)
def scaled_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows (..., D) divided by a scale for each and rounded to a float8 format, and the scales (..., 1), fp32:
    a row's largest magnitude over the format's largest number."""
    limit = torch.finfo(dtype).max  # a cast alone gives inf in e5m2, in e4m3 it depends on the device
    if x.is_cuda:
        from torchtitan_graph.ops.float8_kernels import write_scaled_rows

        found = _fake_rows(x, dtype)
        write_scaled_rows(*found, x, _LEAST)
        return found
    largest = x.abs().amax(-1, keepdim=True) if x.numel() else x.new_zeros(*x.shape[:-1], 1)
    scale = largest.float().clamp(min=_LEAST) / limit
    return (x.float() / scale).clamp(-limit, limit).to(dtype).contiguous(), scale


def _fake_mm(x_SD: Tensor, scale_S: Tensor, w_EFD: Tensor, scale_EF: Tensor, offsets_E: Tensor) -> Tensor:
    return x_SD.new_empty(x_SD.shape[0], w_EFD.shape[1], dtype=torch.bfloat16)


@operator(_fake_mm, flops=flops_of_groups, examples=equal_groups)
def scaled_grouped_mm(x_SD: Tensor, scale_S: Tensor, w_EFD: Tensor, scale_EF: Tensor, offsets_E: Tensor) -> Tensor:
    """Return each group's rows times its own matrix, transposed: (S, D) x (E, F, D) -> (S, F), bf16. Widths that are no
    multiples of 16 cost copies."""
    num_rows, width = x_SD.shape[0], w_EFD.shape[1]
    if num_rows == 0:  # no rows in any group
        return x_SD.new_empty(0, width, dtype=torch.bfloat16)
    x_SD, w_EFD, scale_EF = in_sixteens(x_SD), in_sixteens(w_EFD, rows=True), in_sixteens(scale_EF)
    return _product(x_SD, scale_S, w_EFD.transpose(1, 2), scale_EF, offsets_E)[:, :width].contiguous()


def _fake_outer(x_SD: Tensor, scale_ED: Tensor, y_SF: Tensor, scale_EF: Tensor, offsets_E: Tensor) -> Tensor:
    return x_SD.new_empty(offsets_E.shape[0], x_SD.shape[1], y_SF.shape[1], dtype=torch.bfloat16)


@operator(_fake_outer, flops=flops_of_groups, dynamic_rows=one_for_each_group, examples=equal_groups)
def scaled_grouped_outer(x_SD: Tensor, scale_ED: Tensor, y_SF: Tensor, scale_EF: Tensor, offsets_E: Tensor) -> Tensor:
    """Return the sum of outer products of each group's rows, with a scale for each column of a group: (S, D), (S, F) ->
    (E, D, F), bf16."""
    num_rows, rows, columns = x_SD.shape[0], x_SD.shape[1], y_SF.shape[1]
    if num_rows == 0:
        return x_SD.new_zeros(offsets_E.shape[0], rows, columns, dtype=torch.bfloat16)
    place_S, ends_E, num_places = places_of(offsets_E, num_rows, ALIGNED)
    x_DP, y_FP = (spread_columns(in_sixteens(each), place_S, num_places) for each in (x_SD, y_SF))
    scales = (in_sixteens(each).flatten() for each in (scale_ED, scale_EF))
    return _product(x_DP, next(scales), y_FP.t(), next(scales), ends_E)[:, :rows, :columns].contiguous()


def _product(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offsets_E: Tensor) -> Tensor:
    by_row = F.ScalingType.RowWise
    return F.scaled_grouped_mm(  # type: ignore[attr-defined, no-any-return]  # torch's stubs leave it out
        a, b, scale_a.contiguous(), by_row, scale_b.contiguous(), by_row, offs=offsets_E, output_dtype=torch.bfloat16
    )


def in_sixteens(x: Tensor, rows: bool = False) -> Tensor:
    """Return contiguous rows, each zero-padded to a multiple of 16 numbers; with `rows` their number too."""
    pads = (0, -x.shape[-1] % ALIGNED, 0, -x.shape[-2] % ALIGNED if rows else 0)
    if not any(pads):
        return x.contiguous()
    # Few kernels support float8; a zero's bits are zeros.
    return F.pad(x.view(torch.uint8), pads).view(x.dtype) if x.element_size() == 1 else F.pad(x, pads)


def aligned_ends(offsets_E: Tensor, multiple: int, least: int = 0) -> Tensor:
    """Return where groups end if each begins at a multiple; one of fewer rows than `least` gets places for as many."""
    sizes_E = torch.diff(offsets_E, prepend=offsets_E.new_zeros(1)).clamp(min=least)
    return (-(-sizes_E // multiple) * multiple).cumsum(0, dtype=torch.int32)


def places_of(offsets_E: Tensor, num_rows: int, multiple: int, least: int = 0) -> tuple[Tensor, Tensor, int]:
    """Return a place for each row such that each group begins at a multiple; where each group then ends, see
    `aligned_ends`; and the number of places, whatever the groups."""
    ends_E = aligned_ends(offsets_E, multiple, least)
    begins_E, rows_before_E = (torch.cat([each.new_zeros(1), each[:-1]]) for each in (ends_E, offsets_E))
    row_S = torch.arange(num_rows, device=offsets_E.device, dtype=offsets_E.dtype)
    group_S = torch.searchsorted(offsets_E, row_S, right=True).clamp(max=offsets_E.shape[0] - 1)  # after all: no group
    num_places = -(-num_rows // multiple) * multiple + multiple * offsets_E.shape[0]
    return (row_S + (begins_E - rows_before_E)[group_S]).long(), ends_E, num_places


def spread_columns(x_SD: Tensor, place_S: Tensor, num_places: int) -> Tensor:
    """Return (D, places) with each row's numbers at its place, and zeros elsewhere."""
    numbers = (x_SD.view(torch.uint8) if x_SD.element_size() == 1 else x_SD).t()  # few kernels support float8
    return numbers.new_zeros(x_SD.shape[1], num_places).index_copy_(1, place_S, numbers).view(x_SD.dtype)
