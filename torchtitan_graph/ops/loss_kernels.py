"""Cross entropy on a GPU, in Triton: a program reads a row of logits once, and sums in a fixed order.

There is no tuning, so every run launches the same code. Imported on a GPU alone: a CPU's torch brings no Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # logits of a program at a time
_WARPS = 8


@triton.jit
def _terms(  # type: ignore[no-untyped-def]
    logits, columns, terms, T, V, BLOCK: tl.constexpr, LEAST: tl.constexpr, SUMS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    begin_of_row = logits + row * V
    wide = terms.dtype.element_ty
    largest = tl.full((), LEAST, wide)  # finite, so that its difference to -inf is no NaN
    total = tl.full((), 0.0, wide)
    plain = tl.full((), 0.0, wide)  # the sum of the logits
    for begin in range(0, V, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(begin_of_row + at, mask=at < V, other=-float("inf")).to(wide)
        grown = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - grown) + tl.sum(tl.exp(x - grown), 0)
        largest = grown
        if SUMS:
            plain += tl.sum(tl.where(at < V, x, 0.0), 0)
    column = tl.load(columns + row)
    target = tl.load(begin_of_row + column, mask=(column >= 0) & (column < V), other=-float("inf")).to(wide)
    tl.store(terms + row, largest)
    tl.store(terms + T + row, total)
    tl.store(terms + 2 * T + row, target)
    if SUMS:
        tl.store(terms + 3 * T + row, plain)


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]
    logits,
    columns,
    largests,
    logs,
    scales,
    gradients,
    V,
    BLOCK: tl.constexpr,
    SMOOTHING: tl.constexpr,
    EACH: tl.constexpr,
    Z: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.load(columns + row)
    largest, log, scale = tl.load(largests + row), tl.load(logs + row), tl.load(scales + row)
    for begin in range(0, V, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + row * V + at, mask=at < V, other=0.0).to(largest.dtype)
        share = tl.exp(x - largest - log)
        is_target = (at == column).to(largest.dtype)
        if SMOOTHING + Z == 0:
            share -= is_target
        else:
            share = share * (1 + 2 * Z * (largest + log)) - (1 - SMOOTHING) * is_target - EACH
        tl.store(gradients + row * V + at, share * scale, mask=at < V)


def write_terms(terms_NT: Tensor, logits_TV: Tensor, columns_T: Tensor) -> None:
    """Write each row's largest logit m, its sum of exp(x - m), the logit in its column, -inf where there is none, and
    into a fourth row, if there is one, the sum of its logits; the logits are contiguous."""
    T, V = logits_TV.shape
    if T:
        given = (logits_TV, columns_T.contiguous(), terms_NT, T, V)
        least, sums = torch.finfo(terms_NT.dtype).min, len(terms_NT) == 4
        _terms[(T,)](*given, BLOCK=_BLOCK, LEAST=least, SUMS=sums, num_warps=_WARPS)


def write_gradient(
    out_TV: Tensor,
    logits_TV: Tensor,
    columns_T: Tensor,
    largest_T: Tensor,
    log_T: Tensor,
    scale_T: Tensor,
    label_smoothing: float = 0.0,
    num_classes: int = 1,
    z_loss: float = 0.0,
) -> None:
    """Write the gradient of the losses' sum, each times its scale, to `out_TV`, which may be the logits themselves."""
    T, V = logits_TV.shape
    if T:
        rows = [x.contiguous() for x in (columns_T, largest_T, log_T, scale_T)]
        # Constants of the code: as arguments they would be rounded to fp32.
        of_loss = dict(SMOOTHING=label_smoothing, EACH=label_smoothing / num_classes, Z=z_loss)
        _gradients[(T,)](logits_TV, *rows, out_TV, V, BLOCK=_BLOCK, **of_loss, num_warps=_WARPS)
