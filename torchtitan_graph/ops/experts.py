"""Custom operators: products and sums over groups of rows of data-dependent sizes.

Rows come sorted by group; `offsets_E[e]` is where group e ends. Shapes do not depend on the sizes, so a graph holds
each as one node, and their backwards are made of them. Rows behind the last group, such as padding, are in no product
or sum: their results are zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_graph.errors import UserError
from torchtitan_graph.ops.operator import equal_groups, operator
from torchtitan_graph.ops.rows import sums_of_rows


def _has_grouped_kernel(x: Tensor) -> bool:
    """Return whether torch's grouped kernel supports tensors like `x`."""
    return x.is_cuda and x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (9, 0)


def _grouped_kernel(x: Tensor, w: Tensor, offsets_E: Tensor) -> Tensor:
    """Return a product by torch's grouped kernel, (S, D) x (E, D, F) -> (S, F) or (D, S) x (S, F) -> (E, D, F), for any
    widths. Rows or columns must begin at multiples of 16 bytes: others are copied with zero padding."""
    rows, columns = x.shape[-2], w.shape[-1]
    if x.numel() == 0:  # no rows in any group
        shape = (rows, columns) if w.dim() == 3 else (offsets_E.shape[0], rows, columns)
        return x.new_zeros(shape)
    # In experts' products `offsets_E` splits S, whose number depends on data: it is not padded.
    x = _in_eights(x, -1 if w.dim() == 3 else -2)
    w = _in_eights(w, *((-1, -2) if w.dim() == 3 else (-1,)))
    out = F.grouped_mm(x, w, offs=offsets_E)[..., :rows, :columns].contiguous()
    return clear_behind(out, offsets_E) if w.dim() == 3 else out


def clear_behind(out_SF: Tensor, offsets_E: Tensor) -> Tensor:
    """Write zeros over the rows behind the last group, and return them all; the host reads nothing."""
    row_S = torch.arange(out_SF.shape[0], device=out_SF.device, dtype=offsets_E.dtype)
    return out_SF.masked_fill_((row_S >= offsets_E[-1:]).unsqueeze(1), 0)


def _in_eights(x: Tensor, *dims: int) -> Tensor:
    """Return a matrix zero-padded to multiples of eight in those dims (of -1 and -2)."""
    pads = [(-x.shape[dim] % 8 if dim in dims else 0) for dim in (-1, -2)]
    if any(pads):
        is_turned = x.stride(-1) != 1
        x = x.transpose(-1, -2) if is_turned else x  # column-major stays column-major
        padded = F.pad(x, [0, pads[1 if is_turned else 0], 0, pads[0 if is_turned else 1]])
        return padded.transpose(-1, -2) if is_turned else padded
    return x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _is_aligned(x: Tensor) -> bool:
    """Return whether each row of a matrix, or each column, is contiguous and begins at a multiple of 16 bytes."""
    rows, columns = x.shape[-2:]
    down, right = x.stride()[-2:]
    step, size = (down, columns) if right == 1 else (right, rows)
    steps = (step, *x.stride()[:-2])
    return (
        1 in (down, right) and step >= size and not any(n * x.element_size() % 16 for n in (*steps, x.storage_offset()))
    )


def _groups(offsets_E: Tensor, num_rows: int) -> list[tuple[int, int]]:
    ends = offsets_E.tolist()
    if [0, *ends, num_rows] != sorted([0, *ends, num_rows]):
        raise UserError(
            f"groups of rows end at {str(ends):.100}, and there are {num_rows:,} rows: the ends must rise from 0 to the"
            " number of rows at most. Of counts they are torch.cumsum(counts, 0)"
        )
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.transposed = inputs
    ctx.save_for_backward(*tensors)


def _grouped_mm_backward(ctx, grad_SF: Tensor):  # type: ignore[no-untyped-def]
    x_SD, w, offsets_E = ctx.saved_tensors
    grad_SF, grad_x, grad_w = grad_SF.contiguous(), None, None
    if ctx.needs_input_grad[0]:
        grad_x = grouped_mm(grad_SF, w, offsets_E, not ctx.transposed)
    if ctx.needs_input_grad[1]:  # in the layout of `w`, so that it is contiguous
        grad_w = grouped_outer(*((grad_SF, x_SD) if ctx.transposed else (x_SD, grad_SF)), offsets_E)
    return grad_x, grad_w, None, None


