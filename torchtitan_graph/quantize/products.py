"""A linear layer's products in float8, with their scaling and autograd functions.

A number x is stored as q = x / scale in float8, and represents q * scale. The scale brings the largest magnitude of a
tensor, or of each row that a product runs along, to the format's largest: OCP 8-bit Floating Point Specification;
Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433. In MX formats each block of a row has a scale, a power of
two: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf, section 6.3.

Arguments and results of the autograd functions are tensors and plain values only: no module, no cache. So every tracer
and torch.compile can trace them, and recomputation has the same result.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_graph.errors import UserError
from torchtitan_graph.ops.blocks import BLOCK, of_blocks, scaled_blocks
from torchtitan_graph.ops.float8 import scaled_rows
from torchtitan_graph.torch_private.tensors import scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TENSORWISE, DELAYED, ROWWISE, ROWWISE_WIDE = "tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp"
MX, MX_WIDE = "mxfp8", "mxfp8_wgrad_with_hp"
SCALINGS = (TENSORWISE, DELAYED, ROWWISE, ROWWISE_WIDE, MX, MX_WIDE)


class Recipe(NamedTuple):
    """A layer's quantization: plain values.

    scaling   a name above: one scale for a tensor, from its own largest magnitude or, delayed, from those of earlier
              steps (weights: always their own); or one for each row, or, in MX formats, for each block of a row, and
              then perhaps the weight's gradient in full precision
    gradient  the format of gradients; activations and weights are E4M3
    emulate   multiply the dequantized numbers in fp32, on a GPU too
    is_traced_for_gpu  use a GPU's kernel on any device: for a dry run, where nothing runs
    """

    scaling: str = TENSORWISE
    gradient: torch.dtype = E5M2
    emulate: bool = False
    is_traced_for_gpu: bool = False

    @property
    def by_row(self) -> bool:
        """Whether scales are of rows, or of blocks of them: each product has other rows, and quantises its operands."""
        return self.scaling in (ROWWISE, ROWWISE_WIDE, MX, MX_WIDE)

    @property
    def by_block(self) -> bool:
        """Whether scales are of blocks of rows: an MX format."""
        return self.scaling in (MX, MX_WIDE)

    @property
    def is_wide(self) -> bool:
        """Whether the weight's gradient is in full precision."""
        return self.scaling in (ROWWISE_WIDE, MX_WIDE)


def multiple_for(recipe: Recipe) -> int:
    """Return the multiple that both sizes of a linear layer must be of: a kernel's unit, or in MX formats a block."""
    return BLOCK if recipe.by_block else 16


def largest(x: Tensor, by_row: bool = False) -> Tensor:
    """Return the largest magnitude, fp32: a scalar, or (..., 1) of rows; 0 for an empty tensor."""
    if not x.numel():
        return x.new_zeros((*x.shape[:-1], 1) if by_row else (), dtype=torch.float32)
    return (x.abs().amax(-1, keepdim=True) if by_row else x.abs().amax()).float()


