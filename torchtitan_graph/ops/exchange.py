"""Custom operators: exchanges of data-dependent numbers of rows between ranks.

Shapes do not depend on the numbers, so a graph holds each as one node.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_graph.ops.experts import permuted
from torchtitan_graph.ops.operator import ALL_TO_ALL, operator

_ENDS: dict[int, torch.cuda.Event] = {}  # where a copy of the splits lies -> its end


def _fake_splits(sent_RE: Tensor, received_RE: Tensor) -> Tensor:
    return torch.empty(2, sent_RE.shape[0], dtype=sent_RE.dtype, device="cpu")


@operator(_fake_splits, recompute="never", compiles=False)
def row_splits(sent_RE: Tensor, received_RE: Tensor) -> Tensor:
    """Start the device-to-host copy of the numbers of rows for and from each rank: (ranks, experts) twice -> (2,
    ranks).

    The host needs nothing else of a dispatch. The first operator that reads it waits for it, see `numbers_of`: on a
    GPU, which meanwhile runs the work launched in between.
    """
    splits_2R = torch.stack([sent_RE.sum(1), received_RE.sum(1)])
    host_2R = torch.empty_like(splits_2R, device="cpu", pin_memory=splits_2R.is_cuda)
    host_2R.copy_(splits_2R, non_blocking=True)
    if splits_2R.is_cuda:
        _ENDS[host_2R.data_ptr()] = torch.cuda.current_stream().record_event()
    return host_2R


def numbers_of(splits_2R: Tensor) -> list[list[int]]:
    """Return the numbers of rows for and from each rank, after waiting for their copy. Nothing else may read it."""
    if (event := _ENDS.pop(splits_2R.data_ptr(), None)) is not None:
        event.synchronize()
    return splits_2R.tolist()  # type: ignore[no-any-return]


@operator(
    lambda x_SD, splits_2R, back, nominal, varies, group: x_SD.new_empty(nominal, x_SD.shape[1]),
    collective=ALL_TO_ALL,
    dynamic_rows=lambda x_SD, splits_2R, back, nominal, varies, group, **_: varies,
    host_reads=1,
    recompute="costly",
    compiles=False,
    records=False,
)
def exchange(x_SD: Tensor, splits_2R: Tensor, back: bool, nominal: int, varies: bool, group: str) -> Tensor:
    """Start sending rows to the ranks of a group; a `wait_tensor` must follow.

    The first `splits_2R[0, 0]` rows go to rank 0 and so on, `splits_2R[1, r]` come from rank r; `back` returns them.
    Rows behind those, of padding, stay where they are.
    Where the number of rows `varies` it is unbacked: a trace shows `nominal`, the mean over the ranks, and operators on
    such rows must accept any number.
    """
    numbers = numbers_of(splits_2R)
    send, receive = reversed(numbers) if back else numbers
    return torch.ops._c10d_functional.all_to_all_single(x_SD[: sum(send)], receive, send, group)


def _even_counts(tensors: Sequence[Tensor], number: int) -> Tensor:
    rows = tensors[0].shape[0]
    return torch.arange(rows, rows + number).div(number, rounding_mode="floor")


@operator(
    lambda rows_SD, counts_RE: counts_RE.new_empty(rows_SD.shape[0]),
    reads_first=False,
    examples=_even_counts,
)
def turned_order(rows_SD: Tensor, counts_RE: Tensor) -> Tensor:
    """Return the order by expert, then rank, of rows that lie by rank, then expert, `counts_RE` of each. The order of
    `counts_RE.t()` undoes it. The host reads nothing.
    """
    counts, turned = counts_RE.flatten(), counts_RE.t().flatten()
    begins = (counts.cumsum(0) - counts).view_as(counts_RE).t().flatten()
    shifts, S = begins - (turned.cumsum(0) - turned), rows_SD.shape[0]
    return torch.repeat_interleave(shifts, turned, output_size=S) + torch.arange(S, device=rows_SD.device)


def regrouped(rows_SD: Tensor, counts_RE: Tensor) -> Tensor:
    """Return rows by expert, then rank, of rows that lie by rank, then expert; that of `counts_RE.t()` undoes it."""
    return permuted(rows_SD, turned_order(rows_SD, counts_RE), turned_order(rows_SD, counts_RE.t()))


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SD: Tensor, splits_2R: Tensor, back: bool, number: int, group: str) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(splits_2R)
        ctx.back, ctx.number, ctx.group = back, number, group
        rows = sent(x_SD, splits_2R, back, group)
        return filled(rows, number) if back else rows

    @staticmethod
    def backward(ctx, grad_SD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def, override]
        (splits_2R,) = ctx.saved_tensors
        rows = sent(grad_SD, splits_2R, not ctx.back, ctx.group)
        return rows if ctx.back else filled(rows, ctx.number), None, None, None, None


def exchanged(x_SD: Tensor, splits_2R: Tensor, back: bool, number: int, group: str) -> Tensor:
    """Return rows exchanged like `exchange`, after waiting for them. Gradients go the other way. A rank has `number`
    rows of its own; those that are not sent, at the end, come back as zeros."""
    return _Exchanged.apply(x_SD, splits_2R, back, number, group)


def sent(x_SD: Tensor, splits_2R: Tensor, back: bool, group: str) -> Tensor:
    """Return rows exchanged like `exchange`, after waiting for them; without gradients."""
    started = exchange(x_SD.contiguous(), splits_2R, back, x_SD.shape[0], True, group)
    return torch.ops._c10d_functional.wait_tensor(started)


@operator(
    lambda rows_SD, number: rows_SD.new_empty(number, rows_SD.shape[1]),
    dynamic_rows=lambda *_, **__: False,
    compiles=False,
)
def filled(rows_SD: Tensor, number: int) -> Tensor:
    """Return rows, and zeros behind them up to a number of rows."""
    return torch.cat([rows_SD, rows_SD.new_zeros(number - len(rows_SD), rows_SD.shape[1])])


# --- rows that are sent once for several experts ----------------------------------------------------------------------


def _every_second(tensors: Sequence[Tensor], number: int) -> Tensor:
    """Return a table with as many ones for each rank as zeros; or numbers of them."""
    U, K = tensors[0].shape
    return torch.arange(number) < U // 2 * K if number == U * K else torch.full((number,), U // 2)


def _pairs_of_rows(floats: Sequence[Tensor], number: int) -> Tensor:
    """Return the row to add to for each row; or numbers of rows of K ranks, twice, which are at least as many."""
    rows = floats[0].shape[0]
    return torch.arange(rows) // 2 if number == rows else torch.full((number,), -(-rows // (number // 2)))


@operator(
    lambda hit_UK, splits_2K, nominal: hit_UK.new_empty(nominal, dtype=torch.int64),
    dynamic_rows=lambda *_, **__: True,
    host_reads=1,
    recompute="never",
    compiles=False,
    examples=_every_second,
)
def hits(hit_UK: Tensor, splits_2K: Tensor, nominal: int) -> Tensor:
    """Return where a table of zeros and ones has ones, as places in its flattened rows, column by column: the rows to
    send to each rank of a group, in their order. `splits_2K[0]` has their numbers; a trace shows `nominal`."""
    U, K = hit_UK.shape
    hit_N = hit_UK.t().flatten().bool()
    places_N = torch.arange(U * K, device=hit_UK.device).view(U, K).t().flatten()
    number = sum(numbers_of(splits_2K)[0])
    out = places_N.new_empty(number + 1)  # the last for zeros
    return out.scatter_(0, torch.where(hit_N, hit_N.cumsum(0) - 1, number), places_N)[:number].clone()


@operator(
    lambda place_S1, received_RE, begins_R: torch.empty_like(place_S1),
    recompute="never",
    compiles=False,
    examples=lambda _, number: torch.full((number,), 1 << 30),  # all rows are of the first source
)
def after_begins(place_S1: Tensor, received_RE: Tensor, begins_R: Tensor) -> Tensor:
    """Return places of rows among those of their source, counted from the first row of all sources instead.

    Args:
        place_S1: sorted by source, `received_RE[r]` of them from rank r, by expert.
        begins_R: where each source's rows begin.
    """
    row_S = torch.arange(place_S1.shape[0], device=place_S1.device)
    source_S = torch.searchsorted(received_RE.sum(1).cumsum(0), row_S, right=True)
    return place_S1 + begins_R.index_select(0, source_S).unsqueeze(1)


@operator(
    lambda rows_SD, index_S, splits_2K, nominal: rows_SD.new_empty(nominal, rows_SD.shape[1]),
    dynamic_rows=lambda *_, **__: True,
    host_reads=2,
    compiles=False,
    examples=_pairs_of_rows,
)
def sums_to_send(rows_SD: Tensor, index_S: Tensor, splits_2K: Tensor, nominal: int) -> Tensor:
    """Return the sums of rows by the row that came here and was copied: `index_S` names it for each, and
    `splits_2K[1]` has their numbers. A trace shows `nominal`."""
    return _sums(rows_SD, index_S, sum(numbers_of(splits_2K)[1]))


@operator(
    lambda rows_SD, index_S, number: rows_SD.new_empty(number, rows_SD.shape[1]),
    dynamic_rows=lambda *_, **__: False,
    compiles=False,
    examples=lambda _, number: torch.zeros(number),
)
def sums_at_home(rows_SD: Tensor, index_S: Tensor, number: int) -> Tensor:
    """Return the sums of rows by index, 0 to `number` - 1."""
    return _sums(rows_SD, index_S, number)


def _sums(rows_SD: Tensor, index_S: Tensor, number: int) -> Tensor:
    """Return sums of rows in a fixed order, in at least fp32."""
    wide_SD = rows_SD.to(torch.promote_types(rows_SD.dtype, torch.float32))
    if rows_SD.is_cuda:  # its index_add adds in any order
        ordered_S, order_S = index_S.sort(stable=True)
        ends = torch.searchsorted(ordered_S, torch.arange(number + 1, device=index_S.device))
        found = torch.segment_reduce(wide_SD[order_S], "sum", offsets=ends, axis=0, unsafe=True, initial=0)
    else:
        found = wide_SD.new_zeros(number, wide_SD.shape[1]).index_add_(0, index_S, wide_SD)
    return found.to(rows_SD.dtype)
