"""Which part of a whole tensor this rank holds."""

from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchtitan_graph.graph.torch_private import StridedShard


class Chunk(NamedTuple):
    """A box of a tensor of `shape`, from `offsets` on and as large as `local`, which is the live storage itself."""

    local: torch.Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def chunk_of(tensor: torch.Tensor) -> Chunk:
    """Return the box of a DTensor that this rank holds, possibly empty; of a plain tensor, all of it."""
    if not isinstance(tensor, DTensor):
        return Chunk(tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))
    with torch.no_grad():
        local = tensor.to_local()
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank is part of every tensor's mesh"
    offsets, sizes = box_of(tuple(tensor.shape), tensor.placements, mesh.shape, tuple(coordinate))
    assert sizes == tuple(local.shape), f"{tensor.placements} of {tensor.shape}: {sizes} != {tuple(local.shape)}"
    return Chunk(local, offsets, tuple(tensor.shape))


def box_of(
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of the box that the rank at `coordinate` of the mesh holds.

    This is worked out here because torch's own answer is wrong for some rows that tensor parallel and FSDP both cut
    (25 rows on FSDP 3 x TP 2, on torch 2.13), and torch's own save then fails.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for axis, dim in _cuts(placements, mesh_shape):
        step = -(-sizes[dim] // mesh_shape[axis])  # as torch.chunk cuts: all pieces equal but the last ones
        begin = min(step * coordinate[axis], sizes[dim])
        offsets[dim] += begin
        sizes[dim] = min(step, sizes[dim] - begin)
    return tuple(offsets), tuple(sizes)


def _cuts(placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return each mesh axis that shards, with the dim it shards, those that cut first in front.

    Note [Order of sharding]: FSDP2 cuts what tensor parallel has already cut, although its axis stands to the left on
    the mesh. It says so by `_StridedShard(dim, split_factor)` on its axis, where `split_factor` is the number of
    pieces that were there before. Each rank's rows are then one run of rows of the whole tensor, also where they
    don't divide evenly. Plain `Shard`s cut from left to right.
    """
    cuts = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, StridedShard):
            cuts.append((placement.split_factor, axis, placement.dim))
        elif isinstance(placement, Shard):
            cuts.append((1, axis, placement.dim))
        else:
            assert isinstance(placement, Replicate), f"can't save a tensor placed {placements}"
    cuts.sort()
    num_pieces: dict[int, int] = {}
    for split_factor, axis, dim in cuts:
        before = num_pieces.get(dim, 1)
        assert split_factor in (1, before), f"no order of sharding gives {placements}"
        num_pieces[dim] = before * mesh_shape[axis]
    return [(axis, dim) for _, axis, dim in cuts]
