"""The numbers of the kernels of rotary positions and SwiGLU, by Triton's interpreter on a CPU."""

import os
from typing import Any

import pytest
import torch

# In the interpreter bf16 is cut off, not rounded.
CLOSE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3}


@pytest.fixture
def kernels() -> Any:
    os.environ["TRITON_INTERPRET"] = "1"  # read where Triton is imported: this process does so only now
    from torchtitan_graph.ops import elementwise_kernels

    return elementwise_kernels


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm().clamp(min=1e-30))  # of what is clamped there is none


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_a_rotation_is_the_cpus(kernels: Any, dtype: torch.dtype, interleaved: bool) -> None:
    """Of heads that lie between others, by tokens or by heads; of more pairs than a program takes at once."""
    from torchtitan_graph.ops.elementwise import rotate

    for B, L, N, H in ((2, 3, 5, 6), (1, 2, 33, 80), (3, 1, 1, 2)):
        wide = torch.randn(B, N, L, H + 4, dtype=torch.float64).to(dtype)
        for x in (wide.transpose(1, 2)[..., 2:-2], wide[..., 4:].transpose(1, 2).contiguous()):
            # In fp32, as the models have them, whatever the dtype.
            angles = torch.randn(1 if L == 2 else B, L, 1, H // 2)
            cos, sin = angles.cos(), angles.sin()
            for back in (False, True):
                out = torch.empty(B, L, N, H, dtype=dtype)
                kernels.write_rotated(out, x, cos, sin, interleaved, back)
                exact = rotate(x.double(), cos.double(), sin.double(), interleaved, back)
                assert off(out, exact) < CLOSE[dtype]
                if H > 2:  # of one pair both ways are one
                    kernels.write_rotated(out, x, cos, sin, not interleaved, back)
                    assert off(out, exact) > 0.1


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_a_gate_is_the_cpus(kernels: Any, dtype: torch.dtype, clamped: bool) -> None:
    from torchtitan_graph.ops.elementwise import _FORM, swiglu, swiglu_backward

    for shape in ((7, 300), (1, 1), (4, 1024)):
        gate, up, gradient = ((torch.randn(shape, dtype=torch.float64) * 6).to(dtype) for _ in range(3))
        if shape[1] > 1:
            gate[0, :4] = torch.tensor([7.0, -7.0, 7.125, -200.0])
            up[0, :4] = torch.tensor([7.0, -7.0, 7.125, -7.125])
        exact = (swiglu(gate.double(), up.double(), clamped),)
        exact += swiglu_backward(gradient.double(), gate.double(), up.double(), clamped)
        for form, is_right in ((_FORM[clamped], True), (_FORM[not clamped], False)):
            out, of_gate, of_up = (torch.empty_like(gate) for _ in range(3))
            kernels.write_swiglu(out, gate, up, *form)
            kernels.write_swiglu_gradients(of_gate, of_up, gradient, gate, up, *form)
            for found, right in zip((out, of_gate, of_up), exact, strict=True):
                far = off(found, right)
                assert far < CLOSE[dtype] if is_right else far > 1e-2 or shape == (1, 1)
