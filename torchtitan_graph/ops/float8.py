"""Custom operators: rows in float8, and a GPU's products of groups of such rows, with group sizes that depend on data.

Rows come sorted by group; `offsets_E[e]` is where group e ends, int32 for a GPU. Numbers are e4m3, emulated ones
perhaps e5m2, and each row along a product's inner dim has its scale. Shapes do not depend on the sizes, so a graph
holds each product as one node. torch has the kernels for GPUs of compute capability 9 and 10; nothing here waits for
the host, unless it is emulated.
"""

import functools
import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_graph.ops.experts import clear_behind, flops_of_groups, one_for_each_group
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


@operator(_fake_mm, flops=flops_of_groups, recompute="alternate", examples=equal_groups)
def scaled_grouped_mm(x_SD: Tensor, scale_S: Tensor, w_EFD: Tensor, scale_EF: Tensor, offsets_E: Tensor) -> Tensor:
    """Return each group's rows times its own matrix, transposed: (S, D) x (E, F, D) -> (S, F), bf16. Widths that are no
    multiples of 16 cost copies."""
    num_rows, width = x_SD.shape[0], w_EFD.shape[1]
    if num_rows == 0:  # no rows in any group
        return x_SD.new_empty(0, width, dtype=torch.bfloat16)
    x_SD, w_EFD, scale_EF = in_sixteens(x_SD), in_sixteens(w_EFD, rows=True), in_sixteens(scale_EF)
    out_SF = _product(x_SD, scale_S, w_EFD.transpose(1, 2), scale_EF, offsets_E)[:, :width].contiguous()
    return clear_behind(out_SF, offsets_E)


