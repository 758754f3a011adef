"""With activations in the host's memory from forward to backward a step keeps its bits, in every layout."""

import dataclasses
from unittest.mock import patch

import pytest
from matrix import BF16, FP32, FSDP2, ONE, TP2, Cell, bits_that_differ, build_graph, final_graphs, train

from pool import run_on
from torchtitan_graph.analysis import keeping
from torchtitan_graph.analysis.liveness import host_memory
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.pipeline import StageGraph
from torchtitan_graph.parallel.recompute import Recompute

PP2 = ParallelDims(pp=2)
LAYERS = tuple(f"layers.{i}" for i in range(8))
GPIPE = (("pipeline_parallel_schedule", "GPipe"),)
DUALPIPE = (("pipeline_parallel_schedule", "DualPipeV"), ("overlap_microbatches", True))
EP2 = ParallelDims(dp_shard=2, ep=2)
MOE = {"family": "qwen3", "flavor": "debugmodel_moe"}
ZERO_BUBBLE = (("pipeline_parallel_schedule", "ZBVZeroBubble"),)


def moved_and_differences(cell: Cell) -> tuple[int, list[str]]:
    """Give the bytes that a microbatch has on the host, and what differs from the graph that moves nothing."""
    expected = train(cell, build_graph(cell))
    away = dataclasses.replace(cell, offload=LAYERS)
    with patch.object(keeping, "SMALLEST", 0):  # the model is tiny
        graphs = final_graphs(away)[1].train
        found = train(away, build_graph(away))
    stages = graphs.values() if isinstance(graphs, dict) else [graphs]
    steps = [stage.train if isinstance(stage, StageGraph) else stage for stage in stages]
    return sum(host_memory(step.gm) for step in steps), bits_that_differ(expected, found)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(Cell(FSDP2, BF16, recompute=Recompute(by_op=True), num_microbatches=2), id="FSDP-2-recompute-op"),
        pytest.param(Cell(ParallelDims(dp_shard=2, ep=2), FP32, "deepseek_v3"), id="EP-2", marks=pytest.mark.slow),
        pytest.param(Cell(PP2, BF16, num_microbatches=4, pipeline=GPIPE), id="PP-2", marks=pytest.mark.slow),
        pytest.param(
            Cell(EP2, BF16, pairs=True, once="all", num_microbatches=4, **MOE), id="EP-2-pairs", marks=pytest.mark.slow
        ),
        pytest.param(
            Cell(dataclasses.replace(EP2, pp=2), BF16, pipeline=DUALPIPE, num_microbatches=4, **MOE),
            id="PP-2-EP-2-pairs",
            marks=pytest.mark.slow,
        ),
        pytest.param(Cell(ONE, FP32, "gpt_oss"), id="experts", marks=pytest.mark.slow),
        pytest.param(Cell(TP2, BF16, recompute=Recompute(every=2)), id="TP-2", marks=pytest.mark.slow),
        pytest.param(Cell(PP2, num_microbatches=4, pipeline=ZERO_BUBBLE), id="PP-2-halves", marks=pytest.mark.slow),
    ],
)
def test_bits(cell: Cell) -> None:
    cell = dataclasses.replace(cell, changes=(("num_layers", 8 if cell.pipeline else 4),), num_steps=1)
    for moved, different in run_on(cell.dims.num_ranks, moved_and_differences, cell):
        assert moved > 0 and different == []
