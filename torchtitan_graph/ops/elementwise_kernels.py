"""Rotary positions and SwiGLU on a GPU, in Triton. There is no tuning, so every run launches the same code.

Imported on a GPU alone: a CPU's torch brings no Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # numbers, or pairs, of a program at a time
_WARPS = 4


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    x, cos, sin, out, L,
    x_B, x_L, x_N, x_H, cos_B, cos_L, cos_H, sin_B, sin_L, sin_H,
    N: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    b, place = token // L, token % L
    for begin in range(0, N * HALF, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        is_there, n, pair = at < N * HALF, at // HALF, at % HALF
        c = tl.load(cos + b * cos_B + place * cos_L + pair * cos_H, mask=is_there, other=0.0).to(WIDE)
        s = tl.load(sin + b * sin_B + place * sin_L + pair * sin_H, mask=is_there, other=0.0).to(WIDE)
        s = -s if BACK else s
        one = 2 * pair if INTERLEAVED else pair
        other = one + 1 if INTERLEAVED else one + HALF
        head = x + b * x_B + place * x_L + n * x_N
        first = tl.load(head + one * x_H, mask=is_there, other=0.0).to(WIDE)
        second = tl.load(head + other * x_H, mask=is_there, other=0.0).to(WIDE)
        turned = out + (token * N + n) * (2 * HALF)
        tl.store(turned + one, first * c - second * s, mask=is_there)
        tl.store(turned + other, second * c + first * s, mask=is_there)


@triton.jit
def _swiglu(  # type: ignore[no-untyped-def]
    gates, ups, out, numel, STEEPNESS: tl.constexpr, LIMIT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < numel
    gate = tl.load(gates + at, mask=is_there, other=0.0).to(WIDE)
    up = tl.load(ups + at, mask=is_there, other=0.0).to(WIDE)
    gate, up, share = _parts(gate, up, STEEPNESS, LIMIT)
    tl.store(out + at, gate * share * up, mask=is_there)


@triton.jit
def _swiglu_backward(  # type: ignore[no-untyped-def]
    gradients, gates, ups, of_gates, of_ups, numel,
    STEEPNESS: tl.constexpr, LIMIT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < numel
    gradient = tl.load(gradients + at, mask=is_there, other=0.0).to(WIDE)
    given_gate = tl.load(gates + at, mask=is_there, other=0.0).to(WIDE)
    given_up = tl.load(ups + at, mask=is_there, other=0.0).to(WIDE)
    gate, up, share = _parts(given_gate, given_up, STEEPNESS, LIMIT)
    slope = share * (1 + STEEPNESS * gate * (1 - share))
    of_gate, of_up = gradient * up * slope, gradient * gate * share
    if LIMIT > 0:
        of_gate, of_up = tl.where(given_gate <= LIMIT, of_gate, 0.0), tl.where(tl.abs(given_up) <= LIMIT, of_up, 0.0)
    tl.store(of_gates + at, of_gate, mask=is_there)
    tl.store(of_ups + at, of_up, mask=is_there)


@triton.jit
def _parts(gate, up, STEEPNESS: tl.constexpr, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1
    return gate, up, 1 / (1 + tl.exp(-STEEPNESS * gate))


def write_rotated(
    out_BLNH: Tensor, x_BLNH: Tensor, cos_BL1H: Tensor, sin_BL1H: Tensor, interleaved: bool, back: bool
) -> None:
    """Write the result of `elementwise.rotate`; `out` is contiguous, the others may have any strides."""
    B, L, N, H = x_BLNH.shape
    angles = [t.expand(B, L, 1, H // 2) for t in (cos_BL1H, sin_BL1H)]
    strides = [t.stride(dim) for t in angles for dim in (0, 1, 3)]
    block = min(_BLOCK, triton.next_power_of_2(N * H // 2))
    if x_BLNH.numel():
        _rotate[(B * L,)](
            x_BLNH, *angles, out_BLNH, L, *x_BLNH.stride(), *strides,
            N=N, HALF=H // 2, INTERLEAVED=interleaved, BACK=back,
            WIDE=_wide(x_BLNH), BLOCK=block, num_warps=_WARPS,
        )  # fmt: skip


def write_swiglu(out: Tensor, gate: Tensor, up: Tensor, steepness: float, limit: float) -> None:
    """Write the result of `elementwise.swiglu`; `out` is contiguous; a limit of 0 is none."""
    _launch(_swiglu, (gate, up), (out,), steepness, limit)


def write_swiglu_gradients(
    of_gate: Tensor, of_up: Tensor, gradient: Tensor, gate: Tensor, up: Tensor, steepness: float, limit: float
) -> None:
    """Write the result of `elementwise.swiglu_backward`; `of_gate` and `of_up` are contiguous; a limit of 0 is none."""
    _launch(_swiglu_backward, (gradient, gate, up), (of_gate, of_up), steepness, limit)


def _launch(kernel, given: tuple[Tensor, ...], written: tuple[Tensor, ...], steepness: float, limit: float) -> None:  # type: ignore[no-untyped-def]
    numel = written[0].numel()
    if numel:
        tensors, wide = (*(x.contiguous() for x in given), *written), _wide(given[0])
        kernel[(triton.cdiv(numel, _BLOCK),)](
            *tensors, numel, STEEPNESS=steepness, LIMIT=limit, WIDE=wide, BLOCK=_BLOCK, num_warps=_WARPS
        )


def _wide(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
