"""The numbers of the fused loss' kernels, by Triton's interpreter on a CPU."""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

IGNORED = -100


@pytest.fixture
def kernels() -> Any:
    os.environ["TRITON_INTERPRET"] = "1"  # read where Triton is imported: this process does so only now
    from torchtitan_graph import loss_kernels

    return loss_kernels


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_their_numbers_are_torchs(kernels: Any, dtype: torch.dtype) -> None:
    """In the interpreter bf16 is cut off, not rounded."""
    close = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
    for T, V in ((7, 3011), (4, 9000), (2, 2)):
        logits_TV, labels_T = (torch.randn(T, V, dtype=torch.float64) * 3).to(dtype), torch.randint(V, (T,))
        labels_T[1::3] = IGNORED
        wide = torch.promote_types(dtype, torch.float32)
        exact_TV = logits_TV.double().requires_grad_()
        exact_T = F.cross_entropy(exact_TV, labels_T, reduction="none")
        (exact_T.sum() / 3).backward()

        losses_T, *of_rows = kernels.sums(logits_TV, labels_T, IGNORED, wide)
        assert losses_T.dtype == wide and (losses_T - exact_T).abs().max() < min(close, 1e-5) * 10
        dloss, found_TV = torch.tensor(1 / 3, dtype=wide), torch.empty_like(logits_TV)
        kernels.write_gradient(found_TV, logits_TV, labels_T, *of_rows, dloss, IGNORED)
        assert far(found_TV, exact_TV) < close
        wrong_TV = torch.empty_like(logits_TV)
        kernels.write_gradient(wrong_TV, logits_TV, (labels_T + 1) % V, *of_rows, dloss, IGNORED)
        assert far(wrong_TV, exact_TV) > 0.1
        kernels.write_gradient(logits_TV, logits_TV, labels_T, *of_rows, dloss, IGNORED)
        assert torch.equal(logits_TV, found_TV)


def far(found: torch.Tensor, exact: torch.Tensor) -> float:
    assert exact.grad is not None
    return float((found - exact.grad).norm() / exact.grad.norm())


def test_a_label_that_is_no_class_is_no_number(kernels: Any) -> None:
    losses_T, _, _ = kernels.sums(torch.randn(3, 5), torch.tensor([1, 5, -1]), IGNORED, torch.float32)
    assert losses_T.isfinite().tolist() == [True, False, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_least_numbers_and_minus_infinity_are_logits(kernels: Any, dtype: torch.dtype) -> None:
    least, V = torch.finfo(dtype).min, 5000  # more than a program looks at together
    logits_TV = torch.full((3, V), least, dtype=dtype)
    logits_TV[1, : V - 1] = -torch.inf
    logits_TV[2] = -torch.inf
    labels_T = torch.tensor([0, V - 1, 0])
    losses_T, *_ = kernels.sums(logits_TV, labels_T, IGNORED, torch.promote_types(dtype, torch.float32))
    expected_T = F.cross_entropy(logits_TV.double(), labels_T, reduction="none")
    assert expected_T.isfinite().tolist() == [True, True, False]
    torch.testing.assert_close(losses_T.double(), expected_T, rtol=1e-6, atol=0, equal_nan=True)
