"""Rotary positions and SwiGLU as operators that read their inputs once, and write their result.

On a GPU each is one kernel, see elementwise_kernels.py; on a CPU torch's operators compute the same. They compute in
fp32 (fp64 for inputs in it) and round once. Eager mode and the graph call the same operators, so they have the same
bits. On a CPU a rotation has the bits of the layer's own formula, in fewer passes over memory; SwiGLU, and what a GPU
computes, are equal to those formulas up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchtitan_graph.ops.operator import num_bytes, operator

STEEPNESS, LIMIT = 1.702, 7.0  # of gpt_oss' gate
_FORM = {False: (1.0, 0.0), True: (STEEPNESS, LIMIT)}  # by clamped: (steepness, limit); a limit of 0 is none


def _check_alike(gate: Tensor, up: Tensor) -> None:
    """Check that both have one shape and dtype: a kernel reads both by one index, without broadcast or promotion."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"swiglu: gate is {tuple(gate.shape)} in {gate.dtype}, up {tuple(up.shape)} in {up.dtype}: both must be of "
            "one shape and dtype"
        )


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _save_angles(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, *angles, ctx.interleaved, ctx.back = inputs
    ctx.save_for_backward(*angles)


def _rotate_backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
    return rotate(gradient, *ctx.saved_tensors, ctx.interleaved, not ctx.back), None, None, None, None


def _save_both(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *both, ctx.clamped = inputs
    ctx.save_for_backward(*both)


def _swiglu_backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
    return *swiglu_backward(gradient, *ctx.saved_tensors, ctx.clamped), None


def _fake_swiglu(gate: Tensor, up: Tensor, clamped: bool) -> Tensor:
    _check_alike(gate, up)
    return _like(gate)


def _scratch_of_rotation(x_BLNH: Tensor, *_: object, **__: object) -> int:
    """Return the bytes of the temporaries on a CPU: products of a half; in half precision, both halves in fp32, too."""
    if x_BLNH.device.type != "cpu":
        return 0
    return num_bytes(x_BLNH) // 2 if _wide(x_BLNH) == x_BLNH.dtype else 4 * num_bytes(x_BLNH)


@operator(
    lambda x_BLNH, *_: _like(x_BLNH),
    setup=_save_angles,
    backward=_rotate_backward,
    elementwise=True,
    scratch=_scratch_of_rotation,
)
def rotate(x_BLNH: Tensor, cos_BL1H: Tensor, sin_BL1H: Tensor, interleaved: bool, back: bool) -> Tensor:
    """Rotate the pairs of every head by their angles, or back; return the result.

    Args:
        cos_BL1H, sin_BL1H: (B, L, 1, H/2), in fp32 or fp64; B may be 1. They get no gradient.
        interleaved: pair i is features (2i, 2i + 1), else (i, i + H/2).
    """
    out_BLNH = _like(x_BLNH)
    if x_BLNH.is_cuda:
        from torchtitan_graph.ops.elementwise_kernels import write_rotated

        write_rotated(out_BLNH, x_BLNH, cos_BL1H, sin_BL1H, interleaved, back)
        return out_BLNH
    x, out = ((t.unflatten(-1, (-1, 2)) if interleaved else t.unflatten(-1, (2, -1))) for t in (x_BLNH, out_BLNH))
    pair, wide = -1 if interleaved else -2, torch.promote_types(_wide(x_BLNH), cos_BL1H.dtype)
    first, second = (half.to(wide) for half in x.unbind(pair))
    product = torch.empty_like(first, memory_format=torch.contiguous_format)
    for place, of_cos, of_sin, is_less in ((0, first, second, not back), (1, second, first, back)):
        turned = out.select(pair, place)
        result = torch.mul(of_cos, cos_BL1H, out=turned) if turned.dtype == wide else of_cos * cos_BL1H
        torch.mul(of_sin, sin_BL1H, out=product)
        result.sub_(product) if is_less else result.add_(product)
        if result is not turned:
            turned.copy_(result)
    return out_BLNH


@operator(_fake_swiglu, setup=_save_both, backward=_swiglu_backward, elementwise=True)
def swiglu(gate: Tensor, up: Tensor, clamped: bool) -> Tensor:
    """Return gate * sigmoid(gate) * up; clamped as in gpt_oss, see `ClampedSwiGLU`.

    Raises:
        ValueError: The two differ in shape or dtype.
    """
    _check_alike(gate, up)
    out = _like(gate)
    if gate.is_cuda:
        from torchtitan_graph.ops.elementwise_kernels import write_swiglu

        write_swiglu(out, gate, up, *_FORM[clamped])
        return out
    gate, up, share = _parts(gate, up, clamped)
    return out.copy_(gate * share * up)


@operator(lambda gradient, gate, up, clamped: (_like(gate), _like(up)))
def swiglu_backward(gradient: Tensor, gate: Tensor, up: Tensor, clamped: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    of_gate, of_up = _like(gate), _like(up)
    if gate.is_cuda:
        from torchtitan_graph.ops.elementwise_kernels import write_swiglu_gradients

        write_swiglu_gradients(of_gate, of_up, gradient, gate, up, *_FORM[clamped])
        return of_gate, of_up
    g, u, share = _parts(gate, up, clamped)
    gradient = gradient.to(g.dtype)
    slope = share * (1 + _FORM[clamped][0] * g * (1 - share))
    of_g, of_u = gradient * u * slope, gradient * g * share
    if clamped:  # clamped values have no gradient
        of_g, of_u = torch.where(gate <= LIMIT, of_g, 0.0), torch.where(up.abs() <= LIMIT, of_u, 0.0)
    return of_gate.copy_(of_g), of_up.copy_(of_u)


def _parts(gate: Tensor, up: Tensor, clamped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gate, its sigmoid, and the factor of both."""
    gate, up = gate.to(_wide(gate)), up.to(_wide(up))
    if not clamped:
        return gate, up, torch.sigmoid(gate)
    gate = gate.clamp(max=LIMIT)
    return gate, up.clamp(-LIMIT, LIMIT) + 1, torch.sigmoid(STEEPNESS * gate)
