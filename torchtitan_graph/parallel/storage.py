"""The storage layout: what each rank keeps of a parameter at rest, exactly as FSDP2 keeps it.

A parameter is a DTensor over the data-parallel axes (and tensor parallel's, where it is on). `dp_shard` splits dim 0
of what tensor parallelism left to the rank into parts of equal size, the last ones shorter or empty. The local tensor
lies in a buffer padded to that size: collectives and graphs take the padded one, so that every rank runs the same
graph; everything else sees the unpadded one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.torch_private import DTensorSpec, StridedShard, dtensor_spec, make_dtensor
from torchtitan_graph.parallel.chunk import chunk_of
from torchtitan_graph.parallel.mesh import axis_degree, data_parallel_mesh


@dataclasses.dataclass(frozen=True)
class Precision:
    """storage: dtype at rest; compute: dtype that is gathered and multiplied; reduce: dtype gradients are summed in."""

    storage: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32


@dataclasses.dataclass(frozen=True)
class Storage:
    """How one parameter lies at rest; also the layout of its slot, and its gradient's, in a graph's signature.

    compute_shape  what a rank multiplies: the whole parameter, or tensor parallelism's part of it
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    compute_shape: torch.Size
    precision: Precision
    num_tensors = 1

    @property
    def shard_degree(self) -> int:
        return axis_degree(self.mesh, "dp_shard")

    @property
    def replicate_degree(self) -> int:
        return axis_degree(self.mesh, "dp_replicate")

    def group_name(self, axis: str) -> str:
        return self.mesh.get_group(axis).group_name

    @functools.cached_property
    def padded_shape(self) -> torch.Size:
        rows, *rest = self.compute_shape
        return torch.Size((-(-rows // self.shard_degree), *rest))

    @functools.cached_property
    def num_local_rows(self) -> int:
        rows, per_rank = self.compute_shape[0], self.padded_shape[0]
        return max(0, min(per_rank, rows - per_rank * self.mesh.get_local_rank("dp_shard")))

    def empty(self, device: torch.device) -> DTensor:
        """Allocate the parameter's part on this rank, its padding zero."""
        padded = torch.zeros(self.padded_shape, dtype=self.precision.storage, device=device)
        return self.unflatten([padded])

    def flatten(self, value: Tensor) -> list[Tensor]:
        """Give the padded local tensor that a live parameter is the unpadded view of."""
        found = (type(value), tuple(value.shape), value.dtype, getattr(value, "placements", None))
        wanted = (DTensor, tuple(self.shape), self.precision.storage, self.placements)
        if found != wanted:
            raise UserError(f"has (type, shape, dtype, placements) {found}, the graph was made for {wanted}")
        local = value.to_local().detach() if value.requires_grad else value.to_local()  # type: ignore[attr-defined]
        padded = self.padded_shape
        needed = (local.storage_offset() + padded.numel()) * local.element_size()
        if not local.is_contiguous() or local.untyped_storage().nbytes() < needed:
            raise UserError("lies in a tensor without room for its padding; allocate it with `materialize`")
        return [local.as_strided(padded, torch.empty(padded, device="meta").stride())]

    def unflatten(self, tensors: list[Tensor]) -> DTensor:
        """Wrap a padded local tensor (a new parameter, or a gradient) as the DTensor it stands for."""
        local = tensors[0].narrow(0, 0, self.num_local_rows)
        return make_dtensor(local, self._spec)

    @functools.cached_property
    def _spec(self) -> DTensorSpec:
        return dtensor_spec(self.mesh, self.placements, self.shape, self.precision.storage)


def plan_storage(model: nn.Module, mesh: DeviceMesh, precision: Precision) -> dict[str, Storage]:
    """Lay out every parameter of a model (on meta, after `parallelize`) over the data-parallel axes, by name."""
    return {name: _storage(name, parameter, mesh, precision) for name, parameter in model.named_parameters()}


def _storage(name: str, parameter: Tensor, mesh: DeviceMesh, precision: Precision) -> Storage:
    assert parameter.dim() >= 1, f"{name} is a scalar: give it one dimension, so that it can be sharded"
    shard: Placement = Shard(0)
    tensor_parallel: tuple[Placement, ...] = ()
    compute_shape = parameter.shape
    if isinstance(parameter, DTensor):
        tensor_parallel = tuple(parameter.placements)
        compute_shape = parameter.to_local().shape
        if tensor_parallel[0] == Shard(0):
            shard = StridedShard(0, split_factor=axis_degree(mesh, "tp"))
    replicate = (Replicate(),) if axis_degree(mesh, "dp_replicate") > 1 else ()
    return Storage(mesh, (*replicate, shard, *tensor_parallel), parameter.shape, compute_shape, precision)


def materialize(model: nn.Module, storages: Mapping[str, Storage], device: torch.device) -> None:
    """Replace the model's meta parameters by allocated ones at rest, in place; tied ones by one. Buffers are whole on
    every rank, and zero."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if p not in new:
            new[p] = nn.Parameter(storages[name].empty(device), requires_grad=p.requires_grad)
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = new[p]
    for module in model.modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            setattr(module, leaf, torch.zeros_like(buffer, device=device))


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters of a model on meta in place. Buffers, such as the correction bias of a mixture of experts,
    keep their dtype."""
    buffers = {name: buffer for name, buffer in model.named_buffers()}
    model.to(dtype)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer)


def shard_eager(
    model: nn.Module,
    mesh: DeviceMesh,
    precision: Precision,
    *,
    reshard_after_forward: bool,
    device: torch.device,
    reshard_root: bool = False,
) -> None:
    """Apply FSDP2 to each block, then to the root, and allocate: the eager reference in every layout.

    Gradients are summed, not averaged: the loss is already divided by the global number of tokens. Inputs keep their
    dtype, as in a graph, where nothing casts them. The root's weights (embedding, output) stay gathered from forward
    to backward unless `reshard_root`.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute if precision.compute != precision.storage else None,
        reduce_dtype=precision.reduce if precision.reduce != precision.compute else None,
        cast_forward_inputs=False,
    )
    blocks = list(model.layers)  # type: ignore[arg-type]
    for module in (*blocks, model):
        sharded = fully_shard(
            module,
            mesh=data_parallel_mesh(mesh),
            mp_policy=policy,
            reshard_after_forward=reshard_root if module is model else reshard_after_forward,
        )
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    cast_parameters(model, precision.storage)
    model.to_empty(device=device)


@torch.no_grad()
def set_local(parameter: DTensor, full: Tensor) -> None:
    """Copy this rank's part of a full tensor into a parameter at rest."""
    local, offsets, _ = chunk_of(parameter)
    for dim, (begin, size) in enumerate(zip(offsets, local.shape, strict=True)):
        full = full.narrow(dim, begin, size)
    local.copy_(full)


def buckets(model: nn.Module) -> list[list[str]]:
    """Group the parameters as FSDP2 does when each block is sharded, then the root; each group in FSDP2's order.

    The order decides a gradient's place in its bucket, and with it, on more than two ranks, the order of summation.
    """
    taken: set[nn.Parameter] = set()
    groups = []
    prefixes = [f"layers.{i}." for i in range(len(model.layers))] + [""]  # type: ignore[arg-type]
    for prefix in prefixes:
        group = [n for n, p in model.named_parameters() if n.startswith(prefix) and p not in taken]
        taken.update(model.get_parameter(n) for n in group)
        groups.append(group)
    return groups
