"""With parameters, gradients and the optimizer's state in the host's memory a step keeps its bits, in every layout."""

import dataclasses

import pytest
import torch
from matrix import BF16, DDP2, FP32, FSDP2, ONE, TP2, Cell, bits_that_differ, build_eager, build_graph, train
from torch.fx import GraphModule

from pool import run_on
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Recompute

LANDED = torch.ops.torchtitan_graph.landed.default
PP2 = ParallelDims(pp=2)
GPIPE = (("pipeline_parallel_schedule", "GPipe"),)


def copies_and_differences(cell: Cell) -> tuple[int, list[str]]:
    """Give how many copies to the host a graph has, and what differs from the one without any, and in eager mode."""
    found: list[int] = []

    def count(gm: GraphModule) -> GraphModule:
        found.append(len(gm.graph.find_nodes(op="call_function", target=LANDED)))
        return gm

    expected = train(cell, build_graph(cell))
    away = dataclasses.replace(cell, cpu_offload=True)
    different = bits_that_differ(expected, train(away, build_graph(away, count)))
    if cell.dims.pp == 1:
        different += [f"eager: {name}" for name in bits_that_differ(expected, train(away, build_eager(away)))]
    return sum(found), different


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(Cell(ONE, BF16, "gpt_oss"), id="one", marks=pytest.mark.slow),
        pytest.param(
            Cell(FSDP2, BF16, num_microbatches=2, recompute=Recompute(every=2)), id="FSDP-2", marks=pytest.mark.slow
        ),
        pytest.param(Cell(ParallelDims(dp_shard=2, ep=2), FP32, "deepseek_v3"), id="EP-2", marks=pytest.mark.slow),
        pytest.param(Cell(PP2, BF16, num_microbatches=4, tied=True, pipeline=GPIPE), id="PP-2"),
        pytest.param(Cell(TP2, BF16, "qwen3"), id="TP-2", marks=pytest.mark.slow),
        pytest.param(Cell(DDP2, FP32), id="DDP-2", marks=pytest.mark.slow),
    ],
)
def test_bits(cell: Cell) -> None:
    cell = dataclasses.replace(cell, changes=(("num_layers", 2),), num_steps=2 if cell.num_microbatches == 2 else 1)
    for copies, different in run_on(cell.dims.num_ranks, copies_and_differences, cell):
        assert copies > 0 and different == []
