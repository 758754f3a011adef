"""Mesh axes: the arrangement of a job's ranks, and the groups that sums run over.

The axes' names are defined here alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_graph.analysis.cost import Link

PP, DP_REPLICATE, DP_SHARD, CP, TP, EP = "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"
EXPERT_TP = "etp"
EP_FAR, EP_NEAR = "ep_far", "ep_near"  # of ep: a rank of each machine, in one place there; and those of a machine

# Ranks that share one copy of the parameters, dp_shard x cp of them; and one copy of the experts.
FSDP, EXPERT_FSDP = "fsdp", "efsdp"

# Ranks along these axes see different tokens: losses, counts of targets and a step's state are summed over them. The
# inner one first: that is the order in which sums are sent.
DATA_AXES = (FSDP, DP_REPLICATE)

REPLICAS = "replicas"  # the same rank of each replica group: no axis of a mesh, see Note [Replicas]

_OTHERS = "others"  # all other ranks of a mesh built for one axis alone


@dataclasses.dataclass(frozen=True)
class ParallelDims:
    """The degree of every axis; the product of the first five is the number of ranks, pp being the outermost.

    pp pipeline stages, dp_replicate copies of the storage, dp_shard ranks that share one copy, cp context (sequence)
    parallel, tp tensor parallel. ep, expert parallel, and etp, the ranks that share one expert, reuse ranks of
    dp_shard, cp and tp; with ep 1 experts are sharded like other parameters, whatever etp. ep_near: the ranks along ep
    that share a machine, where tokens are exchanged by machine; 0: they are not.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    ep_near: int = 0

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data(self) -> int:
        """The number of ranks (or groups of ranks that work on the same rows) that see different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        return self.fsdp * self.tp // (self.ep * self.etp)

    @property
    def ep_spans_tp(self) -> bool:
        """Whether the ranks along tp hold different experts, whole ones: each then routes its own part of a row."""
        return self.ep > 1 and self.tp > 1 and self.etp == 1

    def link_of_replicas(self, groups: int, num_near: int) -> Link:
        """Return the link of the same rank of all replica groups, on machines of `num_near` ranks: the groups follow
        one another, and each has these degrees."""
        return Link(REPLICAS, groups, min(groups, max(1, num_near // self.num_ranks)))

    def layout(self, device_type: str) -> Layout:
        """Build and return the layout; every rank of the job calls this together.

        A mesh has the axes of degree above 1; that of the parameters has always `fsdp`: a parameter is then a DTensor
        in every layout.
        """
        stages, copies = {PP: self.pp}, {DP_REPLICATE: self.dp_replicate}
        mesh = _mesh(device_type, {**stages, **copies, FSDP: self.fsdp, TP: self.tp}, keep=FSDP)
        context = experts = machines = None
        if self.cp > 1:
            context = _mesh(device_type, {_OTHERS: self.num_ranks // (self.cp * self.tp), CP: self.cp, TP: self.tp})
        if self.ep > 1:
            degrees = {**stages, **copies, EXPERT_FSDP: self.efsdp, EP: self.ep, EXPERT_TP: self.etp}
            experts = _without_stages(_mesh(device_type, degrees, keep=EXPERT_FSDP))
        if 1 < self.ep_near < self.ep:
            others, of_ep = self.num_ranks // (self.ep * self.etp), (self.ep // self.ep_near, self.ep_near)
            axes = (_OTHERS, EP_FAR, EP_NEAR, EXPERT_TP)
            machines = _mesh(device_type, dict(zip(axes, (others, *of_ep, self.etp), strict=True)))
        return Layout(self, _without_stages(mesh), context, experts, mesh if self.pp > 1 else None, machines)


def sum_over(groups: Sequence[dist.ProcessGroup], x: Tensor) -> Tensor:
    """All-reduce a tensor in place over the groups, one after the other, and return it."""
    for group in groups:
        dist.all_reduce(x, group=group)
    return x


def _mesh(device_type: str, degrees: dict[str, int], keep: str = "") -> DeviceMesh:
    used = {axis: degree for axis, degree in degrees.items() if degree > 1 or axis == keep}
    return init_device_mesh(device_type, tuple(used.values()), mesh_dim_names=tuple(used))


def _without_stages(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of this rank's pipeline stage."""
    names = mesh.mesh_dim_names or ()
    return _with_axes(mesh, [name for name in names if name != PP]) if PP in names else mesh


