"""Expert parallelism: each row is sent to the rank that holds its expert, and its result back.

Note [Dispatch]
The number of rows that a rank receives depends on the data. One exchange of counts brings it to the host, which alone
reads it, inside operators whose results have any number of rows (see ops.py): a graph shows the mean over the ranks, as
many as a rank has of its own. No row is dropped and nothing is padded; a rank may get none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_graph.ops.exchange import exchanged, regroup, row_splits

c10d = torch.ops._c10d_functional


def dispatched(ep: DeviceMesh, forward: Callable[..., Tensor], x_SD: Tensor, load_E: Tensor, *beside: Tensor) -> Tensor:
    """Run experts on the rows of all ranks of `ep`, exchanged; return this rank's results. See Note [Dispatch].

    Args:
        forward: (rows sorted by expert, their number for each of this rank's experts, others as these rows) -> rows.
        x_SD: this rank's rows, sorted by expert.
        load_E: number of rows for each expert of all ranks.
        beside: other tensors with a row for each, which travel with them.
    """
    degree, group = ep.size(), ep.get_group().group_name
    sent_RE, even = load_E.view(degree, -1), [load_E.shape[0] // degree] * degree
    received_RE = c10d.wait_tensor(c10d.all_to_all_single(load_E, even, even, group)).view_as(sent_RE)
    splits_2R = row_splits(sent_RE, received_RE)
    rows, *others = (regroup(exchanged(x, splits_2R, False, group), received_RE, False) for x in (x_SD, *beside))
    results = forward(rows, received_RE.sum(0), *others)
    return exchanged(regroup(results, received_RE, True), splits_2R, True, group)
