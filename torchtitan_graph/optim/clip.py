"""Gradient clipping by the norm over every rank and mesh axis."""

from collections.abc import Container, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from torchtitan_graph.capture.state import local_part
from torchtitan_graph.torch_private.tensors import multiply

c10d = torch.ops._c10d_functional

_RUN = 256  # elements that a CPU sums in fp32


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    stages: dist.ProcessGroup | None = None,
    repeated: Container[Tensor] = (),
    device: torch.device | str | None = None,
) -> Tensor:
    """Scale the gradients in place so that their global 2-norm is at most `max_norm`; return the norm before that.

    The norm runs over all shards of all gradients, each counted once whatever it is sharded over or replicated on. It
    is a plain scalar tensor, equal on every rank, on the gradients' device: nothing here waits for the device, and the
    caller must skip a step whose norm is not finite. `max_norm <= 0` only measures, and a norm that is not finite
    scales nothing: non-finite values stay on the ranks that had them.

    Args:
        stages: the group of a pipeline's stages, each with parameters of its own.
        repeated: parameters that another stage has too, and counts.
        device: device of the all-reduces, if not the gradients': NCCL sends nothing from the host's memory.
    """
    # Gradients of one layout are grouped: tensors of different meshes can't meet in one operation.
    by_layout: dict[Any, list[Tensor]] = {}
    for param in parameters:
        if param.grad is not None:
            grad = param.grad
            layout = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
            by_layout.setdefault(layout, []).append(param)
    squares = _global_squares(by_layout, repeated, device)
    if stages is not None:
        squares = _sum_over(stages, squares, device)
    total_norm = squares.sqrt().to(_dtype_of([p for params in by_layout.values() for p in params]))
    if max_norm > 0:
        finite_norm = torch.where(total_norm.isfinite(), total_norm, 0)
        scale = torch.clamp(max_norm / (finite_norm + 1e-6), max=1.0)  # as torch's clip_grads_with_norm_ has it
        for params in by_layout.values():
            multiply([local_part(param.grad) for param in params if param.grad is not None], scale)
    return total_norm


def ranks_with_non_finite_gradients(
    parameters: Iterable[Tensor], device: torch.device | str | None = None
) -> list[int]:
    """Return the ranks whose shard of any gradient is not finite; every rank takes part, on `device`."""
    grads = [local_part(param.grad) for param in parameters if param.grad is not None]
    mine = torch.stack([~grad.isfinite().all() for grad in grads]).any() if grads else torch.zeros(())
    mine = mine.to(device=device, dtype=torch.int32)  # NCCL sends no booleans
    found = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [rank for rank, is_bad in enumerate(found) if is_bad]


def _global_squares(
    by_layout: dict[Any, list[Tensor]], repeated: Container[Tensor], device: torch.device | str | None
) -> Tensor:
    """Return the sum of squares of all gradients over the ranks that hold shards of them, in fp64."""
    # Keyed by the ranks along each sharded axis. Several groups may have the same ranks, since torch treats equal
    # meshes as one; the order of the sums must not depend on that.
    groups_of: dict[tuple[tuple[int, ...], ...], list[dist.ProcessGroup]] = {}
    sums: dict[tuple[tuple[int, ...], ...], Tensor] = {}
    for layout, params in by_layout.items():
        groups: list[dist.ProcessGroup] = []
        if layout is not None:
            mesh, placements = layout
            assert not any(placement.is_partial() for placement in placements), "a gradient is reduced by now"
            groups = [mesh.get_group(i) for i, p in enumerate(placements) if not p.is_replicate()]
        grads = [local_part(param.grad) for param in params if param.grad is not None and param not in repeated]
        squares = _squares(grads) if grads else torch.zeros((), dtype=torch.float64, device=params[0].device)
        ranks = tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
        groups_of.setdefault(ranks, groups)
        sums[ranks] = sums[ranks] + squares if ranks in sums else squares
    for ranks in sums:
        for group in groups_of[ranks]:
            sums[ranks] = _sum_over(group, sums[ranks], device)
    if not sums:  # the loss depends on no parameter of this stage
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(list(sums.values())).sum()


def _sum_over(group: dist.ProcessGroup, x: Tensor, device: torch.device | str | None) -> Tensor:
    """All-reduce a tensor over a group by summing; while tracing, it is a node of the graph."""
    there = x if device is None else x.to(device)
    return c10d.wait_tensor(c10d.all_reduce(there, "sum", group.group_name)).to(x.device)


def _squares(grads: list[Tensor]) -> Tensor:
    """Return the sum of squares of one rank's tensors, in fp64.

    A CPU's norm adds up millions of numbers in a few fp32 sums, which ends off by 2e-2 where all are equal. There they
    are summed in short runs, and the runs in fp64, in the same time.
    """
    if grads[0].is_cuda:
        return get_total_norm(grads, foreach=True).double().square()
    norms, dtype = [], _dtype_of(grads)
    for grad in grads:
        numbers = grad.flatten()
        runs, rest = numbers.split((len(numbers) // _RUN * _RUN, len(numbers) % _RUN))
        norms.append(torch.linalg.vector_norm(runs.view(len(runs) // _RUN, _RUN), dim=1, dtype=dtype))
        norms.append(torch.linalg.vector_norm(rest, dtype=dtype)[None])
    return torch.cat(norms).double().square().sum()


def _dtype_of(tensors: list[Tensor]) -> torch.dtype:
    """Return the dtype of the tensors' norm: fp32, or fp64 where any is."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
