"""Products beside what tensor parallel's ranks send: on two ranks every bit is eager's, on more all but rounding."""

import faults
import pytest
from matrix import (
    BF16,
    FP32,
    FP64,
    FSDP2_TP2,
    ONE_LAYER,
    TP2,
    Cell,
    bits_that_differ,
    build_graph,
    eager,
    far_apart,
    train,
)
from torch import Tensor
from torch.distributed.tensor import DTensor

from pool import run_on
from torchtitan_graph.analysis.traffic import is_permutation
from torchtitan_graph.parallel.layout import ParallelDims

TP4 = ParallelDims(tp=4)


def sends_and_differences(cell: Cell, tolerance: float | None, is_broken: bool = False) -> tuple[int, list[str]]:
    """Give how many parts of activations the graph sends one by one, and what differs from eager."""
    sent = []

    def look(gm):
        sent.extend(filter(is_permutation, gm.graph.nodes))
        return faults.forget_a_part(gm) if is_broken else gm

    expected, found = eager(cell), train(cell, build_graph(cell, look))
    if tolerance is None:
        return len(sent), bits_that_differ(expected, found)
    expected, found = ({name: _local(x) for name, x in seen.items()} for seen in (expected, found))
    return len(sent), far_apart(expected, found, tolerance)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(Cell(TP2, FP32, num_steps=2, async_tp=True, **ONE_LAYER), id="llama3-one-layer-fp32"),
        pytest.param(Cell(TP2, FP32, num_steps=2, async_tp=True), id="llama3-fp32", marks=pytest.mark.slow),
        pytest.param(Cell(TP2, BF16, "gpt_oss", num_steps=2, async_tp=True), id="gpt_oss-bf16", marks=pytest.mark.slow),
        pytest.param(
            Cell(TP2, BF16, num_microbatches=8, async_tp=True), id="llama3-bf16-one-row", marks=pytest.mark.slow
        ),
        pytest.param(Cell(TP2, BF16, "qwen3", async_tp=True), id="qwen3-bf16", marks=pytest.mark.slow),
        pytest.param(Cell(TP2, BF16, "deepseek_v3", async_tp=True), id="deepseek_v3-bf16", marks=pytest.mark.slow),
        pytest.param(
            Cell(FSDP2_TP2, BF16, num_microbatches=4, async_tp=True), id="FSDP-2-one-row", marks=pytest.mark.slow
        ),
    ],
)
def test_on_two_ranks_every_bit_is_kept(cell):
    for num_sent, different in run_on(cell.dims.num_ranks, sends_and_differences, cell, None):
        assert num_sent > 0 and different == []


def test_a_part_that_is_not_multiplied_is_found():
    for _, different in run_on(
        2, sends_and_differences, Cell(TP2, FP32, num_steps=1, async_tp=True, **ONE_LAYER), None, True
    ):
        assert different != []


@pytest.mark.slow
def test_on_four_ranks_only_the_order_of_sums_differs():
    cell = Cell(TP4, FP64, vocab_size=512, ffn_dim=132, changes=(("num_heads", 4), ("num_kv_heads", 4)), async_tp=True)
    for num_sent, different in run_on(4, sends_and_differences, cell, 1e-12):
        assert num_sent > 0 and different == []
