"""Comparison of GPU kernels with their references."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_graph.data.batch import IGNORE_INDEX
from torchtitan_graph.loss import cross_entropy
from torchtitan_graph.models.layers.feed_forward import SwiGLU
from torchtitan_graph.models.layers.masks import begins_of
from torchtitan_graph.models.layers.moe import ClampedSwiGLU
from torchtitan_graph.models.layers.rope import apply_rope, rope_cos_sin
from torchtitan_graph.ops.elementwise import rotate, swiglu
from torchtitan_graph.ops.experts import permuted
from torchtitan_graph.ops.rows import scored_rows, scored_rows_backward
from torchtitan_graph.ops.varlen import segments_of, varlen_attention
from torchtitan_graph.quantize.grouped import grouped_linear
from torchtitan_graph.quantize.products import E4M3, MX, MX_WIDE, ROWWISE, ROWWISE_WIDE, Recipe


def kernels_off(device: str = "cuda") -> Iterator[tuple[str, float]]:
    """Yield each kernel's name, and the relative error of its results and gradients, by the norm: the loss,
    elementwise layers, experts' rows in another order and attention within documents against torch's in fp64; where the
    GPU has them, experts' products in float8 against the emulated ones."""
    torch.manual_seed(0)
    logits_TV, labels_T = torch.randn(512, 50_000, device=device).bfloat16(), torch.arange(512, device=device) * 97
    labels_T[::7] = IGNORE_INDEX
    one = torch.ones((), device=device)
    yield (
        "loss",
        _off(
            lambda x: cross_entropy(x[None], labels_T[None], one),
            lambda x: F.cross_entropy(x.double(), labels_T, ignore_index=IGNORE_INDEX, reduction="sum"),
            logits_TV,
        ),
    )
    cos, sin = rope_cos_sin(torch.arange(512, device=device).expand(2, -1), 64, 10000.0)
    heads_BLNH = torch.randn(2, 8, 512, 64, device=device).bfloat16().transpose(1, 2)
    for interleaved in (False, True):
        yield (
            f"rotation{', interleaved' * interleaved}",
            _off(
                lambda x, pairs=interleaved: rotate(x, cos, sin, pairs, False),
                lambda x, pairs=interleaved: apply_rope(x.double(), cos.double(), sin.double(), interleaved=pairs),
                heads_BLNH,
            ),
        )
    both = [5 * torch.randn(512, 1000, device=device).bfloat16() for _ in range(2)]
    for module in (SwiGLU(), ClampedSwiGLU()):
        kernel = partial(swiglu, clamped=isinstance(module, ClampedSwiGLU))
        yield type(module).__name__, _off(kernel, lambda *x, m=module: m(*(each.double() for each in x)), *both)
    rows_SD, order_S = torch.randn(512, 1000, device=device).bfloat16(), torch.randperm(512, device=device)
    scores_S1 = torch.rand(512, 1, device=device).bfloat16()
    slope_SD = torch.randn_like(rows_SD)  # of the loss: another one for each row, so that their order matters
    yield (
        "rows with scores",
        _off(
            lambda x, s: _Scored.apply(x, s, order_S).float() * slope_SD,  # type: ignore[no-untyped-call]
            lambda x, s: x.double() * s.double() * slope_SD,
            *(rows_SD, scores_S1),
        ),
    )
    yield (
        "sums of rows",  # the gradients of copies
        _off(
            lambda x: permuted(x, order_S, order_S.argsort(), 2).float() * slope_SD,
            lambda x: x.double().index_select(0, order_S // 2) * slope_SD,
            rows_SD[:256].contiguous(),
        ),
    )
    documents_BL = torch.tensor([0] * 300 + [1] + [2] * 211).expand(2, -1)
    segments, mask_BLL = segments_of(begins_of(documents_BL), torch.device(device)), same_and_earlier(documents_BL)
    q_BLNH, k_BLKH, v_BLKH = (torch.randn(2, 512, heads, 64, device=device).bfloat16() for heads in (8, 2, 2))
    yield (
        "varlen attention",
        _off(
            lambda q, k, v: varlen_attention(q, k, v, segments.begins, segments.sizes, segments.places, None, 0.125)[0],
            lambda q, k, v: _attention(q.double(), k.double(), v.double(), mask_BLL.to(device)),
            *(q_BLNH, k_BLKH, v_BLKH),
        ),
    )
    if device != "cuda" or torch.cuda.get_device_capability() < (9, 0):
        return
    ends_E = torch.tensor([100, 100, 421, 512], device=device, dtype=torch.int32)  # the second expert has no row
    x_SD, w_EFD = (torch.randn(shape, device=device).bfloat16() for shape in ((512, 256), (4, 128, 256)))
    of_blocks = (MX, MX_WIDE) if torch.cuda.get_device_capability()[0] == 10 else ()
    for scaling in (ROWWISE, ROWWISE_WIDE, *of_blocks):
        of_kernel, emulated = (partial(_experts, ends_E, Recipe(scaling, E4M3, emulate)) for emulate in (False, True))
        yield f"experts, float8 {scaling}", _off(of_kernel, emulated, x_SD, w_EFD)


def same_and_earlier(documents_BL: Tensor) -> Tensor:
    """Return the mask (B, 1, L, L) of causal attention within documents."""
    same_BLL = documents_BL.unsqueeze(1) == documents_BL.unsqueeze(2)
    return same_BLL.tril().unsqueeze(1)


def _attention(q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, mask_B1LL: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLKH, v_BLKH))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1LL, enable_gqa=True).transpose(1, 2)


class _Scored(torch.autograd.Function):
    """Rows times their scores, which take another order and come back."""

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, scores_S1: Tensor, order_S: Tensor) -> Tensor:
        ctx.save_for_backward(x_SD, scores_S1, order_S)
        return scored_rows(x_SD, scores_S1, order_S).index_select(0, order_S.argsort())

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x_SD, scores_S1, order_S = ctx.saved_tensors
        sent = grad_SD.index_select(0, order_S)
        return *scored_rows_backward(sent, order_S.argsort(), x_SD, scores_S1), None


def _experts(ends_E: Tensor, recipe: Recipe, x_SD: Tensor, w_EFD: Tensor) -> Tensor:
    return grouped_linear(x_SD, w_EFD, ends_E, recipe)[0]


def _off(kernel: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> float:
    ways = []
    for function in (kernel, plain):
        leaves = [x.clone().requires_grad_() for x in inputs]
        result = function(*leaves)
        gradients = torch.autograd.grad(result, leaves, torch.ones_like(result))
        ways.append([x.detach().double().cpu() for x in (result, *gradients)])
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(*ways, strict=True))
