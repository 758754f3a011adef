"""The fused loss on a GPU, in Triton: a program goes through a row of logits once, and sums in a fixed order.

There is no tuning, so every run launches the same code. Imported on a GPU alone: a CPU's torch brings no Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # logits that a program looks at together
_WARPS = 8


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    logits, labels, losses, largests, logs, V, ignored, BLOCK: tl.constexpr, LEAST: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    begin_of_row = logits + row * V
    wide = losses.dtype.element_ty
    largest = tl.full((), LEAST, wide)  # finite, so that its difference to -inf is no NaN
    total = tl.full((), 0.0, wide)
    for begin in range(0, V, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(begin_of_row + at, mask=at < V, other=-float("inf")).to(wide)
        grown = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - grown) + tl.sum(tl.exp(x - grown), 0)
        largest = grown
    log = tl.log(total)
    label = tl.load(labels + row)
    # A label that is no class has no logit: the loss is not a number, and the step is not taken.
    target = tl.load(begin_of_row + label, mask=(label >= 0) & (label < V), other=float("nan")).to(wide)
    tl.store(losses + row, tl.where(label == ignored, 0.0, largest - target + log))
    tl.store(largests + row, largest)
    tl.store(logs + row, log)


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]
    logits, labels, largests, logs, dloss, gradients, V, ignored, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    largest, log = tl.load(largests + row), tl.load(logs + row)
    scale = tl.where(label == ignored, 0.0, tl.load(dloss))
    for begin in range(0, V, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + row * V + at, mask=at < V, other=0.0).to(largest.dtype)
        share = tl.exp(x - largest - log) - (at == label).to(largest.dtype)
        tl.store(gradients + row * V + at, share * scale, mask=at < V)


def sums(logits_TV: Tensor, labels_T: Tensor, ignored: int, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Give, of contiguous logits, each row's loss, its largest logit m, and the logarithm of the sum of exp(x - m)."""
    T, V = logits_TV.shape
    losses_T, largest_T, log_T = (logits_TV.new_empty(T, dtype=wide) for _ in range(3))
    if T:
        rows = (logits_TV, labels_T, losses_T, largest_T, log_T)
        _sums[(T,)](*rows, V, ignored, BLOCK=_BLOCK, LEAST=torch.finfo(wide).min, num_warps=_WARPS)
    return losses_T, largest_T, log_T


def write_gradient(
    out_TV: Tensor, logits_TV: Tensor, labels_T: Tensor, largest_T: Tensor, log_T: Tensor, dloss: Tensor, ignored: int
) -> None:
    """Write `dloss` times the gradient of the losses' sum to `out_TV`, which may be the logits themselves."""
    T, V = logits_TV.shape
    if T:
        rows = (logits_TV, labels_T, largest_T, log_T, dloss, out_TV)
        _gradients[(T,)](*rows, V, ignored, BLOCK=_BLOCK, num_warps=_WARPS)
