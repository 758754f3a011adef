"""Under context parallelism the graph is eager FSDP2 bit for bit, and both are the plain module on one rank."""

import functools

import faults
import matrix
import pytest
from matrix import (
    BF16,
    FP32,
    FP64,
    ONE_LAYER,
    Seen,
    bits_that_differ,
    build_graph,
    eager,
    gathered,
    off_one_rank,
    patched,
    train,
)

from pool import run_on
from torchtitan_graph.models.layers.moe import AuxiliaryLoss
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Budget, Recompute
from torchtitan_graph.steps import inputs

Cell = functools.partial(matrix.Cell, num_steps=2)
CP2, CP4 = ParallelDims(cp=2), ParallelDims(cp=4)
FSDP_CP, HSDP_CP = ParallelDims(dp_shard=2, cp=2), ParallelDims(dp_replicate=2, cp=2)
CP_TP = ParallelDims(cp=2, tp=2)
FULL, BY_OP = Recompute(every=1), Recompute(by_op=True)
OF_ROWS = AuxiliaryLoss(load_balance=0.1, by_sequence=True)
OF_BATCH = AuxiliaryLoss(load_balance=0.1, router_z=0.01)
FAST = {
    "CP-2-one-layer": Cell(CP2, FP64, **ONE_LAYER),
}
SLOW = {
    "CP-2-deepseek_v3-one-layer": Cell(CP2, FP64, "deepseek_v3", num_microbatches=2, **ONE_LAYER),
    "CP-2": Cell(CP2, FP64),
    "CP-2-deepseek_v3": Cell(CP2, FP64, "deepseek_v3", auxiliary=OF_ROWS, num_microbatches=2),
    "CP-2-x-TP-2-one-layer": Cell(CP_TP, FP64, **ONE_LAYER),
    "CP-2-llama4": Cell(CP2, FP64, "llama4", attn="flex"),
    "CP-2-bf16": Cell(CP2, BF16, recompute=BY_OP),
    "CP-2-x-TP-2-gpt_oss": Cell(CP_TP, FP64, "gpt_oss"),
    "CP-2-flex": Cell(CP2, FP64, attn="flex", tied=True),
    "CP-2-qwen3-moe": Cell(CP2, FP64, "qwen3", flavor="debugmodel_moe", auxiliary=OF_BATCH),
    "CP-2-gpt_oss-flex": Cell(CP2, FP64, "gpt_oss", attn="flex", recompute=BY_OP),
    "CP-2-budget": Cell(CP2, BF16, "qwen3", recompute=Recompute(budget=Budget(0.0))),
    "CP-4": Cell(CP4, FP64, recompute=FULL, num_microbatches=2),
    "CP-4-gpt_oss-bf16": Cell(CP4, BF16, "gpt_oss"),
    "CP-4-llama4": Cell(CP4, FP64, "llama4"),
    "CP-4-deepseek_v3-fp32": Cell(CP4, FP32, "deepseek_v3", recompute=BY_OP),
    "FSDP-2-x-CP-2": Cell(FSDP_CP, FP64, tied=True),
    "FSDP-2-x-CP-2-deepseek_v3": Cell(FSDP_CP, FP64, "deepseek_v3", auxiliary=OF_ROWS),
    "FSDP-2-x-CP-2-qwen3-moe": Cell(FSDP_CP, FP64, "qwen3", flavor="debugmodel_moe", auxiliary=OF_BATCH),
    "FSDP-2-x-CP-2-bf16": Cell(FSDP_CP, BF16, "gpt_oss", recompute=FULL),
    "HSDP-2-x-CP-2": Cell(HSDP_CP, FP64, "gpt_oss", attn="flex"),
    "HSDP-2-x-CP-2-bf16": Cell(HSDP_CP, BF16, "qwen3", recompute=BY_OP),
    "CP-2-x-TP-2": Cell(CP_TP, FP64, recompute=BY_OP),
    "CP-2-x-TP-2-llama4": Cell(CP_TP, FP64, "llama4", attn="flex"),
    "CP-2-x-TP-2-deepseek_v3": Cell(CP_TP, FP64, "deepseek_v3", auxiliary=OF_ROWS),
    "CP-2-x-TP-2-bf16": Cell(CP_TP, BF16, "deepseek_v3"),
}


def both(cell: matrix.Cell) -> tuple[list[str], Seen]:
    found = train(cell, build_graph(cell))
    return bits_that_differ(eager(cell), found), gathered(cell, found) if cell.precision == FP64 else {}


@pytest.mark.parametrize(
    "cell",
    [
        *(pytest.param(cell, id=name) for name, cell in FAST.items()),
        *(pytest.param(cell, id=name, marks=pytest.mark.slow) for name, cell in SLOW.items()),
    ],
)
def test_the_graph_is_eager_and_both_are_one_rank(cell: matrix.Cell) -> None:
    for different, found in run_on(cell.dims.num_ranks, both, cell):
        assert different == []
        assert cell.precision != FP64 or off_one_rank(cell, found) == []


# --- the checks can fail ---------------------------------------------------------------------------------------------


def with_other_places(cell: matrix.Cell) -> tuple[list[str], Seen]:
    """Train with the masks and tokens of another block than the one that keys are put back to."""
    right = inputs.places_of
    with patched(inputs, "places_of", lambda rank, L, degree, device: right(1 - rank, L, degree, device)):
        return [], gathered(cell, train(cell, build_graph(cell)))


def with_a_dropped_sum(cell: matrix.Cell) -> tuple[list[str], Seen]:
    found = train(cell, build_graph(cell, faults.drop_one_sum_of_activations))
    return bits_that_differ(eager(cell), found), gathered(cell, found)


def test_a_block_in_the_wrong_place_is_seen_by_one_rank_in_the_first_loss() -> None:
    for _, found in run_on(2, with_other_places, FAST["CP-2-one-layer"]):
        assert off_one_rank(FAST["CP-2-one-layer"], found)[0].startswith("step 1: loss")


def test_a_gradient_of_keys_that_is_not_summed_is_seen_by_both() -> None:
    for different, found in run_on(2, with_a_dropped_sum, FAST["CP-2-one-layer"]):
        assert different[0].startswith("step 1: gradient of ")
        assert off_one_rank(FAST["CP-2-one-layer"], found)[0].startswith("step 1: gradient of ")