def _fake_columns(x_SF: Tensor, offsets_E: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    num_places, columns = num_places_of(x_SF.shape[0], offsets_E.shape[0], ALIGNED), x_SF.shape[1]
    return x_SF.new_empty(columns, num_places, dtype=dtype), x_SF.new_empty(
        offsets_E.shape[0], columns, dtype=torch.float32
    )


@operator(_fake_columns, examples=equal_groups)
def scaled_columns(x_SF: Tensor, offsets_E: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return each column of each group's rows divided by a scale and rounded to a float8 format, (F, P), and the scales
    (E, F), fp32: as `scaled_rows`. Each group begins at a multiple of 16 places, and zeros are behind it; P depends on
    the number of rows alone."""
    limit, (num_rows, width) = torch.finfo(dtype).max, x_SF.shape
    if x_SF.is_cuda:
        from torchtitan_graph.ops.float8_kernels import write_scaled_columns

        out_FP, scale_EF = _fake_columns(x_SF, offsets_E, dtype)
        write_scaled_columns(out_FP, scale_EF, x_SF, offsets_E, aligned_ends(offsets_E, ALIGNED), _LEAST)
        return out_FP, scale_EF
    place_S, group_S, num_places = places_of(offsets_E, num_rows, ALIGNED)
    largest_EF = x_SF.new_zeros(offsets_E.shape[0], width)
    largest_EF = largest_EF.scatter_reduce(0, group_S.unsqueeze(1).expand_as(x_SF), x_SF.abs(), "amax")
    scale_EF = largest_EF.float().clamp(min=_LEAST) / limit
    numbers_SF = (x_SF.float() / scale_EF[group_S]).clamp(-limit, limit).to(dtype)
    return spread_columns(numbers_SF, place_S, num_places), scale_EF


def fake_outer(
    x_DP: Tensor, scale_x: Tensor, y_FP: Tensor, scale_y: Tensor, offsets_E: Tensor, emulate: bool
) -> Tensor:
    """Return an outer product's result, as a fake."""
    dtype = torch.float32 if emulate else torch.bfloat16
    return x_DP.new_empty(offsets_E.shape[0], x_DP.shape[0], y_FP.shape[0], dtype=dtype)


def equal_groups_of_places(tensors: Sequence[Tensor], number: int, multiple: int) -> Tensor:
    """Return the ends of groups of equal sizes of the rows that columns in places (D, P) are of."""
    return torch.linspace(0, tensors[0].shape[1] - multiple * number, number + 1)[1:].long()


def flops_of_columns(
    multiple: int, x_DP: Tensor, scale: Tensor, y_FP: Tensor, *_: object, out_val: Tensor, **__: object
) -> int:
    """Return an outer product's FLOPs; the rows' number is rounded up to the multiple at which groups begin."""
    return 2 * x_DP.shape[0] * (x_DP.shape[1] - multiple * out_val.shape[0]) * y_FP.shape[0]


def is_by_kernel(*args: object, **_: object) -> bool:
    """Return whether a call of an outer product, whose last argument is `emulate`, takes a GPU's kernel: else the host
    reads the offsets."""
    return not args[-1]


@operator(
    fake_outer,
    flops=functools.partial(flops_of_columns, ALIGNED),
    dynamic_rows=one_for_each_group,
    records=is_by_kernel,
    examples=lambda tensors, number: equal_groups_of_places(tensors, number, ALIGNED),
)
def scaled_grouped_outer(
    x_DP: Tensor, scale_ED: Tensor, y_FP: Tensor, scale_EF: Tensor, offsets_E: Tensor, emulate: bool
) -> Tensor:
    """Return the sum of outer products of each group's rows, of `scaled_columns`: (D, P), (F, P) -> (E, D, F), bf16; or
    fp32, if emulated, where the host reads the offsets."""
    rows, columns, ends_E = x_DP.shape[0], y_FP.shape[0], aligned_ends(offsets_E, ALIGNED)
    if emulate:
        out_EDF = x_DP.new_empty(len(ends_E), rows, columns, dtype=torch.float32)
        for e, (begin, end) in enumerate(itertools.pairwise([0, *ends_E.tolist()])):
            x, y = x_DP[:, begin:end].float() * scale_ED[e, :, None], y_FP[:, begin:end].float() * scale_EF[e, :, None]
            torch.mm(x, y.t(), out=out_EDF[e])  # in fp32 under autocast too, unlike `@`
        return out_EDF
    if x_DP.shape[1] == ALIGNED * len(ends_E):  # no rows in any group
        return x_DP.new_zeros(len(ends_E), rows, columns, dtype=torch.bfloat16)
    scales = [in_sixteens(each).flatten() for each in (scale_ED, scale_EF)]
    x_DP, y_FP = rows_in_sixteens(x_DP), rows_in_sixteens(y_FP)
    return _product(x_DP, scales[0], y_FP.t(), scales[1], ends_E)[:, :rows, :columns].contiguous()


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


def rows_in_sixteens(q_DP: Tensor) -> Tensor:
    """Return a matrix whose number of rows is padded to a multiple of 16 by zeros."""
    if q_DP.shape[0] % ALIGNED == 0:
        return q_DP
    return F.pad(q_DP.view(torch.uint8), (0, 0, 0, -q_DP.shape[0] % ALIGNED)).view(q_DP.dtype)


def aligned_ends(offsets_E: Tensor, multiple: int, least: int = 0) -> Tensor:
    """Return where groups end if each begins at a multiple; one of fewer rows than `least` gets places for as many."""
    sizes_E = torch.diff(offsets_E, prepend=offsets_E.new_zeros(1)).clamp(min=least)
    return (-(-sizes_E // multiple) * multiple).cumsum(0, dtype=torch.int32)


def num_places_of(num_rows: int, num_groups: int, multiple: int) -> int:
    """Return the number of places that suffice for rows in groups, whatever their sizes, each at a multiple."""
    return -(-num_rows // multiple) * multiple + multiple * num_groups


def places_of(offsets_E: Tensor, num_rows: int, multiple: int, least: int = 0) -> tuple[Tensor, Tensor, int]:
    """Return a place for each row such that each group begins at a multiple, see `aligned_ends`; each row's group; and
    the number of places."""
    ends_E = aligned_ends(offsets_E, multiple, least)
    begins_E, rows_before_E = (torch.cat([each.new_zeros(1), each[:-1]]) for each in (ends_E, offsets_E))
    row_S = torch.arange(num_rows, device=offsets_E.device, dtype=offsets_E.dtype)
    group_S = torch.searchsorted(offsets_E, row_S, right=True).clamp(max=offsets_E.shape[0] - 1)  # after all: no group
    place_S = (row_S + (begins_E - rows_before_E)[group_S]).long()
    return place_S, group_S, num_places_of(num_rows, offsets_E.shape[0], multiple)


def spread_columns(x_SD: Tensor, place_S: Tensor, num_places: int) -> Tensor:
    """Return (D, places) with each row's numbers at its place, and zeros elsewhere."""
    numbers = (x_SD.view(torch.uint8) if x_SD.element_size() == 1 else x_SD).t()  # few kernels support float8
    return numbers.new_zeros(x_SD.shape[1], num_places).index_copy_(1, place_S, numbers).view(x_SD.dtype)
