"""The device mesh: how the ranks of a job are arranged on the axes of parallelism."""

from __future__ import annotations

import dataclasses

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


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
    def dp(self) -> int:
        """How many ranks (or groups of tensor-parallel ranks) see different data."""
        return self.dp_replicate * self.dp_shard

    def mesh(self, device_type: str) -> DeviceMesh:
        """Build the mesh; every rank of the job calls this together.

        It has the axes of degree above 1, and always `dp_shard`: a parameter is then a DTensor in every layout.
        """
        assert self.pp == self.cp == self.ep == 1, "refused with the configuration"
        axes = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        used = {name: degree for name, degree in axes.items() if degree > 1 or name == "dp_shard"}
        return init_device_mesh(device_type, tuple(used.values()), mesh_dim_names=tuple(used))


def axis_degree(mesh: DeviceMesh, axis: str) -> int:
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(axis)) if axis in names else 1


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Give the part of the mesh that storage is sharded and replicated over, as FSDP2 wants it."""
    if axis_degree(mesh, "dp_replicate") > 1:
        return mesh["dp_replicate", "dp_shard"]
    return mesh["dp_shard"]


def data_parallel_rank(mesh: DeviceMesh) -> int:
    """Give this rank's number among those that see different data."""
    replicate = mesh.get_local_rank("dp_replicate") if axis_degree(mesh, "dp_replicate") > 1 else 0
    return replicate * axis_degree(mesh, "dp_shard") + mesh.get_local_rank("dp_shard")
