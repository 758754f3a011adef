"""Expert parallelism: tokens are sent to the ranks that hold their experts, and the results back.

Note [Dispatch]
The number of rows that a rank receives depends on the data. One exchange of counts brings it to the host, which alone
reads it, inside operators whose results have any number of rows (see ops.py): a graph shows the mean over the ranks, as
many as a rank has of its own. No row is dropped and nothing is padded; a rank may get none. The rows of a batch's
padding lie behind all others, and are not sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_graph.ops.exchange import exchanged, regrouped, row_splits, sent, turned_order
from torchtitan_graph.ops.experts import permuted
from torchtitan_graph.ops.route import Route, Slots, Spread
from torchtitan_graph.ops.rows import scored_rows, sums_of_rows
from torchtitan_graph.ops.wire import Wire

c10d = torch.ops._c10d_functional


class Exchange(NamedTuple):
    """How tokens are exchanged, besides by machine or not, which the layout says.

    exact    results come back one by one where tokens go by machine; else as sums
    float8   tokens, and gradients of results, travel in float8
    """

    exact: bool = True
    float8: bool = False


class Dispatch(NamedTuple):
    """The ranks that share a layer's experts, by the name and the size of their group; and how tokens are sent."""

    group: str
    degree: int
    wire: Wire


@dataclasses.dataclass(frozen=True)
class Direct:
    """Every row goes from its token's rank to its expert's, and back."""

    copies: int
    group: str
    wire: Wire

    # Tensors: the slots' order and its inverse; rows to and from each rank; rows from each rank for each expert.

    def out(self, x_TD: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        order_S, _, splits_2R, received_RE = tensors
        copies = self.wire.packed(x_TD).index_select(0, order_S // self.copies)
        rows = sent(copies, splits_2R, False, self.group)
        return rows, turned_order(rows, received_RE)

    def back(self, y_SD: Tensor, scores_S1: Tensor | None, *tensors: Tensor) -> Tensor:
        _, _, splits_2R, received_RE = tensors
        order_S = turned_order(y_SD, received_RE.t())
        rows = y_SD.index_select(0, order_S) if scores_S1 is None else scored_rows(y_SD, scores_S1, order_S)
        return sent(rows, splits_2R, True, self.group)

    def home(self, rows: Tensor, *tensors: Tensor) -> Tensor:
        return sums_of_rows(rows, tensors[1], self.copies)


def direct(dispatch: Dispatch, slots: Slots, spread: Spread) -> Route:
    """Return the route to the experts of all ranks of `ep`. See Note [Dispatch]."""
    group, (_, order_S, inverse_S, _) = dispatch.group, slots
    number = order_S.shape[0]
    splits_2R, received_RE = _counts(dispatch, slots.load_E)

    def numbers(x_TA: Tensor) -> Tensor:
        rows_S1 = permuted(x_TA.reshape(-1, 1), order_S, inverse_S)
        return regrouped(exchanged(rows_S1, splits_2R, False, number, group), received_RE)

    way, tensors = Direct(slots.copies, group, dispatch.wire), (order_S, inverse_S, splits_2R, received_RE)
    return Route(slots.chosen_TA.shape[0], way, tensors, received_RE.sum(0), numbers)


def dispatched(dispatch: Dispatch, forward: Callable[..., Tensor], x_SD: Tensor, load_E: Tensor) -> Tensor:
    """Run experts on the rows of all ranks of `ep`, exchanged; return this rank's results. See Note [Dispatch].

    Args:
        forward: (rows sorted by expert, their number for each of this rank's experts) -> rows.
        x_SD: this rank's rows, sorted by expert, behind them those of padding.
        load_E: number of rows for each expert of all ranks.
    """
    splits_2R, received_RE = _counts(dispatch, load_E)
    number = x_SD.shape[0]
    rows = regrouped(exchanged(x_SD, splits_2R, False, number, dispatch.group), received_RE)
    results = regrouped(forward(rows, received_RE.sum(0)), received_RE.t())
    return exchanged(results, splits_2R, True, number, dispatch.group)


def _counts(dispatch: Dispatch, load_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of rows to and from each rank, on the host; and of those from each rank for each expert."""
    group, degree, _ = dispatch
    sent_RE, even = load_E.view(degree, -1), [load_E.shape[0] // degree] * degree
    received_RE = c10d.wait_tensor(c10d.all_to_all_single(load_E, even, even, group)).view_as(sent_RE)
    return row_splits(sent_RE, received_RE), received_RE
