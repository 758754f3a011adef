"""The storage layout: each rank's shard of a parameter at rest, exactly as FSDP2 keeps it.

A parameter is a DTensor over the axes that shard and replicate it (and tensor parallel's, where it is on); experts that
expert parallelism has sharded are on a mesh of their own, with its axis. The sharding axis splits one dim of the tensor
that these leave to the rank into parts of equal size, the last ones shorter or empty. The local tensor is in a buffer
padded to that size: collectives and graphs take the padded one, so that every rank runs the same graph; everything else
sees the unpadded one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.parallel.chunk import chunk_of
from torchtitan_graph.parallel.layout import DATA_AXES, DP_REPLICATE, EP, EXPERT_FSDP, FSDP, Layout
from torchtitan_graph.torch_private.distributed import DTensorSpec, StridedShard, dtensor_spec, make_dtensor

_FEW = 4  # size of each dim of a small stand-in parameter
# The parameters that are gathered, and whose gradients are reduced, once a step.
NONE, EXPERTS, ALL, AUTO = "none", "experts", "all", "auto"


@dataclasses.dataclass(frozen=True)
class Precision:
    """Dtypes of a parameter. storage: at rest; compute: gathered and multiplied; reduce: of the sum of gradients."""

    storage: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32

    @property
    def sum_in(self) -> torch.dtype:
        """The dtype in which tensor parallelism's terms of a gradient are summed, as in FSDP2."""
        return self.reduce if self.reduce != self.compute else self.storage


