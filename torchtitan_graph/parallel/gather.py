"""Forward passes of a model whose parameters are shards at rest, without a graph and without gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.parallel.layout import DP_REPLICATE, EXPERT_FSDP, FSDP

c10d = torch.ops._c10d_functional


@contextlib.contextmanager
def gathered_for_forward(
    model: nn.Module, blocks: Mapping[str, nn.Module], dtype: torch.dtype, device: torch.device
) -> Iterator[None]:
    """Gather the parameters of each block before it runs, and free them after it; and so each module outside of blocks.

    All ranks run forward passes of the model together inside of this context.

    Args:
        dtype: of the gathered parameters that are floats.
    """
    handles: list[Any] = []
    for name, module in model.named_modules():
        if name in blocks or (block_of(name, blocks) is None and module._parameters):
            owners = list(module.modules()) if name in blocks else [module]
            held: dict[nn.Module, dict[str, nn.Parameter | None]] = {}
            handles += [
                module.register_forward_pre_hook(partial(_gather, owners, held, dtype, device), prepend=True),
                module.register_forward_hook(partial(_free, held), always_call=True),
            ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _gather(
    owners: list[nn.Module],
    held: dict[nn.Module, dict[str, nn.Parameter | None]],
    dtype: torch.dtype,
    device: torch.device,
    *_: Any,
) -> None:
    for owner in owners:
        held[owner] = dict(owner._parameters)
        for leaf, parameter in held[owner].items():
            if isinstance(parameter, DTensor):
                owner._parameters[leaf] = compute_tensor(parameter, dtype, device)  # type: ignore[assignment]


def _free(held: dict[nn.Module, dict[str, nn.Parameter | None]], *_: Any) -> None:
    for owner, parameters in held.items():
        owner._parameters.update(parameters)
    held.clear()


@torch.no_grad()
def compute_tensor(parameter: DTensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a parameter as a rank multiplies it, from the shards at rest: whole, or tensor or expert parallelism's
    shard of it, a DTensor. All ranks that share it call this together."""
    mesh, placements = parameter.device_mesh, parameter.placements
    names = mesh.mesh_dim_names or ()
    axis = next(i for i, name in enumerate(names) if name in (FSDP, EXPERT_FSDP))
    dim, degree, local = placements[axis].dim, mesh.size(axis), parameter.to_local().to(device, dtype)  # type: ignore[attr-defined]
    inner = [i for i, name in enumerate(names) if i != axis and name != DP_REPLICATE]
    size = parameter.shape[dim]
    for i in inner:
        if not isinstance(placements[i], Replicate) and placements[i].dim == dim:  # type: ignore[attr-defined]
            size //= mesh.size(i)
    if degree > 1:
        padded = F.pad(local.movedim(dim, 0), (0, 0) * (local.dim() - 1) + (0, -(-size // degree) - local.shape[dim]))
        group = mesh.get_group(axis).group_name
        parts = c10d.wait_tensor(c10d.all_gather_into_tensor(padded.contiguous(), degree, group))
        local = parts[:size].movedim(0, dim)
    if not inner:
        return local
    of_compute = mesh[tuple(names[i] for i in inner)]
    return DTensor.from_local(local, of_compute, [placements[i] for i in inner], run_check=False)
