"""Expert parallelism: tokens are sent to the ranks that hold their experts, and the results back.

Note [Dispatch]
The number of rows that a rank receives depends on the data. One exchange of counts brings it to the host, which alone
reads it, inside operators whose results have any number of rows (see ops.py): a graph shows the mean over the ranks, as
many as a rank has of its own. No row is dropped and nothing is padded; a rank may get none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_graph.models.layers.route import Route, Slots, copied, summed
from torchtitan_graph.ops.exchange import exchanged, regroup, row_splits, sent
from torchtitan_graph.ops.experts import permuted

c10d = torch.ops._c10d_functional


@dataclasses.dataclass(frozen=True)
class Direct:
    """Every row goes from its token's rank to its expert's, and back."""

    copies: int
    group: str

    def out(
        self, x_TD: Tensor, order_S: Tensor, inverse_S: Tensor, splits_2R: Tensor, received_RE: Tensor
    ) -> Tensor:
        rows_SD = copied(x_TD, order_S, self.copies)
        return regroup(sent(rows_SD, splits_2R, False, self.group), received_RE, False)

    def back(
        self, y_SD: Tensor, order_S: Tensor, inverse_S: Tensor, splits_2R: Tensor, received_RE: Tensor
    ) -> Tensor:
        return sent(regroup(y_SD, received_RE, True), splits_2R, True, self.group)

    def home(
        self, rows: Tensor, order_S: Tensor, inverse_S: Tensor, splits_2R: Tensor, received_RE: Tensor
    ) -> Tensor:
        return summed(rows, inverse_S, self.copies)


def direct(ep: DeviceMesh, slots: Slots) -> Route:
    """Return the route to the experts of all ranks of `ep`. See Note [Dispatch]."""
    group, (_, order_S, inverse_S, _) = ep.get_group().group_name, slots
    splits_2R, received_RE = _counts(ep, slots.load_E)

    def numbers(x_TA: Tensor) -> Tensor:
        rows_S1 = permuted(x_TA.reshape(-1, 1), order_S, inverse_S)
        return regroup(exchanged(rows_S1, splits_2R, False, group), received_RE, False)

    tensors = (order_S, inverse_S, splits_2R, received_RE)
    return Route(len(slots.chosen_TA), Direct(slots.copies, group), tensors, received_RE.sum(0), numbers)


def dispatched(ep: DeviceMesh, forward: Callable[..., Tensor], x_SD: Tensor, load_E: Tensor) -> Tensor:
    """Run experts on the rows of all ranks of `ep`, exchanged; return this rank's results. See Note [Dispatch].

    Args:
        forward: (rows sorted by expert, their number for each of this rank's experts) -> rows.
        x_SD: this rank's rows, sorted by expert.
        load_E: number of rows for each expert of all ranks.
    """
    group = ep.get_group().group_name
    splits_2R, received_RE = _counts(ep, load_E)
    rows = regroup(exchanged(x_SD, splits_2R, False, group), received_RE, False)
    return exchanged(regroup(forward(rows, received_RE.sum(0)), received_RE, True), splits_2R, True, group)


def _counts(ep: DeviceMesh, load_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of rows to and from each rank, on the host; and of those from each rank for each expert."""
    degree, group = ep.size(), ep.get_group().group_name
    sent_RE, even = load_E.view(degree, -1), [load_E.shape[0] // degree] * degree
    received_RE = c10d.wait_tensor(c10d.all_to_all_single(load_E, even, even, group)).view_as(sent_RE)
    return row_splits(sent_RE, received_RE), received_RE
