"""Frozen parameters and low-rank adapters: the graph is FSDP2's bit for bit, and each layout one rank's."""

import functools

import faults
import pytest
import torch
from matrix import BF16, DDP2, FP64, FSDP2, FSDP2_TP2, ONE, TP2, Cell, bits_that_differ, build_graph, eager, far_apart
from matrix import build_plain, gathered, train

from pool import run_on
from torchtitan_graph.parallel.layout import ParallelDims

LORA = (("rank", 4), ("alpha", 8.0))
FROZEN = ("tok_embeddings", "layers.[01].*", "layers.2.attention.w[qk]")
EP2 = ParallelDims(dp_shard=2, ep=2)


def differences(cell: Cell) -> list[str]:
    return bits_that_differ(eager(cell), train(cell, build_graph(cell)))


@pytest.mark.parametrize("cell", [
    Cell(FSDP2, BF16, freeze=FROZEN), Cell(TP2, BF16, freeze=FROZEN),
    Cell(FSDP2, BF16, lora=LORA), Cell(TP2, BF16, lora=LORA), 
    Cell(FSDP2_TP2, BF16, lora=LORA), Cell(FSDP2_TP2, BF16, freeze=FROZEN),
    Cell(EP2, BF16, "qwen3", "debugmodel_moe", lora=LORA),
    Cell(TP2, BF16, "gpt_oss", lora=LORA),
    Cell(TP2, BF16, "deepseek_v3", lora=LORA),
    Cell(TP2, BF16, "llama4", lora=LORA),
    Cell(ParallelDims(pp=2), BF16, lora=LORA, num_microbatches=2),
])
def test_graph_is_eager(cell):
    assert run_on(cell.dims.num_ranks, differences, cell) == [[]] * cell.dims.num_ranks
