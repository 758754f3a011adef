"""Which rank computes the update of which matrix, and the messages that bring shards there and updates back.

A unit is what is computed together: a matrix, or consecutive matrices of a stack (E, M, N). Of a matrix that is
sharded, all ranks of the mesh may be the owner; of a stack's matrices, the ranks that hold a shard of them. A unit that
one rank holds whole needs no message: so it is with experts that are sharded by E. The others are computed in rounds,
one unit of each owner in each, so that a rank never has more than that one in whole.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from torchtitan_graph.parallel.chunk import box_of

c10d = torch.ops._c10d_functional

_Geometry = tuple[tuple[int, ...], tuple[Placement, ...], tuple[int, ...]]  # shape, placements, shape of the mesh


class Piece(NamedTuple):
    """What a rank holds of a unit: `sizes` numbers from `begin` of dim 0 of its shard, at the offsets `at` of the
    unit. `sends` is false for a copy of what the owner gets from another rank."""

    begin: int
    at: tuple[int, ...]
    sizes: tuple[int, ...]
    sends: bool

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def of_shard(self, shard: Tensor) -> Tensor:
        return shard.narrow(0, self.begin, self.sizes[0])

    def of_unit(self, unit: Tensor) -> Tensor:
        return unit[tuple(slice(begin, begin + size) for begin, size in zip(self.at, self.sizes, strict=True))]


class Unit(NamedTuple):
    """Matrices that are computed together. `parameter` is the number of theirs, `shape` their own; `pieces` are by
    rank, this rank's alone where it is not the owner."""

    parameter: int
    shape: tuple[int, ...]
    owner: int
    pieces: Mapping[int, Piece]


class Plan(NamedTuple):
    """This rank's part of an update: the units that it holds whole, and the rounds with those of all owners."""

    rank: int
    num_ranks: int
    group: str
    device: str
    alone: list[Unit]
    rounds: list[list[Unit]]


def plan_owners(parameters: Sequence[Tensor]) -> Plan:
    """Return the plan for matrices and stacks of them, balanced by the operations of Newton-Schulz. All ranks of a
    pipeline's stage compute the same one; where there are several stages, all ranks of the job call this together."""
    mesh = next((p.device_mesh for p in parameters if isinstance(p, DTensor)), None)
    if mesh is None or mesh.size() == 1:
        every = [_Candidate(i, tuple(p.shape), (0,), {0: _whole(p)}) for i, p in enumerate(parameters)]
        return Plan(0, 1, "", str(mesh.device_type if mesh else ""), [each.of(0, 0) for each in every], [])
    rank, candidates = dist.get_rank() % mesh.size(), []
    for number, parameter in enumerate(parameters):
        assert isinstance(parameter, DTensor), "parameters of ranks are DTensors"
        assert parameter.device_mesh.size() == mesh.size(), "each mesh has all ranks of a stage"
        geometry = tuple(parameter.shape), tuple(parameter.placements), tuple(parameter.device_mesh.shape)
        candidates += [each._replace(parameter=number) for each in _candidates(geometry)]
    owners = _balanced(candidates, mesh.size())
    units = [(each.of(owner, rank), each) for each, owner in zip(candidates, owners, strict=True)]
    alone = [unit for unit, each in units if len(each.holders) == 1 and unit.owner == rank]
    queues: list[list[Unit]] = [[] for _ in range(mesh.size())]
    for unit, each in sorted(units, key=lambda both: -both[1].work):
        if len(each.holders) > 1:
            queues[unit.owner].append(unit)
    rounds = [[unit for unit in units if unit is not None] for units in itertools.zip_longest(*queues)]
    return Plan(rank, mesh.size(), _group_of(mesh).group_name, mesh.device_type, alone, rounds)


class _Candidate(NamedTuple):
    """A unit, the ranks that may be its owner, and each rank's box of it."""

    parameter: int
    shape: tuple[int, ...]
    owners: tuple[int, ...]
    holders: Mapping[int, tuple[Piece, tuple[int, ...]]]  # with the rank's place on the axes that replicate

    @property
    def work(self) -> int:
        *stack, rows, columns = self.shape
        short, long = sorted((rows, columns))
        return math.prod(stack) * short * short * (2 * long + short)

    def of(self, owner: int, rank: int) -> Unit:
        place = _place_of(self.holders, owner)
        ranks: Iterable[int] = self.holders if rank == owner else self.holders.keys() & {rank}
        pieces = {}
        for each in ranks:
            piece, own = self.holders[each]
            pieces[each] = piece._replace(sends=own == place)
        return Unit(self.parameter, self.shape, owner, pieces)


def _place_of(holders: Mapping[int, tuple[Piece, tuple[int, ...]]], owner: int) -> tuple[int, ...]:
    """Return the copy of a parameter that its owner gets the pieces from: its own, else the first."""
    return holders[owner][1] if owner in holders else min(place for _, place in holders.values())


def _whole(parameter: Tensor) -> tuple[Piece, tuple[int, ...]]:
    return Piece(0, (0,) * parameter.dim(), tuple(parameter.shape), True), ()


