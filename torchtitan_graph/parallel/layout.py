"""How the ranks of a job are arranged on the axes of parallelism, and what each axis means for sums.

The axes are named here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

PP, DP_REPLICATE, DP_SHARD, CP, TP, EP = "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"

# Ranks along these see different data: losses, counts of targets and a step's state are summed over them. The inner
# one first: that is the order in which sums are sent.
DATA_AXES = (DP_SHARD, DP_REPLICATE)


@dataclasses.dataclass(frozen=True)
class ParallelDims:
    """The degree of every axis, outermost first; their product is the number of ranks.

    pp pipeline stages, dp_replicate copies of the storage, dp_shard ranks that share one copy, cp context (sequence)
    parallel, tp tensor parallel. ep, expert parallel, reuses ranks of the others and takes no part in the product.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data(self) -> int:
        """How many ranks (or groups of ranks that work on the same rows) see different data."""
        return math.prod(getattr(self, axis) for axis in DATA_AXES)

    def layout(self, device_type: str) -> Layout:
        """Build the layout; every rank of the job calls this together.

        Its mesh has the axes of degree above 1, and always `dp_shard`: a parameter is then a DTensor in every layout.
        """
        assert self.pp == self.cp == self.ep == 1, "refused with the configuration"
        axes = {DP_REPLICATE: self.dp_replicate, DP_SHARD: self.dp_shard, TP: self.tp}
        used = {name: degree for name, degree in axes.items() if degree > 1 or name == DP_SHARD}
        return Layout(self, init_device_mesh(device_type, tuple(used.values()), mesh_dim_names=tuple(used)))


@dataclasses.dataclass(frozen=True)
class Layout:
    """A job's ranks on its axes, seen from this rank. An axis of degree 1 has no group, and every rank is its first."""

    dims: ParallelDims
    mesh: DeviceMesh

    def degree(self, axis: str) -> int:
        return getattr(self.dims, axis)

    def rank(self, axis: str) -> int:
        return self.mesh.get_local_rank(axis) if self.degree(axis) > 1 else 0

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.mesh.get_group(axis)

    def submesh(self, *axes: str) -> DeviceMesh:
        """Give the part of the mesh with those of the axes that it has, in the mesh's order."""
        names = tuple(name for name in self.mesh.mesh_dim_names or () if name in axes)
        return self.mesh[names]

    @property
    def data_rank(self) -> int:
        """This rank's number among those that see different data."""
        return self.rank(DP_REPLICATE) * self.degree(DP_SHARD) + self.rank(DP_SHARD)

    @property
    def data_groups(self) -> list[dist.ProcessGroup]:
        """The groups over which a sum runs over all data, one after the other."""
        return [self.group(axis) for axis in DATA_AXES if self.degree(axis) > 1]

    def sum_over_data(self, x: Tensor) -> Tensor:
        """Add up, in place, what the ranks that see different data counted of it."""
        for group in self.data_groups:
            dist.all_reduce(x, group=group)
        return x

    def total_loss(self, by_rank: Sequence[float]) -> float:
        """Add up the losses that all ranks of the job report; ranks that see the same data report the same."""
        return math.fsum(by_rank) / (self.dims.num_ranks // self.dims.data)

    def __str__(self) -> str:
        return str(dict(zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=True)))
