"""The fused loss on CUDA: what a step launches for it, and what its kernels need of an H100."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import null_gpu
import pytest
import torch
from ranks import run_on
from test_compiled import SHARED, compiled_ones, inspect

from torchtitan_graph.check import matrix
from torchtitan_graph.check.matrix import BF16, FP32, Cell
from torchtitan_graph.ops.fused_loss import fused_cross_entropy
from torchtitan_graph.parallel.layout import ParallelDims

VOCABULARY, IGNORED = 128256, -100  # llama3's
# What the loss launches beside products: ours, and torch's.
OURS, TORCHS = r"kernel (_terms|_gradients) <<<(\d+)x", r"(?i)softmax|nll_loss"


def launched(cell: Cell, build: Any) -> tuple[null_gpu.Counts, int]:
    """Give what the second step launches, for the first one compiles, and how many messages it sends."""
    steps, data = build(cell), matrix.microbatches(cell, matrix.layout_of(cell.dims).data_rank, 1)
    for _ in range(2):
        null_gpu.take(), null_gpu.take_sent()
        steps.train(*data)
    return null_gpu.take(), len(null_gpu.take_sent())


def with_each_loss(cell: Cell) -> list[tuple[str, tuple[null_gpu.Counts, int], tuple[null_gpu.Counts, int]]]:
    """Give, of both modes, what a step launches and sends with the fused loss, and with torch's."""
    return [
        (build.__name__, *(launched(dataclasses.replace(cell, fused_loss=fused), build) for fused in (True, False)))
        for build in (matrix.build_eager, matrix.build_graph)
    ]


@pytest.mark.parametrize("precision", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("dims", [ParallelDims(), ParallelDims(tp=2), ParallelDims(dp_shard=2, tp=2)], ids=str)
def test_a_step_launches_two_kernels_for_the_loss_and_does_not_wait(
    precision: matrix.Precision, dims: ParallelDims
) -> None:
    """For each microbatch; and of a sharded vocabulary sends one message for it, in the place of torch's three."""
    cell = Cell(dims, precision, num_microbatches=2)
    rows = matrix.NUM_ROWS // cell.num_parts * matrix.SEQ_LEN
    for of_rank in run_on(dims.num_ranks, with_each_loss, cell):
        for name, (ours, num_sent), (torchs, num_with_torchs) in of_rank:
            found = {(match[1], int(match[2]), n) for what, n in ours.items() if (match := re.match(OURS, what))}
            assert found == {("_terms", rows, 2), ("_gradients", rows, 2)}
            assert not any(re.search(TORCHS, what) or what.startswith("wait ") for what in ours)
            assert num_with_torchs - num_sent == (2 * 2 if dims.tp > 1 else 0)
            assert dims.tp > 1 or any(re.search(TORCHS, what) for what in torchs)  # the search finds what it should
            null_gpu.tell(f"{name}: {ours.total()} launches and copies, {torchs.total()} with torch's loss")


def test_the_kernels_fit_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = compiled_ones(monkeypatch)
    for dtype in (torch.bfloat16, torch.float32):
        logits_TV = torch.zeros(16, VOCABULARY, dtype=dtype, device="cuda", requires_grad=True)
        fused_cross_entropy(logits_TV, torch.zeros(16, dtype=torch.int64, device="cuda"), IGNORED).backward()
    found = [inspect(kernel, tmp_path) for kernel in kernels]
    for kernel in found:
        null_gpu.tell(str(kernel))
    assert len(found) == 4
    assert all(kernel.shared <= SHARED["H100"] and not kernel.spills for kernel in found)
