"""This rank's shard of a tensor, as offsets and sizes, and the gather of a whole tensor."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchtitan_graph.torch_private.distributed import StridedShard


class Chunk(NamedTuple):
    """A box of a tensor of `shape`, from `offsets` on and as large as `local`, which is the live storage itself."""

    local: torch.Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def chunk_of(tensor: torch.Tensor | Chunk) -> Chunk:
    """Return this rank's box of a DTensor, possibly empty; of a plain tensor, all of it; a box as it is."""
    if isinstance(tensor, Chunk):
        return tensor
    if not isinstance(tensor, DTensor):
        return Chunk(tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))
    with torch.no_grad():
        local = tensor.to_local()
    mesh = tensor.device_mesh
    offsets, sizes = box_of(tuple(tensor.shape), tensor.placements, mesh.shape, _coordinate(tensor))
    assert sizes == tuple(local.shape), f"{tensor.placements} of {tensor.shape}: {sizes} != {tuple(local.shape)}"
    return Chunk(local, offsets, tuple(tensor.shape))


def gather_whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Gather a DTensor in `dtype`, all ranks together: return the whole of it on rank 0, None on the others.

    A plain tensor is whole. The cuts are undone one by one, the last first, and only on the first rank of an axis: no
    other rank needs more memory.
    """
    part = chunk_of(tensor).local.to(dtype)
    if not isinstance(tensor, DTensor):
        return part
    mesh, coordinate = tensor.device_mesh, _coordinate(tensor)
    for cut in reversed(_cuts(tuple(tensor.shape), tensor.placements, mesh.shape, coordinate)):
        shape = list(part.shape)
        shape[cut.dim] = cut.step
        padded = part.new_zeros(shape)
        padded.narrow(cut.dim, 0, cut.size).copy_(part)
        is_first = coordinate[cut.axis] == 0
        pieces = [torch.empty_like(padded) for _ in range(mesh.shape[cut.axis])] if is_first else None
        dist.gather(padded, pieces, group=mesh.get_group(cut.axis), group_dst=0)
        if pieces is None:
            return None
        part = torch.cat(pieces, cut.dim).narrow(cut.dim, 0, cut.whole)
    return part if not any(coordinate) else None


def box_of(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of the box that the rank at `coordinate` of the mesh holds.

    It is computed here because torch's own answer is wrong for some rows that tensor parallel and FSDP both cut (25
    rows on FSDP 3 x TP 2, on torch 2.13), and torch's own save then fails.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for cut in _cuts(shape, placements, mesh_shape, coordinate):
        offsets[cut.dim] += cut.begin
        sizes[cut.dim] = cut.size
    return tuple(offsets), tuple(sizes)


class _Cut(NamedTuple):
    """One cut of a dim by a mesh axis: of its `whole` length a rank keeps `size`, at most `step`, from `begin` on."""

    axis: int
    dim: int
    whole: int
    step: int
    begin: int
    size: int


def _cuts(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> list[_Cut]:
    """Return the cuts from a whole tensor to the shard at `coordinate`, in their order."""
    cuts, sizes = [], list(shape)
    for axis, dim in _order(placements, mesh_shape):
        step = -(-sizes[dim] // mesh_shape[axis])  # as in torch.chunk: all pieces equal but the last ones
        begin = min(step * coordinate[axis], sizes[dim])
        cuts.append(_Cut(axis, dim, sizes[dim], step, begin, min(step, sizes[dim] - begin)))
        sizes[dim] = cuts[-1].size
    return cuts


def _order(placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return each sharding mesh axis with the dim it shards, in the order of cutting.

    Note [Order of sharding]: FSDP2 cuts what tensor parallel has already cut, although its axis stands to the left on
    the mesh. Its axis then has `_StridedShard(dim, split_factor)`, where `split_factor` is the number of earlier
    pieces. Each rank's rows are then one run of rows of the whole tensor, also where they don't divide evenly. Plain
    `Shard`s cut from left to right.
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


def _coordinate(tensor: DTensor) -> tuple[int, ...]:
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank is part of every tensor's mesh"
    return tuple(coordinate)