def _with_axes(mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
    """Return the submesh with those of the axes that a mesh has, in the mesh's order."""
    return mesh[tuple(name for name in mesh.mesh_dim_names or () if name in axes)]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A job's ranks on its axes, seen from this rank. An axis of degree 1 has no group, and every rank is its first.

    mesh     of the parameters of this rank's pipeline stage: dp_replicate, fsdp, tp
    context  has cp; None where its degree is 1
    experts  of the experts: dp_replicate, efsdp, ep, etp; None where ep is 1: then they are on `mesh`
    stages   has pp; None where its degree is 1
    machines has ep_far and ep_near; None where tokens are not exchanged by machine, or ep has one rank in each or one
             machine
    """

    dims: ParallelDims
    mesh: DeviceMesh
    context: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    stages: DeviceMesh | None = None
    machines: DeviceMesh | None = None

    def degree(self, axis: str) -> int:
        return getattr(self.dims, axis)

    def rank(self, axis: str) -> int:
        if self.degree(axis) == 1:
            return 0
        if axis == DP_SHARD:
            return self.rank(FSDP) // self.degree(CP)
        return self._mesh_of(axis).get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        return self._mesh_of(axis).get_group(axis)

    @property
    def axes_by_group(self) -> dict[str, tuple[str, int]]:
        """The axis and the degree of every group of this rank, by the group's name."""
        found: dict[str, tuple[str, int]] = {}
        for mesh in self._meshes:
            for axis, degree in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True):
                name = mesh.get_group(axis).group_name
                axes = {*found[name][0].split("/"), axis} if name in found else {axis}  # all ranks' is one group
                found[name] = ("/".join(sorted(axes)), degree)
        return found

    def links(self, num_near: int) -> dict[str, Link]:
        """Return the link of every group by its name, for machines with `num_near` ranks each.

        The ranks are counted from the group's first one: a group's place among the machines must not matter, for all
        ranks have to estimate alike.
        """
        found = {}
        groups = {str(group.group_name): group for group in self.all_groups}
        for name, (axis, degree) in self.axes_by_group.items():
            first, *others = dist.get_process_group_ranks(groups[name])
            found[name] = Link(axis, degree, 1 + sum(rank - first < num_near for rank in others))
        return found

    @property
    def groups_by_place(self) -> dict[str, str]:
        """The name of every group of this rank by its place, such as `mesh.fsdp`: places are the same in every world
        of these degrees, names are not."""
        return {
            f"{field}.{axis}": mesh.get_group(axis).group_name
            for field in ("mesh", "context", "experts", "stages", "machines")
            if (mesh := getattr(self, field)) is not None
            for axis in mesh.mesh_dim_names or ()
        }

    @property
    def gathers_rows(self) -> tuple[str, int]:
        """The name and the degree of the group that gathers rows; ("", 1) where ranks have whole rows."""
        return (self.group(CP).group_name, self.degree(CP)) if self.degree(CP) > 1 else ("", 1)

    @property
    def _meshes(self) -> list[DeviceMesh]:
        every = (self.mesh, self.context, self.experts, self.stages, self.machines)
        return [mesh for mesh in every if mesh is not None]

    def _mesh_of(self, axis: str) -> DeviceMesh:
        return next(mesh for mesh in self._meshes if axis in (mesh.mesh_dim_names or ()))

    def submesh(self, *axes: str) -> DeviceMesh:
        """Return the submesh of the parameters' mesh with those of the axes that it has, in the mesh's order."""
        return _with_axes(self.mesh, axes)

    def expert_submesh(self, *axes: str) -> DeviceMesh:
        """Return the same submesh of the experts' mesh."""
        assert self.experts is not None, "ep is above 1"
        return _with_axes(self.experts, axes)

    @property
    def data_rank(self) -> int:
        """This rank's index among those that see different rows."""
        return self.rank(DP_REPLICATE) * self.degree(DP_SHARD) + self.rank(DP_SHARD)

    @property
    def data_groups(self) -> list[dist.ProcessGroup]:
        """The groups that all-reduce a sum over all tokens, one after the other."""
        return [self.group(axis) for axis in DATA_AXES if self.degree(axis) > 1]

    @property
    def all_groups(self) -> list[dist.ProcessGroup]:
        """Every group that this rank is in."""
        return [group for mesh in self._meshes for group in mesh.get_all_groups()]

    @property
    def row_groups(self) -> list[dist.ProcessGroup]:
        """The groups that all-reduce a sum over a row's tokens as routers see them."""
        groups = [self.group(CP)] if self.degree(CP) > 1 else []
        return [*groups, self.group(TP)] if self.dims.ep_spans_tp else groups

    @property
    def routing_groups(self) -> list[dist.ProcessGroup]:
        """The groups that all-reduce a sum over all tokens that routers see."""
        return [*self.data_groups, self.group(TP)] if self.dims.ep_spans_tp else self.data_groups

    @property
    def num_routing_parts(self) -> int:
        """The number of equal parts of the tokens that routers see."""
        return self.dims.dp_replicate * self.dims.fsdp * (self.dims.tp if self.dims.ep_spans_tp else 1)

    def sum_over_rows(self, x: Tensor) -> Tensor:
        """All-reduce in place counts of whole rows; ranks that share a row counted the same."""
        return self.sum_over_data(x).div_(self.degree(CP), rounding_mode="floor")

    def sum_over_data(self, x: Tensor) -> Tensor:
        """All-reduce in place counts of the ranks that see different tokens."""
        return sum_over(self.data_groups, x)

    def of_all_stages(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the state of all pipeline stages, added by name; on the CPU where there are any."""
        if self.dims.pp == 1:
            return state
        by_stage: list[dict[str, Tensor]] = [{}] * self.dims.pp
        dist.all_gather_object(by_stage, {name: x.cpu() for name, x in state.items()}, group=self.group(PP))
        names = dict.fromkeys(itertools.chain.from_iterable(by_stage))
        return {name: sum(of_stage[name] for of_stage in by_stage if name in of_stage) for name in names}  # type: ignore[misc]

    def total_loss(self, by_rank: Sequence[float]) -> float:
        """Return the sum of the losses of all ranks of the job; those along tp report the same, or parts with the same
        sum, each stage its own."""
        return math.fsum(by_rank) / self.dims.tp

    def __str__(self) -> str:
        """Return the axes with configured degrees, as text."""
        shown = (PP, DP_REPLICATE, DP_SHARD, CP, TP, EP)
        return str({axis: self.degree(axis) for axis in shown if self.degree(axis) > 1 or axis == DP_SHARD})
