"""The loss on CUDA: what a step launches for it, and what its kernels need of an H100."""

import re
from pathlib import Path
from typing import Any

import null_gpu
import pytest
import torch
import torch.nn.functional as F
from ranks import run_on
from test_compiled import SHARED, compiled_ones, inspect

from torchtitan_graph.check import matrix
from torchtitan_graph.check.matrix import BF16, FP32, Cell
from torchtitan_graph.loss import cross_entropy
from torchtitan_graph.parallel.layout import ParallelDims

VOCABULARY = 128256  # llama3's
# What the loss launches beside products: ours, and torch's.
OURS, TORCHS = r"kernel (_terms|_gradients) <<<(\d+)x", r"(?i)softmax|nll_loss"


def launched(cell: Cell, build: Any) -> tuple[null_gpu.Counts, int]:
    """Give what the second step launches, for the first one compiles, and how many messages it sends."""
    steps, data = build(cell), matrix.microbatches(cell, matrix.layout_of(cell.dims).data_rank, 1)
    for _ in range(2):
        null_gpu.take(), null_gpu.take_sent()
        steps.train(*data)
    return null_gpu.take(), len(null_gpu.take_sent())


def in_both_modes(cell: Cell) -> list[tuple[str, tuple[null_gpu.Counts, int]]]:
    """Give, of both modes, what a step launches and sends."""
    return [(build.__name__, launched(cell, build)) for build in (matrix.build_eager, matrix.build_graph)]


@pytest.mark.parametrize("precision", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("dims", [ParallelDims(), ParallelDims(tp=2), ParallelDims(dp_shard=2, tp=2)], ids=str)
def test_a_step_launches_two_kernels_for_the_loss_and_does_not_wait(
    precision: matrix.Precision, dims: ParallelDims
) -> None:
    """For each microbatch, and for each of two chunks."""
    for chunks in (1, 2):
        cell = Cell(dims, precision, num_microbatches=2, loss_chunks=chunks)
        rows = matrix.NUM_ROWS // cell.num_parts * matrix.SEQ_LEN // chunks
        for of_rank in run_on(dims.num_ranks, in_both_modes, cell):
            for name, (ours, num_sent) in of_rank:
                found = {(match[1], int(match[2]), n) for what, n in ours.items() if (match := re.match(OURS, what))}
                assert found == {("_terms", rows, 2 * chunks), ("_gradients", rows, 2 * chunks)}
                assert not any(re.search(TORCHS, what) or what.startswith("wait ") for what in ours)
                null_gpu.tell(f"{name}: {ours.total()} launches and copies, {num_sent} messages")


def test_torchs_loss_would_be_found() -> None:
    null_gpu.take()
    logits_TV = torch.zeros(16, 8, device="cuda")
    F.cross_entropy(logits_TV, torch.zeros(16, dtype=torch.int64, device="cuda"))
    assert any(re.search(TORCHS, what) for what in null_gpu.take())


def test_the_kernels_fit_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = compiled_ones(monkeypatch)
    for dtype in (torch.bfloat16, torch.float32):
        logits_TV = torch.zeros(16, VOCABULARY, dtype=dtype, device="cuda", requires_grad=True)
        labels_T = torch.zeros(16, dtype=torch.int64, device="cuda")
        cross_entropy(logits_TV[None], labels_T[None], torch.ones((), device="cuda")).backward()
    found = [inspect(kernel, tmp_path) for kernel in kernels]
    for kernel in found:
        null_gpu.tell(str(kernel))
    assert len(found) == 4
    assert all(kernel.shared <= SHARED["H100"] and not kernel.spills for kernel in found)