def scale_for(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale that maps a magnitude to the format's largest number; positive for zeros too."""
    return magnitude.clamp(min=1e-12) / torch.finfo(dtype).max


def scale_by(past: Tensor | None, i: int, magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale of earlier steps' magnitudes, where there are any; else of the magnitude itself."""
    if past is not None:
        # Non-finite values use their own scale: saturated, they would not reach the loss, and the next step would scale
        # by them.
        magnitude = torch.where((past[i] > 0) & magnitude.isfinite(), past[i], magnitude)
    return scale_for(magnitude, dtype)


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide by the scale, and round to the format; larger values are clamped to its largest number."""
    limit = torch.finfo(dtype).max  # a cast alone gives inf in e5m2, in e4m3 it depends on the device
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


def by_rows(x: Tensor, dtype: torch.dtype, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Quantise a matrix by rows or blocks, as the recipe says; return the scales too."""
    return scaled_blocks(x, dtype) if recipe.by_block else scaled_rows(x, dtype)


def meant(q: Tensor, scale: Tensor) -> Tensor:
    """Return dequantized numbers, fp32; the scale is a scalar, (..., rows, 1) or (..., rows, blocks)."""
    return of_blocks(q, scale) if scale.dim() and scale.shape[-1] > 1 else q.float() * scale


def largest_of_weight(weight: Tensor) -> Tensor:
    """Return the largest magnitude of a weight, fp32: a scalar, or one for each of experts (E, F, D)."""
    return largest(weight) if weight.dim() == 2 else weight.abs().amax((1, 2)).float()


def over(scale: Tensor) -> Tensor:
    """Return a weight's scale, or scales, in a shape that broadcasts over it."""
    return scale if scale.dim() == 0 else scale[:, None, None]


def workspace_of(weight: Tensor, q: Tensor | None, scale: Tensor | None) -> tuple[Tensor, Tensor, bool]:
    """Return a weight's workspace, its quantised form and the scale (one for each expert), and whether it was made
    here.

    A given one is used (hit): its owner refreshes it when the weight changes. Without one (miss), or with one of
    another shape, format, kind of scale or device (invalid), it is computed from the weight.
    """
    if q is not None and scale is not None:
        found = (q.shape, q.dtype, q.device, scale.shape, scale.dtype, scale.device)
        if found == (weight.shape, E4M3, weight.device, weight.shape[:-2], torch.float32, weight.device):
            return q, scale, False
    made = scale_for(largest_of_weight(weight), E4M3)
    return quantize(weight, over(made), E4M3), made, True


def takes_kernel(device: torch.device, recipe: Recipe) -> bool:
    """Return whether products use a GPU's own kernel."""
    return (device.type == "cuda" or recipe.is_traced_for_gpu) and not recipe.emulate


def product(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype, recipe: Recipe) -> Tensor:
    """Return a (M, K) times b (N, K), transposed: (M, N); scales are scalars, (M, 1) and (N, 1), or of blocks.

    Emulated, and on a CPU always, in fp32: bitwise the result of a CPU's own `_scaled_mm`, which is slow.
    """
    if takes_kernel(a.device, recipe):
        return scaled_mm(a, scale_a, b, scale_b, dtype)
    with as_written(a):
        return (meant(a, scale_a) @ meant(b, scale_b).t()).to(dtype)


class QuantizedInput(NamedTuple):
    """The quantised input x (..., D) of linear layers: its rows, their scales, and (not by rows) the magnitude."""

    q_TD: Tensor
    scale: Tensor
    magnitude: Tensor | None = None


def quantize_input(x: Tensor, recipe: Recipe, past: Tensor | None = None) -> QuantizedInput:
    """Quantise the input of linear layers, without gradient; `past` is as in `linear`."""
    x_TD = _rows(as_autocast(x.detach()))
    if recipe.by_row:
        return QuantizedInput(*by_rows(x_TD, E4M3, recipe))
    magnitude = largest(x_TD)
    scale = scale_by(past, 0, magnitude, E4M3)
    return QuantizedInput(quantize(x_TD, scale, E4M3), scale, magnitude)


def linear(
    x: Tensor,
    weight: Tensor,
    recipe: Recipe,
    q: Tensor | None = None,
    scale: Tensor | None = None,
    slot: Tensor | None = None,
    past: Tensor | None = None,
    given: QuantizedInput | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return x (..., D) times the weight (F, D), transposed, (..., F) in x's dtype, and the workspace if it was made
    here (see `workspace_of`; scaling by rows has none).

    Args:
        q, scale: the weight's workspace.
        slot, past: with delayed scaling. The gradient of `slot`, which is 0, 0, 1, is set to the largest magnitudes of
            activations and of the result's gradient, and 1. So they leave a step as values, once even if the layer is
            recomputed; where gradients are added, the third is their number. `past` (2,) are the magnitudes to scale
            by, 0 where there are none yet.
        given: x quantised, where other layers read it too.
    """
    if not x.is_floating_point():
        raise UserError(f"a quantised layer is given {x.dtype}: must be floating point")
    x = as_autocast(x)
    x_TD, read = _rows(x), given or quantize_input(x, recipe, past)
    if recipe.by_row:
        y_TF, made = _Rowwise.apply(x_TD, weight, read.q_TD, read.scale, recipe), (None, None)
    else:
        y_TF, *made = _Tensorwise.apply(x_TD, weight, *read, q, scale, slot, past, recipe)
    return y_TF.view(*x.shape[:-1], weight.shape[0]), *made


def as_autocast(x: Tensor) -> Tensor:
    """Cast a layer's input as `torch.autocast` does for other layers, if it is on."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if _is_autocast_on(x) else x


def as_written(x: Tensor) -> contextlib.AbstractContextManager:
    """Disable `torch.autocast` for emulated products, which are in fp32."""
    return torch.autocast(x.device.type, enabled=False) if _is_autocast_on(x) else contextlib.nullcontext()


def _is_autocast_on(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def _rows(x: Tensor) -> Tensor:
    """Return (..., D) as rows (T, D); one vector is one row."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


class _Tensorwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_FD: Tensor,
        xq_TD: Tensor,
        x_scale: Tensor,
        magnitude: Tensor,
        q_FD: Tensor | None,
        scale: Tensor | None,
        slot: Tensor | None,
        past: Tensor | None,
        recipe: Recipe,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        w_FD, w_scale, is_made = workspace_of(weight_FD, q_FD, scale)
        ctx.recipe, ctx.dtypes = recipe, (x_TD.dtype, weight_FD.dtype)
        ctx.save_for_backward(xq_TD, x_scale, w_FD, w_scale, magnitude, past, slot)
        y_TF = product(xq_TD, x_scale, w_FD, w_scale, x_TD.dtype, recipe)
        if not is_made:
            return y_TF, None, None
        ctx.mark_non_differentiable(w_FD, w_scale)
        return y_TF, w_FD, w_scale

    @staticmethod
    def backward(ctx: Any, dy_TF: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        xq_TD, x_scale, w_FD, w_scale, x_magnitude, past, slot = ctx.saved_tensors
        recipe, (x_dtype, w_dtype), dx, dw = ctx.recipe, ctx.dtypes, None, None
        magnitude = largest(dy_TF)
        dy_scale = scale_by(past, 1, magnitude, recipe.gradient)
        dyq_TF = quantize(dy_TF, dy_scale, recipe.gradient)
        if ctx.needs_input_grad[0]:
            dx = product(dyq_TF, dy_scale, w_FD.t(), w_scale, x_dtype, recipe)
        if ctx.needs_input_grad[1]:
            dw = product(dyq_TF.t(), dy_scale, xq_TD.t(), x_scale, w_dtype, recipe)
        seen = None if slot is None else torch.stack([x_magnitude, magnitude, slot[2]])
        return dx, dw, None, None, None, None, None, seen, None, None


class _Rowwise(torch.autograd.Function):
    """Each product has other rows, so each quantises both its operands."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_FD: Tensor, xq_TD: Tensor, x_scale: Tensor, recipe: Recipe) -> Tensor:
        ctx.recipe = recipe
        ctx.save_for_backward(x_TD, weight_FD)
        return product(xq_TD, x_scale, *by_rows(weight_FD, E4M3, recipe), x_TD.dtype, recipe)

    @staticmethod
    def backward(ctx: Any, dy_TF: Tensor) -> tuple[Tensor | None, ...]:
        (x_TD, weight_FD), recipe, dx, dw = ctx.saved_tensors, ctx.recipe, None, None
        if ctx.needs_input_grad[0]:
            dx = _product_by_row(dy_TF, recipe.gradient, weight_FD.t(), E4M3, x_TD.dtype, recipe)
        if ctx.needs_input_grad[1] and recipe.is_wide:
            with as_written(x_TD):
                dw = (dy_TF.t() @ x_TD).to(weight_FD.dtype)
        elif ctx.needs_input_grad[1]:
            dw = _product_by_row(dy_TF.t(), recipe.gradient, x_TD.t(), E4M3, weight_FD.dtype, recipe)
        return dx, dw, None, None, None


def _product_by_row(
    a: Tensor, a_dtype: torch.dtype, b: Tensor, b_dtype: torch.dtype, dtype: torch.dtype, recipe: Recipe
) -> Tensor:
    return product(*by_rows(a, a_dtype, recipe), *by_rows(b, b_dtype, recipe), dtype, recipe)