@functools.cache
def _candidates(geometry: _Geometry) -> list[_Candidate]:
    """Return the units of a parameter. Matrices of a stack that several ranks share are divided among these."""
    shape, placements, mesh_shape = geometry
    boxes, places = [], []
    for coordinate in itertools.product(*map(range, mesh_shape)):
        boxes.append(box_of(shape, placements, mesh_shape, coordinate))
        places.append(tuple(c for c, p in zip(coordinate, placements, strict=True) if p.is_replicate()))
    holding = [rank for rank, (_, sizes) in enumerate(boxes) if math.prod(sizes)]
    if len(shape) == 2:
        holders = {rank: (Piece(0, *boxes[rank], True), places[rank]) for rank in holding}
        return [_Candidate(0, shape, tuple(range(len(boxes))) if len(holding) > 1 else (*holding,), holders)]
    found = []
    runs = sorted({(boxes[rank][0][0], boxes[rank][1][0]) for rank in holding})
    for begin, size in runs:
        sharing = [rank for rank in holding if (boxes[rank][0][0], boxes[rank][1][0]) == (begin, size)]
        step = -(-size // len(sharing))
        for first in range(0, size, step):
            number = min(step, size - first)
            holders = {}
            for rank in sharing:
                (_, *at), (_, *sizes) = boxes[rank]
                holders[rank] = Piece(first, (0, *at), (number, *sizes), True), places[rank]
            found.append(_Candidate(0, (number, *shape[1:]), tuple(sharing), holders))
    return found


def _balanced(candidates: Sequence[_Candidate], num_ranks: int) -> list[int]:
    """Return an owner for each: those without a choice first, then the largest first, to the rank with the least."""
    loads, owners = [0] * num_ranks, [0] * len(candidates)
    order = sorted(range(len(candidates)), key=lambda i: (len(candidates[i].owners) > 1, -candidates[i].work, i))
    for i in order:
        owners[i] = min(candidates[i].owners, key=lambda rank: (loads[rank], rank))
        loads[owners[i]] += candidates[i].work
    return owners


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of all ranks of a mesh: of one stage of the pipeline, which are consecutive."""
    ranks = sorted(mesh.mesh.flatten().tolist())
    assert ranks == list(range(ranks[0], ranks[0] + len(ranks))), "stages are the outermost axis"
    if len(ranks) == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    if mesh.ndim == 1:
        return mesh.get_group()
    return dist.new_subgroups(group_size=len(ranks))[0]


# --- messages -------------------------------------------------------------------------------------------------------


class Round:
    """The units of one round: their shards on the way to the owners, and the updates on the way back.

    Messages are copies in the dtype of Newton-Schulz; nothing is added, so that no order of anything changes a bit.
    """

    def __init__(
        self,
        plan: Plan,
        units: Sequence[Unit],
        dtype: torch.dtype,
        device: torch.device | str,
        shard_of: Callable[[Unit, Piece], Tensor],
    ) -> None:
        """Send this rank's pieces, which `shard_of` returns in this dtype and on this device."""
        self._plan, self._dtype, self._device = plan, dtype, device
        self.own = next((unit for unit in units if unit.owner == plan.rank), None)
        self._mine = {unit.owner: unit for unit in units if unit.owner != plan.rank and plan.rank in unit.pieces}
        self._kept = None
        if self.own is not None and (piece := self.own.pieces.get(plan.rank)) is not None:
            self._kept = shard_of(self.own, piece)
        out = {owner: shard_of(unit, p) for owner, unit in self._mine.items() if (p := unit.pieces[plan.rank]).sends}
        self._sent = self._exchange(out, {rank: piece.numel for rank, piece in self._others() if piece.sends})

    def _others(self) -> Iterator[tuple[int, Piece]]:
        """Yield the pieces of this rank's own unit that other ranks hold, by rank."""
        if self.own is not None:
            yield from ((rank, piece) for rank, piece in sorted(self.own.pieces.items()) if rank != self._plan.rank)

    def whole(self) -> Tensor | None:
        """Return this rank's own unit in whole, None if it has none in this round."""
        received = c10d.wait_tensor(self._sent)
        if self.own is None:
            return None
        unit, senders = received.new_empty(self.own.shape), [piece for _, piece in self._others() if piece.sends]
        if self._kept is not None:
            self.own.pieces[self._plan.rank].of_unit(unit).copy_(self._kept)
        for piece, part in zip(senders, received.split([piece.numel for piece in senders]), strict=True):
            piece.of_unit(unit).copy_(part.view(piece.sizes))
        return unit

    def spread(self, update: Tensor | None) -> Iterator[tuple[Unit, Piece, Tensor]]:
        """Send the update of this rank's own unit; yield this rank's pieces of all updates."""
        rank = self._plan.rank
        out = {} if update is None else {other: piece.of_unit(update) for other, piece in self._others()}
        sizes = {owner: unit.pieces[rank].numel for owner, unit in self._mine.items()}
        received = c10d.wait_tensor(self._exchange(out, sizes))
        if update is not None and self.own is not None and (piece := self.own.pieces.get(rank)) is not None:
            yield self.own, piece, piece.of_unit(update)
        for unit, part in zip(self._mine.values(), received.split([*sizes.values()]), strict=True):
            yield unit, unit.pieces[rank], part.view(unit.pieces[rank].sizes)

    def _exchange(self, out: Mapping[int, Tensor], sizes: Mapping[int, int]) -> Tensor:
        """Start to send a tensor to each rank in `out`, and to receive as many numbers as in `sizes` from each."""
        plan, ranks = self._plan, range(self._plan.num_ranks)
        given = [out[rank].reshape(-1) for rank in ranks if rank in out]
        sent = torch.cat(given) if given else torch.empty(0, dtype=self._dtype, device=self._device)
        from_each, to_each = [sizes.get(rank, 0) for rank in ranks], [out[r].numel() if r in out else 0 for r in ranks]
        return c10d.all_to_all_single(sent, from_each, to_each, plan.group)
