"""The numbers of the kernels of rows in another order, by Triton's interpreter on a CPU."""

import os
from typing import Any

import pytest
import torch

# In the interpreter bf16 is cut off, not rounded.
CLOSE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}


@pytest.fixture
def kernels() -> Any:
    os.environ["TRITON_INTERPRET"] = "1"  # read where Triton is imported: this process does so only now
    from torchtitan_graph.ops import rows_kernels

    return rows_kernels


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_rows_in_another_order_are_the_cpus(kernels: Any, dtype: torch.dtype) -> None:
    """Of rows of one block of a program, and of several; and other orders give others."""
    from torchtitan_graph.ops.rows import scored_rows, scored_rows_backward, sums_of_rows

    for S, U, D in ((6, 9, 40), (4, 2, 5000)):
        rows, grads, scores = (torch.randn(n, D, dtype=torch.float64).to(dtype) for n in (S, U, S))
        scores, order, index = scores[:, :1].contiguous(), torch.randperm(S), torch.randint(U, (S,))
        for place, is_right in ((order, True), (order.roll(1), False)):
            sums, scored = torch.empty(S // 2, D, dtype=dtype), torch.empty_like(rows)
            kernels.write_sums(sums, rows, place, 2)
            kernels.write_scored(scored, rows, scores, place)
            exact = sums_of_rows(rows.double(), order, 2), scored_rows(rows.double(), scores.double(), order)
            assert all((off(a, b) < CLOSE[dtype]) == is_right for a, b in zip((sums, scored), exact, strict=True))
        exact = scored_rows_backward(grads.double(), index, rows.double(), scores.double())
        for place, is_right in ((index, True), ((index + 1) % U, False)):
            of_rows, of_scores = torch.empty_like(rows), torch.empty_like(scores)
            kernels.write_scored_gradients(of_rows, of_scores, grads, place, rows, scores)
            assert all((off(a, b) < CLOSE[dtype]) == is_right for a, b in zip((of_rows, of_scores), exact, strict=True))
