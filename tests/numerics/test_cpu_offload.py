"""With parameters, gradients and the optimizer's state in the host's memory a step keeps its bits, in every layout."""

import dataclasses

import pytest
import torch
from matrix import BF16, FP32, FSDP2, ONE, TP2, Cell, bits_that_differ, build_eager, build_graph, final_graphs, train

from pool import run_on
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Recompute

OPS = torch.ops.torchtitan_graph
PP2 = ParallelDims(pp=2)
GPIPE = (("pipeline_parallel_schedule", "GPipe"),)


def copies_and_differences(cell: Cell) -> tuple[set[str], list[str]]:
    """Give what copies there are in the graph, and what differs from the one without any; or in eager mode."""
    expected = train(cell, build_graph(cell))
    away = dataclasses.replace(cell, cpu_offload=True)
    graphs = final_graphs(away)[1].train
    steps = [stage.train for stage in graphs.values()] if isinstance(graphs, dict) else [graphs]
    copies = (OPS.reload.default, OPS.landed.default)
    found = {str(node.target) for step in steps for node in step.gm.graph.nodes if node.target in copies}
    different = bits_that_differ(expected, train(away, build_graph(away)))
    if cell.dims.pp == 1:
        different += [f"eager: {name}" for name in bits_that_differ(expected, train(away, build_eager(away)))]
    return found, different


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(Cell(ONE, BF16, "gpt_oss"), id="one"),
        pytest.param(Cell(FSDP2, BF16, num_microbatches=2, recompute=Recompute(every=2)), id="FSDP-2"),
        pytest.param(Cell(ParallelDims(dp_shard=2, ep=2), FP32, "deepseek_v3"), id="EP-2"),
        pytest.param(Cell(PP2, BF16, num_microbatches=4, tied=True, pipeline=GPIPE), id="PP-2"),
        pytest.param(Cell(TP2, BF16, "qwen3"), id="TP-2", marks=pytest.mark.slow),
        pytest.param(Cell(ParallelDims(dp_replicate=2), FP32), id="DDP-2", marks=pytest.mark.slow),
    ],
)
def test_bits(cell: Cell) -> None:
    cell = dataclasses.replace(cell, num_steps=1)
    for copies, different in run_on(cell.dims.num_ranks, copies_and_differences, cell):
        assert len(copies) == 2 and different == []