def flops_of_groups(rows: Tensor, *rest: object, out_val: Tensor, **_: object) -> int:
    """Return a product's FLOPs: each number of the rows meets a row of its group's matrix, or of the other's."""
    return 2 * rows.numel() * out_val.shape[-1]


def one_for_each_group(*args: object, **_: object) -> bool:
    """Return False, as `dynamic_rows` of operators whose result's size does not depend on the number of rows."""
    return False


def _never_waits(x: Tensor, *rest: object, **_: object) -> bool:
    return _has_grouped_kernel(x)


@operator(
    lambda x_SD, w, offsets_E, transposed: x_SD.new_empty(x_SD.shape[0], w.shape[1 if transposed else 2]),
    setup=_save,
    backward=_grouped_mm_backward,
    flops=flops_of_groups,
    recompute="alternate",
    records=_never_waits,
    examples=equal_groups,
)
def grouped_mm(x_SD: Tensor, w: Tensor, offsets_E: Tensor, transposed: bool) -> Tensor:
    """Return each group's rows times its own matrix: (S, D) x (E, D, F), or transposed (E, F, D), -> (S, F).

    bf16 on a recent GPU uses torch's grouped kernel; widths that are no multiples of eight cost copies. Elsewhere the
    groups are multiplied one after another, without padding, at the price of reading the offsets on the host, which on
    a GPU waits for it.
    """
    w_EDF = w.transpose(1, 2) if transposed else w
    if _has_grouped_kernel(x_SD):
        return _grouped_kernel(x_SD, w_EDF, offsets_E)
    out_SF, end = x_SD.new_empty(x_SD.shape[0], w_EDF.shape[2]), 0
    for (begin, end), w_DF in zip(_groups(offsets_E, len(x_SD)), w_EDF, strict=True):
        torch.mm(x_SD[begin:end], w_DF, out=out_SF[begin:end])
    out_SF[end:] = 0
    return out_SF


@operator(
    lambda x_SD, y_SF, offsets_E: x_SD.new_empty(offsets_E.shape[0], x_SD.shape[1], y_SF.shape[1]),
    flops=flops_of_groups,
    dynamic_rows=one_for_each_group,
    records=_never_waits,
    examples=equal_groups,
)
def grouped_outer(x_SD: Tensor, y_SF: Tensor, offsets_E: Tensor) -> Tensor:
    """Return the sum of outer products of each group's rows: (S, D), (S, F) -> (E, D, F); zeros for an empty group."""
    if _has_grouped_kernel(x_SD):
        return _grouped_kernel(x_SD.t(), y_SF, offsets_E)
    out_EDF = x_SD.new_empty(offsets_E.shape[0], x_SD.shape[1], y_SF.shape[1])
    for (begin, end), out_DF in zip(_groups(offsets_E, len(x_SD)), out_EDF, strict=True):
        torch.mm(x_SD[begin:end].t(), y_SF[begin:end], out=out_DF)
    return out_EDF


def _fake_by_group(x_SF: Tensor, offsets_E: Tensor) -> Tensor:
    return x_SF.new_empty(offsets_E.shape[0], x_SF.shape[1])


@operator(
    _fake_by_group, dynamic_rows=one_for_each_group, records=lambda x_SF, *_, **__: x_SF.is_cuda, examples=equal_groups
)
def grouped_sum(x_SF: Tensor, offsets_E: Tensor) -> Tensor:
    """Return the sum of each group's rows: (S, F) -> (E, F)."""
    if x_SF.is_cuda:
        return _sum_by_product(x_SF, offsets_E)
    out_EF = x_SF.new_empty(offsets_E.shape[0], x_SF.shape[1])
    for (begin, end), out_F in zip(_groups(offsets_E, len(x_SF)), out_EF, strict=True):
        torch.sum(x_SF[begin:end], dim=0, out=out_F)
    return out_EF


