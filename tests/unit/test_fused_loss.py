"""The fused loss: torch's cross entropy up to rounding, and the same bits in the logits' memory as in its own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_graph.check import kernels
from torchtitan_graph.fused_loss import (
    fused_cross_entropy,
    fused_cross_entropy_backward,
    fused_cross_entropy_backward_,
)

IGNORED = -100
# Of the sum in fp32 or fp64, relative; and of the gradient, which is rounded to the logits' dtype.
CLOSE = {torch.float64: (1e-14, 1e-14), torch.float32: (1e-6, 1e-6), torch.bfloat16: (1e-6, 3e-3)}


def inputs(T: int, V: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels_T = torch.randint(V, (T,), generator=generator)
    labels_T[1::3] = IGNORED
    return (torch.randn(T, V, generator=generator) * 3).to(dtype), labels_T


def errors(found: tuple[Tensor, Tensor], logits_TV: Tensor, labels_T: Tensor) -> tuple[float, float]:
    """Give how far a sum and a third of its gradient are from torch's in fp64."""
    exact_TV = logits_TV.double().requires_grad_()
    exact = F.cross_entropy(exact_TV, labels_T, reduction="sum")
    (exact / 3).backward()
    pairs = zip(found, (exact.detach(), exact_TV.grad), strict=True)
    return tuple(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)  # type: ignore[union-attr, return-value]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("T", "V"), [(1000, 509), (77, 3011), (1, 2)])
def test_numbers(T: int, V: int, dtype: torch.dtype) -> None:
    logits_TV, labels_T = inputs(T, V, dtype)
    logits_TV.requires_grad_()
    loss, largest_T, log_T = fused_cross_entropy(logits_TV, labels_T, IGNORED)
    (gradient_TV,) = torch.autograd.grad(loss / 3, [logits_TV])
    assert loss.dtype == torch.promote_types(dtype, torch.float32) and gradient_TV.dtype == dtype
    far = errors((loss.detach(), gradient_TV), logits_TV.detach(), labels_T)
    assert all(x <= bound for x, bound in zip(far, CLOSE[dtype], strict=True)), far
    other_T = labels_T.roll(1) if T > 1 else 1 - labels_T
    assert min(errors((loss.detach(), gradient_TV), logits_TV.detach(), other_T)) > 0.001

    dloss = torch.tensor(1 / 3, dtype=loss.dtype)
    given = logits_TV.detach().clone()
    written = fused_cross_entropy_backward_(given, labels_T, largest_T, log_T, dloss, IGNORED)
    assert written.data_ptr() == given.data_ptr()
    apart = fused_cross_entropy_backward(logits_TV.detach(), labels_T, largest_T, log_T, dloss, IGNORED)
    assert torch.equal(written, apart)


def test_the_ignored_label_may_be_a_class() -> None:
    logits_TV, labels_T = inputs(40, 5, torch.float32)
    labels_T = labels_T.clamp(min=0)
    expected = F.cross_entropy(logits_TV, labels_T, reduction="sum", ignore_index=0)
    torch.testing.assert_close(fused_cross_entropy(logits_TV, labels_T, 0)[0], expected)


def test_a_label_that_is_no_class_is_refused() -> None:
    for label in (-5, 7):
        with pytest.raises((IndexError, RuntimeError)):
            fused_cross_entropy(torch.zeros(2, 7), torch.tensor([1, label]), IGNORED)


def test_torch_can_trace_and_differentiate_it() -> None:
    logits_TV, labels_T = inputs(7, 11, torch.float32)
    torch.library.opcheck(fused_cross_entropy, (logits_TV.requires_grad_(), labels_T, IGNORED))


def test_a_kernel_that_is_off_is_found_by_what_check_gpu_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    (name, off), (_, of_attention) = kernels.kernels_off("cpu")
    assert name == "fused loss" and off < 1e-6 and of_attention < 1e-2
    loss = kernels.fused_cross_entropy
    monkeypatch.setattr(kernels, "fused_cross_entropy", lambda *args: 1.05 * loss(*args))
    off = dict(kernels.kernels_off("cpu"))[name]
    assert 0.04 < off < 0.06
