"""The numbers of the loss' kernels, by Triton's interpreter on a CPU."""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

IGNORED = -100


@pytest.fixture
def kernels() -> Any:
    os.environ["TRITON_INTERPRET"] = "1"  # read where Triton is imported: this process does so only now
    from torchtitan_graph.ops import loss_kernels

    return loss_kernels


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_their_numbers_are_torchs(kernels: Any, dtype: torch.dtype, degree: int) -> None:
    """Of all classes, and of two ranks that have half of them each. In the interpreter bf16 is cut off, not rounded."""
    close = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
    for T, V in ((7, 3012), (4, 9000), (2, 2)):
        logits_TV, labels_T = (torch.randn(T, V, dtype=torch.float64) * 3).to(dtype), torch.randint(V, (T,))
        labels_T[1::3] = IGNORED
        exact_TV = logits_TV.double().requires_grad_()
        exact_T = F.cross_entropy(exact_TV, labels_T, reduction="none")
        (exact_T.sum() / 3).backward()
        of_exact_TV = exact_TV.grad
        assert of_exact_TV is not None

        parts = [x.contiguous() for x in logits_TV.chunk(degree, 1)]
        all_columns = [labels_T - rank * parts[0].shape[1] for rank in range(degree)]
        losses_T, rows = combined(kernels, parts, all_columns, labels_T)
        assert (losses_T - exact_T).abs().max() < min(close, 1e-5) * 10
        wrong_T, _ = combined(kernels, parts, [columns_T + 1 for columns_T in all_columns], labels_T)
        assert (wrong_T - exact_T).abs().max() > 0.1

        for shift in (0, 1):
            found = [torch.empty_like(part) for part in parts]
            for out_TV, part, columns_T in zip(found, parts, all_columns, strict=True):
                kernels.write_gradient(out_TV, part, (columns_T + shift) % V, *rows)
            # A gradient is the difference of two numbers of up to a third, which is what its error goes by.
            far = float((torch.cat(found, 1) - of_exact_TV).norm() / of_exact_TV.norm().clamp(min=1 / 3))
            assert far > 0.1 if shift else far < close
        for part, columns_T in zip(parts, all_columns, strict=True):
            expected_TV = torch.empty_like(part)
            kernels.write_gradient(expected_TV, part, columns_T, *rows)
            kernels.write_gradient(part, part, columns_T, *rows)
            assert torch.equal(part, expected_TV)


def combined(
    kernels: Any, parts: list[torch.Tensor], all_columns: list[torch.Tensor], labels_T: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Give each row's loss, and what backward is given of each row, for a third of their sum."""
    terms_R3T = torch.empty(len(parts), 3, len(labels_T), dtype=torch.promote_types(parts[0].dtype, torch.float32))
    for terms_3T, part, columns_T in zip(terms_R3T, parts, all_columns, strict=True):
        kernels.write_terms(terms_3T, part, columns_T)
    largest_T = terms_R3T[:, 0].amax(0)
    log_T = (terms_R3T[:, 1] * (terms_R3T[:, 0] - largest_T).exp()).sum(0).log()
    is_ignored_T = labels_T == IGNORED
    losses_T = (largest_T - terms_R3T[:, 2].amax(0) + log_T).masked_fill(is_ignored_T, 0.0)
    return losses_T, (largest_T, log_T, torch.where(is_ignored_T, 0.0, torch.full_like(log_T, 1 / 3)))


def test_what_is_not_in_a_rows_columns_is_infinitely_small(kernels: Any) -> None:
    terms_3T, logits_TV = torch.empty(3, 4), torch.randn(4, 5)
    logits_TV[3] = -torch.inf
    kernels.write_terms(terms_3T, logits_TV, torch.tensor([1, 5, -1, 0]))
    assert terms_3T[2].tolist() == [float(logits_TV[0, 1]), *[-torch.inf] * 3]
    assert terms_3T[:2].isfinite().all() and terms_3T[1, 3] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_least_numbers_and_minus_infinity_are_logits(kernels: Any, dtype: torch.dtype) -> None:
    least, V = torch.finfo(dtype).min, 5000  # more than a program looks at together
    logits_TV = torch.full((3, V), least, dtype=dtype)
    logits_TV[1, : V - 1] = -torch.inf
    logits_TV[2] = -torch.inf
    labels_T = torch.tensor([0, V - 1, 0])
    losses_T, _ = combined(kernels, [logits_TV], [labels_T], labels_T)
    expected_T = F.cross_entropy(logits_TV.double(), labels_T, reduction="none")
    assert expected_T.isfinite().tolist() == [True, True, False]
    torch.testing.assert_close(losses_T.double(), expected_T, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("smoothing", "z"), [(0.1, 0.0), (0.0, 0.01), (0.2, 0.01)])
def test_label_smoothing_and_z_loss_are_torchs(kernels: Any, dtype: torch.dtype, smoothing: float, z: float) -> None:
    close = {torch.float64: 1e-14, torch.float32: 2e-6}[dtype]
    for T, V in ((7, 3012), (4, 9000)):
        logits_TV, labels_T = (torch.randn(T, V, dtype=torch.float64) * 3 + 1).to(dtype), torch.randint(V, (T,))
        exact_TV = logits_TV.double().requires_grad_()
        exact = F.cross_entropy(exact_TV, labels_T, reduction="sum", label_smoothing=smoothing)
        (exact + z * exact_TV.logsumexp(1).square().sum()).div(3).backward()
        of_exact_TV = exact_TV.grad
        assert of_exact_TV is not None

        terms_4T = torch.empty(4, T, dtype=dtype)
        kernels.write_terms(terms_4T, logits_TV, labels_T)
        sums_T = logits_TV.double().sum(1)
        assert (terms_4T[3] - sums_T).abs().max() <= 100 * close * logits_TV.abs().sum(1).max()
        rows = terms_4T[0], terms_4T[1].log(), torch.full((T,), 1 / 3, dtype=dtype)
        found_TV = torch.empty_like(logits_TV)
        kernels.write_gradient(found_TV, logits_TV, labels_T, *rows, smoothing, V, z)
        assert float((found_TV - of_exact_TV).norm() / of_exact_TV.norm()) < 10 * close
        kernels.write_gradient(found_TV, logits_TV, labels_T, *rows, smoothing, V // 2, 2 * z)
        assert float((found_TV - of_exact_TV).norm() / of_exact_TV.norm()) > 1e-4
