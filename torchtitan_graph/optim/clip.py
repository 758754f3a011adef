"""Clip gradients by their norm over every rank and mesh axis."""

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale the gradients in place so that their global 2-norm is at most `max_norm`; return the norm before that.

    The norm runs over all shards of all gradients, each counted once whatever it is sharded over or replicated on.
    It is a plain scalar tensor, equal on every rank, on the gradients' device: nothing here waits for the device, so
    a caller that must stop on a non-finite norm reads it before the optimizer's step. `max_norm <= 0` only measures.
    """
    # Gradients of one layout are stacked and reduced together: mixed layouts would be brought to a common one tensor
    # by tensor, and tensors of different meshes can't meet in one operation at all.
    by_layout: dict[object, list[torch.Tensor]] = {}
    for param in parameters:
        if param.grad is not None:
            grad = param.grad
            layout = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
            by_layout.setdefault(layout, []).append(param)
    total_norm = torch.linalg.vector_norm(torch.stack([_norm(params) for params in by_layout.values()]))
    if max_norm > 0:
        for params in by_layout.values():
            clip_grads_with_norm_(params, max_norm, total_norm, foreach=True)
    return total_norm


def _norm(params: list[torch.Tensor]) -> torch.Tensor:
    """Return the global norm of gradients of one layout, on every rank."""
    norm = get_total_norm([param.grad for param in params if param.grad is not None], foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
