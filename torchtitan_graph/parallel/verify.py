"""Check a pass by running the graph before and after it on the same numbers."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

from torchtitan_graph.graph.signature import Slot, input_nodes, signature_of
from torchtitan_graph.parallel.storage import Storage


@torch.no_grad()
def verify_pass(
    name: str, before: GraphModule, after: GraphModule, inputs: list[Tensor], device: torch.device, exact: bool = True
) -> None:
    """Raise unless both graphs give the same loss and, gathered, the same gradients, bit for bit.

    Every parameter starts from one full tensor, seeded by its name: in the compute layout as it is, at rest as this
    rank's shard of it. A gradient in the compute layout is summed over data parallel as storage would sum it.

    Args:
        inputs: the plain tensors of the graph's other inputs (batch, mask, number of tokens). Only one data-parallel
            rank's batch has targets: to its gradients the others add zeros, which is exact in any order and dtype.
            Otherwise a pass that packs gradients in another order, or reduces them in a wider dtype, would seem broken.
        exact: if not, each output may be off, as a whole, by the square root of the compute dtype's spacing: rounding
            stays far below it, and a wrong or missing term far above.

    Raises:
        RuntimeError: names the pass and the first outputs that differ, with the largest difference.
    """
    storages = {s.name: s.layout for s in signature_of(after).inputs if isinstance(s.layout, Storage)}
    results = [_run(gm, inputs, storages, device) for gm in (before, after)]
    precision = max(torch.finfo(dtype).eps for dtype in _compute_dtypes(after, storages))
    tolerance = 0.0 if exact else precision**0.5
    different = []
    for key, expected in results[0].items():
        found = results[1][key]
        if not torch.equal(found, expected) and not _distance(found, expected) <= tolerance:
            gap = (found.double() - expected.double()).abs().max()
            different.append(f"{key} (by {gap.item():.3g})")
    by_rank: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(by_rank, different)  # a fault may show on one rank only: all stop, none is left waiting
    if any(by_rank):
        rank, different = next((rank, names) for rank, names in enumerate(by_rank) if names)
        promise = "bit for bit" if exact else "up to rounding"
        raise RuntimeError(
            f"pass {name} promises the same numbers {promise}, but {len(different)} outputs differ on rank {rank}: "
            f"{', '.join(different[:5])}; the graphs before and after it are in the dump folder with debug.dump_graphs"
        )


def _compute_dtypes(gm: GraphModule, storages: dict[str, Storage]) -> set[torch.dtype]:
    """Give the dtypes that parameters are computed in; without any, fp64's spacing is all that a pass may be off."""
    if storages:
        return {s.precision.compute for s in storages.values()}
    return {node.meta["val"].dtype for node in input_nodes(gm, "param").values()} or {torch.float64}


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def _run(
    gm: GraphModule, inputs: list[Tensor], storages: dict[str, Storage], device: torch.device
) -> dict[str, Tensor]:
    flat: list[Tensor] = []
    rest = iter(inputs)
    placeholders = iter(gm.graph.find_nodes(op="placeholder"))
    for slot in signature_of(gm).inputs:
        for _ in range(slot.layout.num_tensors):
            val = next(placeholders).meta["val"]
            is_state = slot.kind in ("param", "buffer")
            flat.append(_parameter(slot, val, storages, device) if is_state else next(rest).clone())
    values = iter(gm(*flat))
    found = {
        f"{slot.kind} {slot.name}": _full(slot, next(values).to(device), storages)
        for slot in signature_of(gm).outputs
        for _ in range(slot.layout.num_tensors)
    }
    owners = [slot for slot in signature_of(gm).inputs for _ in range(slot.layout.num_tensors)]
    if any(slot.kind == "optim" for slot in owners):
        found |= {f"{slot.kind} {slot.name} afterwards": x for slot, x in zip(owners, flat, strict=True)}
    return found


def _parameter(slot: Slot, val: Any, storages: dict[str, Storage], device: torch.device) -> Tensor:
    storage = storages.get(slot.name)
    shape, dtype = (storage.compute_shape, storage.precision.compute) if storage else (val.shape, val.dtype)
    generator = torch.Generator(device).manual_seed(zlib.crc32(slot.name.encode()))
    full = (torch.randn(shape, generator=generator, device=device) * 0.05).to(dtype)
    if not isinstance(slot.layout, Storage):
        return full
    padded = torch.zeros(slot.layout.padded_shape, dtype=dtype, device=device)
    begin, size = slot.layout.local_range
    padded.narrow(slot.layout.dim, 0, size).copy_(full.narrow(slot.layout.dim, begin, size))
    return padded.to(val.device, val.dtype)  # at rest the dtype is wider: no bit is lost


def _full(slot: Slot, value: Tensor, storages: dict[str, Storage]) -> Tensor:
    storage = storages.get(slot.name)
    if slot.kind != "grad" or storage is None:
        return value
    if isinstance(slot.layout, Storage):
        parts = [torch.empty_like(value) for _ in range(storage.shard_degree)]
        dist.all_gather(parts, value.contiguous(), group=storage.shard_group)
        return torch.cat(parts, storage.dim).narrow(storage.dim, 0, storage.compute_shape[storage.dim])
    full = value.to(storage.precision.reduce)
    if storage.shard_degree > 1:
        dist.all_reduce(full, group=storage.shard_group)
    if storage.replicate_degree > 1:
        dist.all_reduce(full, group=storage.replicate_group)
    return full.to(storage.precision.storage)
