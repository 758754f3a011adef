"""Expert parallelism across machines: a token crosses the slow links once for each machine with experts of its own.

Note [By machine]
A token has several experts, often on ranks of one machine, and several on one rank. Sent directly, its row crosses the
links between machines once for each expert. Here it goes to each machine once, to the rank with its sender's place
there, which sends it on to each rank of the machine that holds experts for it, once; there it is copied for each. The
copies lie in the order of direct rows, so that all that experts compute is the same to the bit. The way back is the
direct one, a row for each slot, added at home in the same order (exact); or sums: each rank adds a token's rows, then
each machine, then home, which rounds otherwise and is as short as the way out.

Counts, which reach the host once a layer, say what goes where, and so do two small exchanges: which ranks of its
machine each row goes on to, and for each slot which of its source's rows it is. Backward needs the places alone: they
are kept.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_graph.ops.exchange import (
    after_begins,
    hits,
    row_splits,
    sent,
    sums_at_home,
    sums_to_send,
    turned_order,
)
from torchtitan_graph.ops.route import Route, Slots, Spread
from torchtitan_graph.ops.wire import Wire
from torchtitan_graph.parallel.dispatch import Direct, Dispatch, direct

c10d = torch.ops._c10d_functional

_FINE = 2**20  # of a mean number of rows for each token


class Hop(NamedTuple):
    """A group of ranks over which rows are sent, once each: its name, its size, and the mean number of rows sent."""

    group: str
    degree: int
    num_rows: int


@dataclasses.dataclass(frozen=True)
class ByMachine:
    """Rows go out by hops, see Note [By machine]; back directly, or as sums by the same hops."""

    direct: Direct
    hops: tuple[Hop, ...]
    exact: bool

    @property
    def wire(self) -> Wire:
        return self.direct.wire

    def out(self, x_TD: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        # of each hop the rows to send and their numbers; then where the slots' rows are among those that came
        *of_hops, place_S = tensors[4:]
        rows = self.wire.packed(x_TD)
        for hop, index_U, splits_2K in zip(self.hops, of_hops[::2], of_hops[1::2], strict=True):
            rows = sent(rows.index_select(0, index_U), splits_2K, False, hop.group)
        return rows, place_S

    def back(self, y_SD: Tensor, scores_S1: Tensor | None, *tensors: Tensor) -> Tensor:
        if self.exact:
            return self.direct.back(y_SD, scores_S1, *tensors[:4])
        *of_hops, index = tensors[4:]
        rows = y_SD if scores_S1 is None else y_SD * scores_S1
        for hop, index_U, splits_2K in reversed(list(zip(self.hops, of_hops[::2], of_hops[1::2], strict=True))):
            rows = sums_to_send(rows, index, splits_2K, hop.num_rows)
            rows, index = sent(rows, splits_2K, True, hop.group), index_U
        return rows

    def home(self, rows: Tensor, *tensors: Tensor) -> Tensor:
        if self.exact:
            return self.direct.home(rows, *tensors[:4])
        num_tokens = tensors[0].shape[0] // self.direct.copies
        return sums_at_home(rows, tensors[4], num_tokens)


def by_machine(
    dispatch: Dispatch, far: str, near: str, num_near: int, exact: bool, slots: Slots, spread: Spread
) -> Route:
    """Return the route to the experts of all ranks of `ep`, `num_near` of which share a machine.

    Args:
        far, near: names of the groups of ranks with one place in their machines, and of the ranks of a machine; where
            they would be all ranks or one they are not read.
        exact: rows come back one by one; else as sums.
        spread: (number of equal parts of the experts) -> in how many of them a token's experts are, on average.
    """
    route = direct(dispatch, slots, spread)
    assert isinstance(route.way, Direct)
    R, (T, _) = dispatch.degree, slots.chosen_TA.shape
    M, N = R // num_near, num_near
    rank_TA = torch.div(slots.chosen_TA, slots.load_E.shape[0] // R, rounding_mode="floor")
    hit_TR = rank_TA.new_zeros(T, R + 1).scatter(1, rank_TA, 1)[:, :R].contiguous()  # padding goes to no rank
    to_ranks = Hop(near if 1 < N < R else dispatch.group, N if N > 1 else R, _rows(T, spread(R)))
    hops: tuple[Hop, ...] = (to_ranks,)
    if 1 < N < R:
        to_machines = Hop(far, M, _rows(T, spread(M)))
        hit_TM = hit_TR.view(T, M, N).amax(2)
        counts_MC = torch.cat([hit_TM.sum(0).unsqueeze(1), hit_TR.sum(0).view(M, N)], 1)  # rows to here, and on
        came_MC = _turned(counts_MC, far)
        splits_far = row_splits(*(_first(counts) for counts in (counts_MC, came_MC)))
        far_U = hits(hit_TM, splits_far, to_machines.num_rows)
        on_UN = hit_TR.view(T * M, N).to(torch.uint8).index_select(0, far_U)
        on_UN = sent(on_UN, splits_far, False, far)
        counts_NM = came_MC.narrow(1, 1, N).t().contiguous()
        came_NM = _turned(counts_NM, near)
        splits_near = row_splits(counts_NM, came_NM)
        near_U = hits(on_UN, splits_near, to_ranks.num_rows)
        hops = (to_machines, to_ranks)
        of_hops = [far_U // M, splits_far, near_U // N, splits_near]
        begins_R = (came_NM.flatten().cumsum(0) - came_NM.flatten()).view(N, M).t().flatten()
    else:
        counts_R1 = hit_TR.sum(0).unsqueeze(1)
        came_R1 = _turned(counts_R1, dispatch.group)
        splits_2R = row_splits(counts_R1, came_R1)
        of_hops = [hits(hit_TR, splits_2R, to_ranks.num_rows) // R, splits_2R]
        begins_R = came_R1.flatten().cumsum(0) - came_R1.flatten()
    _, _, splits_2R, received_RE = route.tensors
    place_TA = (hit_TR.cumsum(0) - 1).gather(1, rank_TA.clamp(max=R - 1))
    place_S1 = place_TA.view(-1, 1).index_select(0, slots.order_S)
    place_S1 = after_begins(sent(place_S1, splits_2R, False, dispatch.group), received_RE, begins_R)
    place_S = place_S1.squeeze(1).index_select(0, turned_order(place_S1, received_RE))
    way = ByMachine(route.way, hops, exact)
    return dataclasses.replace(route, way=way, tensors=(*route.tensors, *of_hops, place_S))


def _rows(T: int, mean: float) -> int:
    """Return the mean number of rows of T tokens, rounded up, by integers alone: T may be a symbol."""
    return -(-T * round(mean * _FINE) // _FINE)


def _turned(counts_KC: Tensor, group: str) -> Tensor:
    """Return what each rank of a group has counted for this one, given what this one counted for each."""
    K, C = counts_KC.shape
    even = [C] * K
    flat = c10d.all_to_all_single(counts_KC.flatten(), even, even, group)
    return c10d.wait_tensor(flat).view(K, C)  # type: ignore[no-any-return]


def _first(counts_KC: Tensor) -> Tensor:
    return counts_KC.narrow(1, 0, 1)
