"""Rotary positions and SwiGLU on CUDA: what a step launches for them, and what their kernels need of a device."""

import dataclasses
import re
from pathlib import Path

import null_gpu
import pytest
import torch
from ranks import run_on
from test_compiled import SHARED, compiled_ones, inspect
from test_kernels import HEADS
from test_loss import launched

from torchtitan_graph.check import matrix
from torchtitan_graph.check.matrix import BF16, FP32, Cell
from torchtitan_graph.ops.elementwise import rotate, swiglu
from torchtitan_graph.parallel.layout import ParallelDims

NAMES = ("_rotate", "_swiglu", "_swiglu_backward")  # our kernels


def with_and_without(cell: Cell) -> list[tuple[str, null_gpu.Counts, null_gpu.Counts]]:
    """Give, of both modes, what a step launches with the operators, and with torch's."""
    ways = (dataclasses.replace(cell, fused_layers=True), cell)
    builds = (matrix.build_eager, matrix.build_graph)
    return [(build.__name__, *(launched(each, build)[0] for each in ways)) for build in builds]


@pytest.mark.parametrize(
    ("family", "dims", "precision"),
    [
        ("llama3", ParallelDims(), FP32),
        ("llama3", ParallelDims(tp=2), BF16),
        *((family, ParallelDims(), BF16) for family in ("llama4", "deepseek_v3", "gpt_oss")),
    ],
    ids=["llama3-fp32", "llama3-TP-2", "llama4", "deepseek_v3", "gpt_oss"],
)
def test_each_layer_launches_one_kernel_for_each(family: str, dims: ParallelDims, precision: matrix.Precision) -> None:
    """Forward and backward; a graph's backward computes SwiGLU again. None waits, and torch's are gone."""
    cell = Cell(dims, precision, family, attn="flex", changes=HEADS)
    for of_rank in run_on(dims.num_ranks, with_and_without, cell):
        (_, eager, plain), (_, graph, of_graph) = of_rank
        ours = [
            {name: sum(n for what, n in counts.items() if what.startswith(f"kernel {name} <<<")) for name in NAMES}
            for counts in (eager, graph)
        ]
        assert ours[0]["_swiglu"] == ours[0]["_swiglu_backward"] > 0 < ours[0]["_rotate"]
        for name in NAMES:
            assert ours[1][name] >= ours[0][name]
        for counts in (eager, graph):
            waits = {what: n for what, n in counts.items() if what.startswith("wait ")}
            assert waits == {what: n for what, n in plain.items() if what.startswith("wait ")}
            assert not any(re.search(r"(?i)silu", what) for what in counts)
        assert family == "gpt_oss" or any(re.search(r"(?i)silu", what) for what in plain)
        null_gpu.tell(f"{family}: eager {ours[0]}, graph {ours[1]}; {graph.total()} launches, {of_graph.total()} plain")


def test_the_kernels_fit_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = compiled_ones(monkeypatch)
    for dtype in (torch.bfloat16, torch.float32):
        for N, H, interleaved in ((32, 64, False), (128, 128, False), (1, 64, True)):
            x_BLNH = torch.zeros(1, 16, N, H, dtype=dtype, device="cuda", requires_grad=True)
            angles = torch.zeros(1, 16, 1, H // 2, device="cuda")
            rotate(x_BLNH, angles, angles, interleaved, False).sum().backward()
        for clamped in (False, True):
            both = [torch.zeros(16, 8192, dtype=dtype, device="cuda", requires_grad=True) for _ in range(2)]
            swiglu(*both, clamped).sum().backward()
    found = [inspect(kernel, tmp_path) for kernel in kernels]
    for kernel in found:
        null_gpu.tell(str(kernel))
    assert len(found) == 2 * (3 * 2 + 2 * 2)
    assert all(kernel.shared <= SHARED["H100"] and not kernel.spills for kernel in found)