def _sum_by_product(x_SF: Tensor, offsets_E: Tensor) -> Tensor:
    """Return `grouped_sum` by a product with zeros and ones, which never waits for the host and sums in a fixed order.
    Non-finite values spread to every group: such a step is skipped."""
    row_S = torch.arange(x_SF.shape[0], device=x_SF.device, dtype=offsets_E.dtype)
    group_S = torch.searchsorted(offsets_E, row_S, right=True)
    number_E1 = torch.arange(offsets_E.shape[0], device=x_SF.device).unsqueeze(1)
    return (group_S == number_E1).to(x_SF.dtype) @ x_SF


def _save_offsets(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[-1])


def _grouped_add_backward(ctx, grad_SF: Tensor):  # type: ignore[no-untyped-def]
    (offsets_E,) = ctx.saved_tensors
    return grad_SF, grouped_sum(grad_SF.contiguous(), offsets_E) if ctx.needs_input_grad[1] else None, None


@operator(
    lambda x_SF, bias_EF, offsets_E: torch.empty_like(x_SF),
    setup=_save_offsets,
    backward=_grouped_add_backward,
    examples=equal_groups,
)
def grouped_add(x_SF: Tensor, bias_EF: Tensor, offsets_E: Tensor) -> Tensor:
    """Return each row plus its group's bias: (S, F), (E, F) -> (S, F). Rows behind the last group have none.

    The bias' gradient is summed group by group, in a fixed order; with plain indexing a GPU's threads add it in any
    order.
    """
    row_S = torch.arange(x_SF.shape[0], device=x_SF.device, dtype=offsets_E.dtype)
    with_none_EF = torch.cat([bias_EF, bias_EF.new_zeros(1, bias_EF.shape[1])])
    return x_SF + with_none_EF.index_select(0, torch.searchsorted(offsets_E, row_S, right=True))


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD: Tensor, order_S: Tensor, inverse_S: Tensor, copies: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inverse_S)
        ctx.copies = copies
        return x_TD.index_select(0, order_S // copies)

    @staticmethod
    def backward(ctx, grad_SD: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def, override]
        (inverse_S,) = ctx.saved_tensors
        copies = ctx.copies
        grad_TD = grad_SD.index_select(0, inverse_S) if copies == 1 else sums_of_rows(grad_SD, inverse_S, copies)
        return grad_TD, None, None, None


def permuted(x_TD: Tensor, order_S: Tensor, inverse_S: Tensor, copies: int = 1) -> Tensor:
    """Return rows in another order: row `order_S[i] // copies` becomes row i, so each is taken `copies` times.

    `inverse_S` is the inverse permutation of `order_S`. With it the backward is a gather too: without sums in the order
    of a GPU's threads.
    """
    return _Permuted.apply(x_TD, order_S, inverse_S, copies)


def _save_place(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.first = inputs[1]


def _every_second_backward(ctx, grad_SF: Tensor):  # type: ignore[no-untyped-def]
    return spread(grad_SF.contiguous(), ctx.first), None


@operator(
    lambda x_SF, first: x_SF.new_empty(x_SF.shape[0], x_SF.shape[1] // 2),
    setup=_save_place,
    backward=_every_second_backward,
)
def every_second(x_SF: Tensor, first: int) -> Tensor:
    """Return every second column, (S, 2F) -> (S, F), from the first (0) or second (1) on.

    The backward of a slice would hold the number of rows, which depends on data.
    """
    return x_SF[:, first::2].clone(memory_format=torch.contiguous_format)


@operator(lambda x_SF, first: x_SF.new_empty(x_SF.shape[0], 2 * x_SF.shape[1]))
def spread(x_SF: Tensor, first: int) -> Tensor:
    """Return columns with zeros between them, (S, F) -> (S, 2F): the backward of `every_second`."""
    out_SF = x_SF.new_zeros(x_SF.shape[0], 2 * x_SF.shape[1])
    out_SF[:, first::2] = x_SF
    return out_SF
