"""Float8 products of groups of rows with a matrix each, as in experts.

Any rank may have any number of rows of a group, or none: nothing here depends on the number. Emulated unless a GPU
scales by rows or their blocks: its kernels support no other scales.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchtitan_graph.ops.blocks import blocked_grouped_mm, blocked_grouped_outer, columns_in_blocks
from torchtitan_graph.ops.experts import grouped_mm, grouped_outer
from torchtitan_graph.ops.float8 import scaled_columns, scaled_grouped_mm, scaled_grouped_outer
from torchtitan_graph.quantize.products import (
    E4M3,
    Recipe,
    by_rows,
    meant,
    over,
    quantize,
    scale_by,
    takes_kernel,
    workspace_of,
)


def grouped_linear(
    x_SD: Tensor,
    weight_EFD: Tensor,
    offsets_E: Tensor,
    recipe: Recipe,
    q: Tensor | None = None,
    scale: Tensor | None = None,
    slot: Tensor | None = None,
    past: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return each group's rows times its own matrix, transposed, (S, F) in x's dtype, and the workspace if it was made
    here.

    With tensorwise scaling, the rows of all groups share one scale, and each matrix has its own: the workspace is (E,
    F, D) and (E,). By rows, or their blocks, each product scales along its inner dim: in the weight's gradient a column
    of a group.

    Args:
        offsets_E: where each group ends.
        q, scale, slot, past: as in `products.linear`.
    """
    x_SD = x_SD.masked_fill(_is_behind(x_SD, offsets_E), 0)  # so that padding is in no scale
    if recipe.by_row:
        return _Rowwise.apply(x_SD, weight_EFD, offsets_E, recipe), None, None
    return _Tensorwise.apply(x_SD, weight_EFD, offsets_E, q, scale, slot, past, recipe)


def _is_behind(x_SD: Tensor, offsets_E: Tensor) -> Tensor:
    """Return which rows are behind the last group (S, 1), for any number of rows."""
    return torch.ones_like(x_SD[:, :1], dtype=offsets_E.dtype).cumsum(0) > offsets_E[-1]


def _largest(x_SD: Tensor) -> Tensor:
    """Return the largest magnitude of any number of rows; 0 for none."""
    return torch.cat([x_SD.abs().amax(-1), x_SD.new_zeros(1)]).amax().float()


class _Tensorwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SD: Tensor,
        weight_EFD: Tensor,
        offsets_E: Tensor,
        q_EFD: Tensor | None,
        scale_E: Tensor | None,
        slot: Tensor | None,
        past: Tensor | None,
        recipe: Recipe,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        w_EFD, w_scale_E, is_made = workspace_of(weight_EFD, q_EFD, scale_E)
        magnitude = _largest(x_SD)
        x_scale = scale_by(past, 0, magnitude, E4M3)
        xq_SD = quantize(x_SD, x_scale, E4M3)
        ctx.recipe, ctx.dtypes = recipe, (x_SD.dtype, weight_EFD.dtype)
        ctx.save_for_backward(xq_SD, x_scale, w_EFD, w_scale_E, magnitude, past, slot, offsets_E)
        y_SF = grouped_mm(xq_SD.float() * x_scale, w_EFD.float() * over(w_scale_E), offsets_E, True).to(x_SD.dtype)
        if not is_made:
            return y_SF, None, None
        ctx.mark_non_differentiable(w_EFD, w_scale_E)
        return y_SF, w_EFD, w_scale_E

    @staticmethod
    def backward(ctx: Any, dy_SF: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        xq_SD, x_scale, w_EFD, w_scale_E, x_magnitude, past, slot, offsets_E = ctx.saved_tensors
        recipe, (x_dtype, w_dtype), dx, dw = ctx.recipe, ctx.dtypes, None, None
        magnitude = _largest(dy_SF)
        dy_scale = scale_by(past, 1, magnitude, recipe.gradient)
        dy = quantize(dy_SF.contiguous(), dy_scale, recipe.gradient).float() * dy_scale
        if ctx.needs_input_grad[0]:
            dx = grouped_mm(dy, w_EFD.float() * over(w_scale_E), offsets_E, False).to(x_dtype)
        if ctx.needs_input_grad[1]:
            dw = grouped_outer(dy, xq_SD.float() * x_scale, offsets_E).to(w_dtype)
        seen = None if slot is None else torch.stack([x_magnitude, magnitude, slot[2]])
        return dx, dw, None, None, None, seen, None, None


class _Rowwise(torch.autograd.Function):
    """Each product has other rows, so each quantises both its operands."""

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, weight_EFD: Tensor, offsets_E: Tensor, recipe: Recipe) -> Tensor:
        ctx.recipe = recipe
        ctx.save_for_backward(x_SD, weight_EFD, offsets_E)
        return _by_rows(x_SD, E4M3, weight_EFD, offsets_E, recipe).to(x_SD.dtype)

    @staticmethod
    def backward(ctx: Any, dy_SF: Tensor) -> tuple[Tensor | None, ...]:
        (x_SD, weight_EFD, offsets_E), recipe, dx, dw = ctx.saved_tensors, ctx.recipe, None, None
        dy_SF = dy_SF.contiguous()
        if ctx.needs_input_grad[0]:
            dx = _by_rows(dy_SF, recipe.gradient, weight_EFD.transpose(1, 2), offsets_E, recipe).to(x_SD.dtype)
        if ctx.needs_input_grad[1] and recipe.is_wide:
            dw = grouped_outer(dy_SF, x_SD.to(dy_SF.dtype), offsets_E).to(weight_EFD.dtype)
        elif ctx.needs_input_grad[1]:
            dw = _by_columns(dy_SF, recipe.gradient, x_SD, offsets_E, recipe).to(weight_EFD.dtype)
        return dx, dw, None, None


def _by_rows(x_SD: Tensor, dtype: torch.dtype, w_EFD: Tensor, offsets_E: Tensor, recipe: Recipe) -> Tensor:
    """Return each group's rows times its own matrix, transposed, each row of both quantised: (S, F)."""
    (xq_SD, x_scale), (wq_EFD, w_scale) = by_rows(x_SD, dtype, recipe), by_rows(w_EFD, E4M3, recipe)
    if not takes_kernel(x_SD.device, recipe):
        return grouped_mm(meant(xq_SD, x_scale), meant(wq_EFD, w_scale), offsets_E, True)
    if recipe.by_block:
        return blocked_grouped_mm(xq_SD, x_scale, wq_EFD, w_scale, offsets_E)
    return scaled_grouped_mm(xq_SD, x_scale.squeeze(-1), wq_EFD, w_scale.squeeze(-1), offsets_E)


def _by_columns(dy_SF: Tensor, dtype: torch.dtype, x_SD: Tensor, offsets_E: Tensor, recipe: Recipe) -> Tensor:
    """Return the sum of outer products of each group's rows, each column of a group quantised: (E, F, D)."""
    columns, outer = scaled_columns, scaled_grouped_outer
    if recipe.by_block:
        columns, outer = columns_in_blocks, blocked_grouped_outer
    dy, x = columns(dy_SF, offsets_E, dtype), columns(x_SD, offsets_E, E4M3)
    return outer(*dy, *x, offsets_E, not takes_kernel(x_SD.device, recipe))
