"""What a trace takes for an operator's strides are those of the device's kernel, and the graph then runs as eager."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.torch_private import fake

aten = torch.ops.aten


def laid_out(shape: tuple[int, ...] = (2, 3, 4, 5)) -> list[Tensor]:
    """Give tensors of one shape: without gaps, two of its dimensions exchanged, with gaps, repeated."""
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1
    exchanged = [x.transpose(i, j).contiguous().transpose(i, j) for i, j in ((1, 2), (1, -1), (0, 1))]
    return [x, *exchanged, x.repeat_interleave(2, -1)[..., ::2], x[:, :1, :1].expand(shape)]


def normed(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(-1, keepdim=True), x.var(-1, keepdim=True)


ONES = torch.ones(5), torch.ones(5)
OTHERS: dict[Any, Any] = {
    aten.elu_backward.default: lambda g, x: (g, 1.0, 1.0, 1.0, False, x),
    aten.hardtanh_backward.default: lambda g, x: (g, x, 0.2, 0.6),
    aten.softplus_backward.default: lambda g, x: (g, x, 1.0, 20.0),
    aten.div.Tensor_mode: lambda g, x: (g, x),
    aten.leaky_relu_backward.default: lambda g, x: (g, x, 0.1, False),
    aten.threshold_backward.default: lambda g, x: (g, x, 0.0),
    aten.rrelu_with_noise_backward.default: lambda g, x: (g, x, x, 0.1, 0.3, False, False),
    aten._prelu_kernel_backward.default: lambda g, x: (g, x, torch.tensor(0.2).expand(x.shape)),
    aten._log_softmax_backward_data.default: lambda g, x: (g, x, -1, torch.float32),
    aten.native_layer_norm_backward.default: lambda g, x: (*(g, x, x.shape[-1:], *normed(x), *ONES), [True] * 3),
    aten.huber_loss_backward.default: lambda g, x: (g, x, g, 0, 1.0),
    aten.smooth_l1_loss_backward.default: lambda g, x: (g, x, g, 0, 1.0),
    aten.mse_loss_backward.default: lambda g, x: (g, x, g, 0),
    aten.soft_margin_loss_backward.default: lambda g, x: (g, x, x.sign(), 0),
    aten.binary_cross_entropy_backward.default: lambda g, x: (g, x, g, None, 0),
    aten.log_sigmoid_backward.default: lambda g, x: (g, x, x),
    aten.log_sigmoid_forward.default: lambda g, x: (x,),
    aten.native_dropout_backward.default: lambda g, x: (g, x > 0.5, 2.0),
    aten.native_batch_norm.default: lambda g, x: (x, None, None, None, None, True, 0.1, 1e-5),
    aten.native_batch_norm_backward.default: lambda g, x: (
        *(g, x, None, None, None, x.mean((0, 2, 3)), x.var((0, 2, 3)), True, 1e-5),
        [True] * 3,
    ),
    aten.batch_norm_backward.default: lambda g, x: (
        *(g, x, torch.ones(3), None, None, x.mean((0, 2, 3)), x.var((0, 2, 3)), True, 1e-5),
        *([True] * 3, torch.empty(0)),
    ),
    aten.channel_shuffle.default: lambda g, x: (x, 3),
    aten.max_unpool2d.default: lambda g, x: (
        *(x, torch.arange(20).view(4, 5).expand(x.shape).clone(memory_format=torch.preserve_format)),
        [8, 10],
    ),
    aten.replication_pad2d_backward.default: lambda g, x: (F.pad(g, (1, 1, 1, 1), "replicate"), x, [1, 1, 1, 1]),
}


def backwards() -> Iterator[Any]:
    """Give the operators of autograd's that take a gradient and one tensor or two, and else have defaults."""
    for name in sorted(n for n in dir(aten) if n.endswith("_backward")):
        for overload in getattr(aten, name).overloads():
            op = getattr(getattr(aten, name), overload)
            needed = [a for a in op._schema.arguments if not a.has_default_value()]
            if 2 <= len(needed) <= 3 and all(str(a.type) == "Tensor" for a in needed) and not op._schema.is_mutable:
                yield op


def by_rule() -> list[Any]:
    return list(dict.fromkeys([*fake._STRIDES, *fake._STRIDES_ON_CPU, *backwards()]))


@pytest.mark.parametrize("op", by_rule(), ids=str)
def test_an_operator_is_laid_out_as_its_kernel_does(op: Any) -> None:
    num = sum(not a.has_default_value() and str(a.type) == "Tensor" for a in op._schema.arguments)
    kwargs = {"rounding_mode": "floor"} if op is aten.div.Tensor_mode else {}
    for g, x in itertools.product(laid_out(), repeat=2):
        args = OTHERS[op](g, x) if op in OTHERS else (g, x, x)[:num]
        try:
            real = op(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            assert op not in OTHERS
            return
        mode = fake.FakeTensorMode()
        with mode:
            made = op(*pytree.tree_map_only(Tensor, mode.from_tensor, args), **kwargs)
        for a, b in zip(pytree.tree_leaves(real), pytree.tree_leaves(made), strict=True):
            if isinstance(a, Tensor) and a.numel() > 1:
                assert (a.shape, a.stride()) == (b.shape, b.stride()), [t.stride() for t in (g, x)]


class Acts(nn.Module):
    """Gives a gradient that lies otherwise than what it is the gradient of."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(3, 3), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x)).transpose(1, 2).contiguous()


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (3,))


@pytest.mark.parametrize(
    "act", [F.softplus, F.elu, F.selu, F.celu, F.hardswish, F.hardtanh, F.relu6, F.hardsigmoid, layer_norm]
)
def test_a_gradient_that_lies_otherwise_is_eagers_bit_for_bit(act: Any) -> None:
    torch.manual_seed(0)
    model, x = Acts(act), torch.randn(2, 4, 3)

    def step(x: Tensor) -> Any:
        loss = model(x).square().sum()
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    run = run_traced(minimal_fx_tracer(step, model)(x), model)
    torch.testing.assert_close(run(x), step(x), rtol=0, atol=0)


def test_a_result_that_lies_as_ever_is_not_copied() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Softplus(), nn.LayerNorm(3))

    def step(x: Tensor) -> Any:
        return torch.autograd.grad(model(x).square().sum(), list(model.parameters()))

    targets = [node.target for node in minimal_fx_tracer(step, model)(torch.randn(4, 3)).gm.graph.nodes]
    assert aten.softplus_backward.default in targets
    assert not {aten.clone.default, aten.empty_strided.default, aten._to_copy.default} & set(targets)
