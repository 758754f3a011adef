"""The fused loss on CUDA: what a step launches for it, and what its kernels need of an H100."""

import re
from pathlib import Path
from typing import Any

import null_gpu
import pytest
import torch
import torch.distributed as dist
import triton
from test_compiled import SHARED, inspect

from torchtitan_graph.check import matrix
from torchtitan_graph.check.matrix import BF16, FP32, Cell
from torchtitan_graph.fused_loss import fused_cross_entropy

VOCABULARY, IGNORED = 128256, -100  # llama3's
# What the loss launches beside products: ours, and torch's.
OURS, TORCHS = r"kernel (_sums|_gradients) <<<(\d+)x", r"(?i)softmax|nll_loss"


def launched(cell: Cell, build: Any) -> null_gpu.Counts:
    """Give what the second step launches: the first one compiles."""
    steps, data = build(cell), matrix.microbatches(cell, 0, 1)
    for _ in range(2):
        null_gpu.take()
        steps.train(*data)
    return null_gpu.take()


@pytest.mark.parametrize("precision", [BF16, FP32], ids=["bf16", "fp32"])
def test_a_step_launches_two_kernels_for_the_loss_and_does_not_wait(
    precision: matrix.Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(matrix, "DEVICE", torch.device("cuda"))
    rows = matrix.NUM_ROWS // 2 * matrix.SEQ_LEN
    for build in (matrix.build_eager, matrix.build_graph):
        cell = Cell(precision=precision, fused_loss=True, num_microbatches=2)
        found = launched(cell, build)
        matching = [(match, number) for name, number in found.items() if (match := re.match(OURS, name))]
        assert {(match[1], int(match[2]), number) for match, number in matching} == {
            ("_sums", rows, 2),
            ("_gradients", rows, 2),
        }
        assert not any(re.search(TORCHS, name) or name.startswith("wait ") for name in found)
        torchs = launched(Cell(precision=precision, num_microbatches=2), build)  # the search finds what it should
        assert any(re.search(TORCHS, name) for name in torchs)
        null_gpu.tell(f"{build.__name__}: {found.total()} launches and copies, {torchs.total()} with torch's loss")


def test_the_kernels_fit_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, plain = [], triton.compile

    def kept(*args: Any, **kwargs: Any) -> Any:
        kernels.append(plain(*args, **kwargs))
        return kernels[-1]

    monkeypatch.setattr("triton.compiler.compile", kept)
    for dtype in (torch.bfloat16, torch.float32):
        logits_TV = torch.zeros(16, VOCABULARY, dtype=dtype, device="cuda", requires_grad=True)
        fused_cross_entropy(logits_TV, torch.zeros(16, dtype=torch.int64, device="cuda"), IGNORED)[0].backward()
    found = [inspect(kernel, tmp_path) for kernel in kernels]
    for kernel in found:
        null_gpu.tell(str(kernel))
    assert len(found) == 4
    assert all(kernel.shared <= SHARED["H100"] and not kernel.spills for kernel in found)
