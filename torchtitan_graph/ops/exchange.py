"""Custom operators: exchanges of data-dependent numbers of rows between ranks.

Shapes do not depend on the numbers, so a graph holds each as one node.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_graph.ops.operator import ALL_TO_ALL, operator

_ENDS: dict[int, torch.cuda.Event] = {}  # where a copy of the splits lies -> its end


def _fake_splits(sent_RE: Tensor, received_RE: Tensor) -> Tensor:
    return torch.empty(2, sent_RE.shape[0], dtype=sent_RE.dtype, device="cpu")


@operator(_fake_splits, recompute="never", compiles=False)
def row_splits(sent_RE: Tensor, received_RE: Tensor) -> Tensor:
    """Start the device-to-host copy of the numbers of rows for and from each rank: (ranks, experts) twice -> (2,
    ranks).

    The host needs nothing else of a dispatch. The first `exchange` that reads it waits for it: on a GPU, which
    meanwhile runs the work launched in between.
    """
    splits_2R = torch.stack([sent_RE.sum(1), received_RE.sum(1)])
    host_2R = torch.empty_like(splits_2R, device="cpu", pin_memory=splits_2R.is_cuda)
    host_2R.copy_(splits_2R, non_blocking=True)
    if splits_2R.is_cuda:
        _ENDS[host_2R.data_ptr()] = torch.cuda.current_stream().record_event()
    return host_2R


@operator(
    lambda x_SD, splits_2R, back, nominal, group: x_SD.new_empty(nominal, x_SD.shape[1]),
    collective=ALL_TO_ALL,
    dynamic_rows=lambda x_SD, splits_2R, back, *_, **__: not back,
    host_reads=1,
    recompute="costly",
    compiles=False,
    records=False,
)
def exchange(x_SD: Tensor, splits_2R: Tensor, back: bool, nominal: int, group: str) -> Tensor:
    """Start sending rows to the ranks of a group; a `wait_tensor` must follow.

    The first `splits_2R[0, 0]` rows go to rank 0 and so on, `splits_2R[1, r]` come from rank r; `back` returns them.
    The number of rows is unbacked: a trace shows `nominal`, and operators on such rows must accept any number. Where
    `nominal` is each rank's number of own rows it is the mean over the ranks.
    """
    if (event := _ENDS.pop(splits_2R.data_ptr(), None)) is not None:
        event.synchronize()
    send, receive = reversed(splits_2R.tolist()) if back else splits_2R.tolist()
    return torch.ops._c10d_functional.all_to_all_single(x_SD, receive, send, group)


def _save_counts(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, counts_RE, ctx.back = inputs
    ctx.save_for_backward(counts_RE)


def _regroup_backward(ctx, grad_SD: Tensor):  # type: ignore[no-untyped-def]
    (counts_RE,) = ctx.saved_tensors
    return regroup(grad_SD.contiguous(), counts_RE, not ctx.back), None, None


def _even_counts(floats: Sequence[Tensor], number: int) -> Tensor:
    rows = floats[0].shape[0]
    return torch.arange(rows, rows + number).div(number, rounding_mode="floor")


@operator(
    lambda x_SD, counts_RE, back: torch.empty_like(x_SD),
    setup=_save_counts,
    backward=_regroup_backward,
    examples=_even_counts,
)
def regroup(x_SD: Tensor, counts_RE: Tensor, back: bool) -> Tensor:
    """Reorder rows sorted by rank, then expert, to expert, then rank; `back` undoes it.

    The host reads nothing.
    """
    counts, turned = counts_RE.flatten(), counts_RE.t().flatten()
    begins = (counts.cumsum(0) - counts).view_as(counts_RE).t().flatten()
    shifts, S = begins - (turned.cumsum(0) - turned), x_SD.shape[0]
    order_S = torch.repeat_interleave(shifts, turned, output_size=S) + torch.arange(S, device=x_SD.device)
    return torch.empty_like(x_SD).index_copy_(0, order_S, x_SD) if back else x_SD.index_select(0, order_S)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SD: Tensor, splits_2R: Tensor, back: bool, group: str) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(splits_2R)
        ctx.back, ctx.group = back, group
        return sent(x_SD.contiguous(), splits_2R, back, group)

    @staticmethod
    def backward(ctx, grad_SD: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def, override]
        (splits_2R,) = ctx.saved_tensors
        return sent(grad_SD.contiguous(), splits_2R, not ctx.back, ctx.group), None, None, None


def exchanged(x_SD: Tensor, splits_2R: Tensor, back: bool, group: str) -> Tensor:
    """Return rows exchanged like `exchange`, after waiting for them. Gradients go the other way."""
    return _Exchanged.apply(x_SD, splits_2R, back, group)


def sent(x_SD: Tensor, splits_2R: Tensor, back: bool, group: str) -> Tensor:
    """Return rows exchanged like `exchange`, after waiting for them; without gradients."""
    return torch.ops._c10d_functional.wait_tensor(exchange(x_SD, splits_2R, back, x_SD.shape[0], group))
