"""A user's library of operators: one is declared whole, the others say what they are in torch's own words."""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torchtitan_graph.ops.operator import operator


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return dy @ w.t(), x.t() @ dy


@operator(
    lambda x, w: x.new_empty(x.shape[0], w.shape[1]),
    setup=_save,
    backward=_backward,
    namespace="a_users",
    flops=lambda x, w, out_val: 2 * x.shape[0] * w.numel(),
    recompute="costly",
    compiles=False,
    records=True,
)
def declared(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


LIBRARY = torch.library.Library("a_users", "FRAGMENT")


def _define(name: str, schema: str, run, backward, **tags) -> None:
    LIBRARY.define(f"{name}{schema}", **tags)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"a_users::{name}", run, lib=LIBRARY)
    torch.library.register_autograd(f"a_users::{name}", backward, setup_context=_save, lib=LIBRARY)


_ONE, _TWO = "(Tensor x) -> Tensor", "(Tensor x, Tensor w) -> Tensor"
_define("tagged", _ONE, lambda x: x * x, lambda ctx, dy: 2 * dy * ctx.saved_tensors[0], tags=(torch.Tag.pointwise,))
_define("unsaid", _ONE, lambda x: x * x, lambda ctx, dy: 2 * dy * ctx.saved_tensors[0])
_define("counted", _TWO, lambda x, w: x @ w, _backward)


@register_flop_formula([torch.ops.a_users.counted, torch.ops.a_users.tagged])
def _flops(*shapes, out_shape=None, **_) -> int:
    return 2 * shapes[0].numel() * out_shape[-1]
