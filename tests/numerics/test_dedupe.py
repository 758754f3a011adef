"""With equal blocks as calls of one subgraph a step is small, and keeps its bits and its memory, in every layout."""

import dataclasses

import pytest
from matrix import BF16, FSDP2, FSDP2_TP2, ONE, TP2, Cell, bits_that_differ, build_graph, final_graphs, train

from pool import run_on
from torchtitan_graph.analysis.liveness import peak_memory
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Recompute

SHORT, LONG = 3, 5  # layers
CELLS = {"dense": Cell(ONE)}
SLOW = {
    "FSDP-2": Cell(FSDP2, BF16, num_microbatches=2),
    "latent-attention-and-experts": Cell(ONE, family="deepseek_v3"),
    "flex": Cell(ONE, attn="flex"),
    "full": Cell(ONE, BF16, recompute=Recompute(every=1)),
    "experts": Cell(ONE, BF16, "qwen3", "debugmodel_moe"),
    "sinks": Cell(ONE, BF16, "gpt_oss", attn="flex"),
    "chunks": Cell(ONE, BF16, "llama4"),
    "TP-2": Cell(TP2, BF16),
    "FSDP-2-x-TP-2": Cell(FSDP2_TP2, BF16, tied=True),
    "EP-2": Cell(ParallelDims(dp_shard=2, ep=2), BF16, "deepseek_v3"),
    "CP-2": Cell(ParallelDims(cp=2), BF16),
    "PP-2": Cell(ParallelDims(pp=2), num_microbatches=4, pipeline=(("pipeline_parallel_schedule", "1F1B"),)),
}


def of_layers(cell: Cell, num_layers: int, dedupe: bool) -> Cell:
    return dataclasses.replace(cell, changes=(("num_layers", num_layers),), dedupe=dedupe, num_steps=2)


def sizes(cell: Cell) -> tuple[int, int]:
    """Give the nodes and the peak of a cell's step."""
    train = final_graphs(cell)[1].train
    if isinstance(train, TracedResult):
        graphs = [train.gm]
    else:
        graphs = [part.gm for stage in train.values() for part in stage.parts.by_name.values()]
    return sum(len(gm.graph.nodes) for gm in graphs), sum(peak_memory(gm).num_bytes for gm in graphs)


def compare(cell: Cell) -> tuple[list[str], list[tuple[int, int]]]:
    whole, small = of_layers(cell, SHORT, False), of_layers(cell, SHORT, True)
    different = bits_that_differ(train(whole, build_graph(whole)), train(small, build_graph(small)))
    return different, [sizes(of_layers(cell, n, dedupe)) for dedupe in (False, True) for n in (SHORT, LONG)]


@pytest.mark.parametrize("name", [*CELLS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_bits_and_size(name: str) -> None:
    cell = (CELLS | SLOW)[name]
    for different, of in run_on(cell.dims.num_ranks, compare, cell):
        assert different == []
        (short, _), (long, peak), (short_once, _), (long_once, peak_once) = of
        assert 3 * (long_once - short_once) < 2 * (long - short), of  # collectives stay outside
        assert peak_once <= 1.01 * peak, of
