"""Placeholders of a GPU's fused RMSNorm, forward and backward, in graphs for planning on a machine without a GPU.

There torch decomposes RMSNorm before tracing, into ten operators in fp32; on a GPU it is one kernel. These operators
have that kernel's inputs and outputs, and are never run.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_graph.ops.operator import operator


def use_gpu_norms(model: nn.Module) -> None:
    """Replace the forward of the model's `nn.RMSNorm` modules by the placeholder operators."""
    for module in model.modules():
        if type(module) is nn.RMSNorm:
            module.forward = partial(_norm, module)  # type: ignore[method-assign]


def _norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    weight = module.weight
    if weight is not None and weight.dtype != x.dtype:  # torch's kernel requires one dtype
        return F.rms_norm(x, module.normalized_shape, weight, module.eps)
    return rms_norm(x, weight)[0]


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, output[1], weight)


def _backward(ctx, gradient: Tensor, unused: None):  # type: ignore[no-untyped-def]
    x, roots, weight = ctx.saved_tensors
    of_x, of_weight = rms_norm_backward(gradient, x, roots, weight)
    return of_x, of_weight if weight is not None else None


def _fake_norm(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=wide)


@operator(_fake_norm, setup=_save, backward=_backward)
def rms_norm(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x (..., D) normalised over D and, for backward, the inverse roots (..., 1), in fp32 if x is narrower."""
    raise NotImplementedError("a planned graph is not run")


def _fake_backward(gradient: Tensor, x: Tensor, roots: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(0) if weight is None else torch.empty_like(weight)


@operator(_fake_backward)
def rms_norm_backward(gradient: Tensor, x: Tensor, roots: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight, an empty one without a weight."""
    raise NotImplementedError("a planned graph is not run")