@dataclasses.dataclass(frozen=True)
class Storage:
    """The storage layout of one parameter; also the layout of its slot, and its gradient's, in a graph's signature.

    mesh           with all of the parameter's axes
    shard_axis     the ranks along it hold a shard each
    replicate_axis the ranks along it hold the same; the mesh may lack it
    compute_shape  shape that a rank multiplies: the whole parameter, or tensor parallelism's shard of it
    dim            the dim that `shard_axis` shards; another than 0 must divide evenly, as in FSDP2
    on_host        the shard, its gradient and the optimizer's state are in the host's memory
    is_trained     it has a gradient, and optimizer state; else it is frozen, or a quantised weight
    """

    mesh: DeviceMesh
    shard_axis: str
    replicate_axis: str
    placements: tuple[Placement, ...]
    shape: torch.Size
    compute_shape: torch.Size
    precision: Precision
    dim: int = 0
    on_host: bool = False
    is_trained: bool = True
    num_tensors = 1

    @property
    def shard_degree(self) -> int:
        return self._degree(self.shard_axis)

    @property
    def replicate_degree(self) -> int:
        return self._degree(self.replicate_axis)

    def _degree(self, axis: str) -> int:
        names = self.mesh.mesh_dim_names or ()
        return self.mesh.size(names.index(axis)) if axis in names else 1

    @property
    def shard_group(self) -> dist.ProcessGroup:
        return self.mesh.get_group(self.shard_axis)

    @property
    def replicate_group(self) -> dist.ProcessGroup:
        return self.mesh.get_group(self.replicate_axis)

    @functools.cached_property
    def padded_shape(self) -> torch.Size:
        """The shape of this rank's shard with its padding; the same on all ranks."""
        sizes = list(self.compute_shape)
        sizes[self.dim] = -(-sizes[self.dim] // self.shard_degree)
        return torch.Size(sizes)

    @functools.cached_property
    def local_range(self) -> tuple[int, int]:
        """The offset of this rank's shard on `dim` of the compute shape, and its size without padding."""
        size, per_rank = self.compute_shape[self.dim], self.padded_shape[self.dim]
        begin = min(per_rank * self.mesh.get_local_rank(self.shard_axis), size)
        return begin, min(per_rank, size - begin)

    def in_small(self) -> Storage:
        """Return the storage of a small stand-in parameter with the same placements, a few numbers in each dim."""
        local = torch.Size(min(size, _FEW) for size in self.compute_shape)
        whole = (size // cut * small for size, cut, small in zip(self.shape, self.compute_shape, local, strict=True))
        return dataclasses.replace(self, shape=torch.Size(whole), compute_shape=local, on_host=False)

    def empty(self, device: torch.device) -> DTensor:
        """Return the parameter's newly allocated shard on this rank, its padding zero; for a GPU's parameter on the
        host in pinned memory, for asynchronous copies."""
        place, pin = ("cpu", device.type == "cuda") if self.on_host else (device, False)
        padded = torch.zeros(self.padded_shape, dtype=self.precision.storage, device=place, pin_memory=pin)
        return self.unflatten([padded])

    def flatten(self, value: Tensor) -> list[Tensor]:
        """Return the padded local tensor that a live parameter is the unpadded view of."""
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
        """Return a padded local tensor (a new parameter, or a gradient) as the unpadded DTensor."""
        local = tensors[0].narrow(self.dim, 0, self.local_range[1])
        return make_dtensor(local, self._spec)

    @functools.cached_property
    def _spec(self) -> DTensorSpec:
        return dtensor_spec(self.mesh, self.placements, self.shape, self.precision.storage)


def plan_storage(model: nn.Module, layout: Layout, precision: Precision, on_host: bool = False) -> dict[str, Storage]:
    """Return parameters' storage layouts over the data-parallel axes, by name; the model is on meta, parallelized."""
    return {name: _storage(name, parameter, layout, precision, on_host) for name, parameter in model.named_parameters()}


def _storage(name: str, parameter: Tensor, layout: Layout, precision: Precision, on_host: bool) -> Storage:
    assert parameter.dim() >= 1, f"{name} is a scalar: give it one dimension, so that it can be sharded"
    mesh, axis = (layout.experts, EXPERT_FSDP) if is_expert(parameter) else (layout.mesh, FSDP)
    assert mesh is not None, "experts have a mesh of their own"
    compute: tuple[Placement, ...] = ()
    compute_shape, dim = parameter.shape, stored_dim(parameter, layout)
    if isinstance(parameter, DTensor):
        compute, compute_shape = tuple(parameter.placements), parameter.to_local().shape
    num_pieces = math.prod(parameter.device_mesh.size(i) for i, p in enumerate(compute) if p == Shard(dim))  # type: ignore[attr-defined]
    shard = StridedShard(dim, split_factor=num_pieces) if num_pieces > 1 else Shard(dim)
    replicate = (Replicate(),) if layout.degree(DP_REPLICATE) > 1 else ()
    placements = (*replicate, shard, *compute)
    if not parameter.is_floating_point():  # packed in bytes, which no layout casts
        precision = Precision(parameter.dtype, parameter.dtype, parameter.dtype)
    how = precision, dim, on_host, parameter.requires_grad
    return Storage(mesh, axis, DP_REPLICATE, placements, parameter.shape, compute_shape, *how)


def is_expert(parameter: Tensor) -> bool:
    """Return whether expert parallelism has sharded a parameter."""
    return isinstance(parameter, DTensor) and EP in (parameter.device_mesh.mesh_dim_names or ())


def stored_dim(parameter: Tensor, layout: Layout) -> int:
    """Return the dim that storage shards: 1 where a rank's experts don't divide over the ranks that share them, and
    their second dim does; else 0. Unequal shards would be padded: by 1.6 where four ranks share five experts."""
    if not is_expert(parameter) or parameter.dim() == 1:
        return 0
    shape, degree = parameter.to_local().shape, layout.dims.efsdp  # type: ignore[attr-defined]
    return int(shape[0] % degree > 0 and shape[1] % degree == 0)


def names_of(which: str, storages: Mapping[str, Storage]) -> frozenset[str]:
    """Return the names of the parameters of a choice: NONE, EXPERTS (those of expert parallelism) or ALL."""
    of_experts = frozenset(name for name, storage in storages.items() if storage.shard_axis == EXPERT_FSDP)
    return {NONE: frozenset[str](), EXPERTS: of_experts, ALL: frozenset(storages)}[which]


def materialize(model: nn.Module, storages: Mapping[str, Storage], device: torch.device) -> None:
    """Replace the model's meta parameters by allocated shards, in place; tied ones by one. Buffers are zero, and whole
    on every rank except those in `storages`."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for name, p in [*model.named_parameters(remove_duplicate=False)]:  # a module in two places changes in both
        if p not in new:
            new[p] = nn.Parameter(storages[name].empty(device), requires_grad=p.requires_grad)
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = new[p]
    for owner, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if (name := f"{owner}.{leaf}") in storages:
                setattr(module, leaf, storages[name].empty(device))
            else:
                setattr(module, leaf, torch.zeros_like(buffer, device=device, requires_grad=buffer.requires_grad))


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters of a model on meta in place. Buffers, such as the correction bias of a mixture of experts,
    keep their dtype."""
    buffers = {name: buffer for name, buffer in model.named_buffers()}
    model.to(dtype)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer)


@dataclasses.dataclass(frozen=True)
class Reshard:
    """The gathered weights that are freed after forward and gathered again for backward: those of blocks, and those
    outside (embedding, final norm, output), with which backward begins; but for the `whole` ones, by name."""

    blocks: bool = True
    root: bool = False
    whole: frozenset[str] = frozenset()

    @classmethod
    def from_option(cls, policy: str) -> Reshard:
        """Return the resharding of `parallelism.fsdp_reshard_after_forward`; "default" keeps the root's, like FSDP2."""
        return cls(blocks=policy != "never", root=policy == "always")

    def frees(self, name: str, in_block: bool) -> bool:
        """Return whether a parameter's gathered weight is freed."""
        return name not in self.whole and (self.blocks if in_block else self.root)


def shard_eager(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    layout: Layout,
    precision: Precision,
    reshard: Reshard,
    device: torch.device,
    on_host: bool = False,
    once: str = NONE,
) -> Callable[[bool], None]:
    """Apply FSDP2 to each block, then to the root, and allocate: the eager reference in every layout.

    Gradients are summed, not averaged: the loss is already divided by the global number of tokens. Inputs keep their
    dtype, as in a graph, where nothing casts them. With `on_host` parameters are in the host's memory.

    Returns:
        a function to call before each microbatch, with whether it is the step's last: what is done `once` a step
        (`parallelism.fsdp_once_a_step`) is then done.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute if precision.compute != precision.storage else None,
        reduce_dtype=precision.reduce if precision.reduce != precision.compute else None,
        cast_forward_inputs=False,
    )
    experts = [m for m in model.modules() if any(is_expert(p) for p in m.parameters(recurse=False))]
    units = [*experts, *blocks.values(), model]
    done_once: list[Any] = {NONE: [], EXPERTS: experts, ALL: units}[once]
    for module in units:
        mesh = layout.expert_submesh(EXPERT_FSDP, DP_REPLICATE) if module in experts else layout.submesh(*DATA_AXES)
        sharded = fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=module not in done_once and (reshard.root if module is model else reshard.blocks),
            shard_placement_fn=lambda p: Shard(stored_dim(p, layout)),
            offload_policy=CPUOffloadPolicy(pin_memory=device.type == "cuda") if on_host else OffloadPolicy(),
        )
        if mesh.size() > 1:  # on one rank FSDP2 would divide by 1, into another copy of the gradients
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
    cast_parameters(model, precision.storage)
    slots = {name for name, buffer in model.named_buffers() if buffer.requires_grad}  # `to_empty` drops it
    model.to_empty(device="cpu" if on_host else device)
    for owner, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            setattr(module, leaf, buffer.to(device).requires_grad_(f"{owner}.{leaf}" in slots))

    def sync(is_last: bool) -> None:
        for module in done_once:
            module.set_requires_gradient_sync(is_last, recurse=False)
            module.set_reshard_after_backward(is_last, recurse=False)

    return sync


def reshard_eager(model: nn.Module) -> None:
    """Free the parameters that FSDP2 leaves gathered after a forward pass without a backward. The next forward pass
    would read them, though the shards have changed since."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def set_local(parameter: DTensor, full: Tensor) -> None:
    """Copy this rank's shard of a full tensor into a parameter at rest."""
    local, offsets, _ = chunk_of(parameter)
    for dim, (begin, size) in enumerate(zip(offsets, local.shape, strict=True)):
        full = full.narrow(dim, begin, size)
    local.copy_(full)


def buckets(model: nn.Module, blocks: Iterable[str], others: Mapping[str, Storage] | None = None) -> list[list[str]]:
    """Return parameters' names in buckets as FSDP2 groups them when each block is sharded, then the root; each bucket
    in FSDP2's order, and `others`, which are stored alike, after them. A block's experts, where they are on a mesh of
    their own, are a bucket of their own.

    The order decides a gradient's place in its bucket, and with it, on more than two ranks, the order of summation.
    """
    groups: dict[str, list[str]] = {block: [] for block in blocks}
    experts: dict[str, list[str]] = {block: [] for block in blocks}
    root: list[str] = []
    kinds = [(name, is_expert(p)) for name, p in model.named_parameters()]
    kinds += [(name, storage.shard_axis == EXPERT_FSDP) for name, storage in (others or {}).items()]
    for name, of_experts in kinds:
        (experts if of_experts else groups).get(block_of(name, groups) or "", root).append(name)
    return [*(names for block in groups for names in (experts[block], groups[block]) if names), root]
