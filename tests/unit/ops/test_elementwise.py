"""Rotary positions and SwiGLU as operators: the layers' own formulas, up to rounding."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torchtitan_graph.models.layers.feed_forward import SwiGLU
from torchtitan_graph.models.layers.moe import ClampedSwiGLU
from torchtitan_graph.models.layers.rope import Rotation, rope_cos_sin
from torchtitan_graph.ops.elementwise import rotate, swiglu, swiglu_backward

CLOSE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}


def off(module: nn.Module, *inputs: Tensor) -> float:
    """Give how far the operator's result and gradients are from the module's own in fp64, by the norm."""
    module.is_fused = True
    found = with_gradients(module, *inputs)
    module.is_fused = False
    exact = with_gradients(module, *(x.double() for x in inputs))
    assert [x.dtype for x in found] == [inputs[0].dtype] * len(found)
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(i < 2 and x.dim() != 4 or i == 0) for i, x in enumerate(inputs)]
    result = function(*leaves)
    weights = torch.linspace(-1, 2, result.numel(), dtype=torch.float64).view(result.shape).to(result.dtype)
    return [result.detach(), *torch.autograd.grad(result, [x for x in leaves if x.requires_grad], weights)]


def heads(dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Give queries that lie between others, and by heads, as attention gives their gradient."""
    wide = torch.randn(2, 3, 5, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return wide.transpose(1, 2)[..., 2:10]


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_rotation(dtype: torch.dtype, interleaved: bool, rows: int) -> None:
    x_BLNH = heads(dtype)
    positions_BL = torch.tensor([[0, 1, 7, 2, 3], [9, 0, 1, 2, 3]])[:rows]
    cos, sin = rope_cos_sin(positions_BL, 8, 10000.0)
    given = (cos.double(), sin.double()) if dtype == torch.float64 else (cos, sin)
    assert off(Rotation(interleaved=interleaved), x_BLNH, *given) < CLOSE[dtype]
    rotation = Rotation(interleaved=interleaved)
    own = with_gradients(rotation, x_BLNH, *given)
    rotation.is_fused = True
    assert all(map(torch.equal, with_gradients(rotation, x_BLNH, *given), own)), "the bits of the formula"
    turned = rotate(x_BLNH.double(), cos.double(), sin.double(), interleaved, False)
    back = rotate(turned, cos.double(), sin.double(), interleaved, True)
    torch.testing.assert_close(back, x_BLNH.double(), atol=1e-6, rtol=0)  # cosine and sine are fp32's
    assert not torch.allclose(turned, rotate(x_BLNH.double(), cos.double(), sin.double(), not interleaved, False))


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("module", [SwiGLU(), ClampedSwiGLU()])
def test_a_gate(dtype: torch.dtype, module: SwiGLU) -> None:
    gate, up = (heads(dtype, seed).flatten(2) * 5 for seed in (1, 2))
    gate[0, 0, :4] = torch.tensor([7.0, -7.0, 7.125, -200.0])
    up[0, 0, :4] = torch.tensor([7.0, -7.0, 7.125, -7.125])
    assert off(module, gate, up) < CLOSE[dtype]
    other = ClampedSwiGLU() if type(module) is SwiGLU else SwiGLU()
    assert (other(gate, up) - module(gate, up)).double().norm() > 1


def test_learned_angles_get_their_gradient() -> None:
    rotation = Rotation()
    rotation.is_fused = True
    cos, sin = (x.requires_grad_() for x in rope_cos_sin(torch.arange(5).expand(2, 5), 8, 10000.0))
    of_cos, of_sin = torch.autograd.grad(rotation(heads(torch.float32), cos, sin).square().sum(), [cos, sin])
    assert of_cos.any() and of_sin.any()


def test_torch_can_trace_and_differentiate_them() -> None:
    x_BLNH, (cos, sin) = heads(torch.float64), (x.double() for x in rope_cos_sin(torch.arange(5)[None], 8, 1e4))
    gate, up, gradient = (heads(torch.float64, seed) for seed in (1, 2, 3))
    torch.library.opcheck(rotate, (x_BLNH.detach().requires_grad_(), cos, sin, True, False))
    torch.library.opcheck(swiglu, (gate.detach().requires_grad_(), up.detach().requires_grad_(), True))
    torch.library.opcheck(swiglu_backward, (gradient, gate, up, False))
    torch.autograd.gradcheck(lambda x: rotate(x, cos, sin, False, False), x_BLNH.requires_grad_())
    for clamped in (False, True):
        leaves = (gate.detach().requires_grad_(), up.detach().requires_grad_())
        torch.autograd.gradcheck(lambda g, u, clamped=clamped: swiglu(g, u, clamped), leaves)


@pytest.mark.parametrize("module", [SwiGLU(), ClampedSwiGLU()])
def test_halves_that_are_not_alike_are_torchs(module: SwiGLU) -> None:
    """A kernel would read beyond the smaller one."""
    gate, module.is_fused = torch.ones(2, 3), True
    for up in (torch.full((3,), 2.0), gate.double()):
        assert torch.equal(module(gate, up), type(module)()(gate, up)) and module(gate, up).dtype == up.dtype
        for device in ("cpu", "meta"):
            with pytest.raises(ValueError, match="both must be of one shape and dtype"):
                swiglu(gate.to(device), up.to(device), False)
