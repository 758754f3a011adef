"""Products of axes that no other file has: the graph is eager FSDP2 bit for bit, and each is the plain module on one
rank. Of pipelines the second alone: their eager reference is in test_pipeline.py. All ranks send in one order."""

import functools
from unittest.mock import patch

import matrix
import pytest
from matrix import (
    BF16,
    FP64,
    Seen,
    bits_that_differ,
    build_graph,
    eager,
    gathered,
    off_one_rank,
    train,
)
from messages import RECEIVE, SEND, Message, noted, out_of_order

from pool import run_on
from torchtitan_graph.models.layers.moe import AuxiliaryLoss
from torchtitan_graph.optim import clip_grad_norm
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.parallel.storage import Reshard
from torchtitan_graph.steps import build

Cell = functools.partial(matrix.Cell, num_steps=2)
FULL, BY_OP = Recompute(every=1), Recompute(by_op=True)
OF_ROWS = AuxiliaryLoss(load_balance=0.1, by_sequence=True)
OF_BATCH = AuxiliaryLoss(load_balance=0.1, router_z=0.01)
QWEN = {"family": "qwen3", "flavor": "debugmodel_moe"}
MANY = {"changes": (("num_experts", 8),)}


def stages(schedule: str = "1F1B", num_microbatches: int = 4, **other: object) -> dict[str, object]:
    return {"num_microbatches": num_microbatches, "pipeline": (("pipeline_parallel_schedule", schedule),), **other}


PP_EP = Cell(ParallelDims(pp=2, dp_shard=2, ep=2), FP64, "deepseek_v3", **stages(), auxiliary=OF_ROWS)
SLOW = {
    "PP-2-x-EP-2-qwen3": Cell(PP_EP.dims, FP64, **QWEN, **stages("Interleaved1F1B"), auxiliary=OF_BATCH),
    "PP-2-x-EP-2-gpt_oss": Cell(PP_EP.dims, FP64, "gpt_oss", **stages("ZBVZeroBubble"), recompute=FULL),
    "PP-2-x-EP-2-llama4": Cell(PP_EP.dims, FP64, "llama4", attn="flex", **stages("DualPipeV")),
    "PP-2-x-CP-2": Cell(ParallelDims(pp=2, cp=2), FP64, tied=True, **stages(reshard=Reshard(True, True))),
    "PP-2-x-CP-2-gpt_oss": Cell(ParallelDims(pp=2, cp=2), FP64, "gpt_oss", **stages("ZBVZeroBubble"), recompute=BY_OP),
    "PP-2-x-CP-2-llama4": Cell(ParallelDims(pp=2, cp=2), FP64, "llama4", attn="flex", **stages("GPipe")),
    "PP-2-x-CP-2-EP-2": Cell(ParallelDims(pp=2, cp=2, ep=2), FP64, "deepseek_v3", **stages(), auxiliary=OF_ROWS),
    "PP-2-x-TP-2-EP-2": Cell(ParallelDims(pp=2, tp=2, ep=2), FP64, **QWEN, **stages("DualPipeV"), auxiliary=OF_BATCH),
    "PP-2-x-TP-2-deepseek_v3": Cell(ParallelDims(pp=2, tp=2), FP64, "deepseek_v3", **stages(), auxiliary=OF_ROWS),
    # Eight ranks.
    "FSDP-2-x-TP-2-x-CP-2": Cell(ParallelDims(dp_shard=2, cp=2, tp=2), FP64, tied=True),
    "FSDP-2-x-TP-2-x-CP-2-bf16": Cell(ParallelDims(dp_shard=2, cp=2, tp=2), BF16, "gpt_oss", recompute=BY_OP),
    "FSDP-2-x-TP-2-x-CP-2-EP-4": Cell(ParallelDims(dp_shard=2, cp=2, tp=2, ep=4), FP64, **QWEN, **MANY),
    "HSDP-2x2-x-TP-2": Cell(ParallelDims(dp_replicate=2, dp_shard=2, tp=2), FP64, num_microbatches=2),
    "HSDP-2x2-x-TP-2-bf16": Cell(ParallelDims(dp_replicate=2, dp_shard=2, tp=2), BF16, "deepseek_v3"),
    "HSDP-2x4-EP-2": Cell(ParallelDims(dp_replicate=2, dp_shard=4, ep=2), FP64, "gpt_oss", recompute=FULL),
    "HSDP-2x2-x-CP-2": Cell(ParallelDims(dp_replicate=2, dp_shard=2, cp=2), FP64, "llama4", attn="flex"),
    "PP-2-x-FSDP-2-x-TP-2": Cell(ParallelDims(pp=2, dp_shard=2, tp=2), FP64, **stages("ZBVZeroBubble")),
    "PP-2-x-FSDP-2-x-CP-2": Cell(ParallelDims(pp=2, dp_shard=2, cp=2), FP64, "gpt_oss", **stages()),
    "PP-2-x-HSDP-2x2": Cell(ParallelDims(pp=2, dp_replicate=2, dp_shard=2), FP64, **stages(num_microbatches=2)),
    "PP-2-x-FSDP-2-x-TP-2-EP-2": Cell(
        ParallelDims(pp=2, dp_shard=2, tp=2, ep=2, etp=2), FP64, "deepseek_v3", **stages(), auxiliary=OF_ROWS
    ),
}


def both(cell: matrix.Cell) -> tuple[list[str], Seen, list[Message]]:
    steps = build_graph(cell)
    with noted() as sent:
        found = train(cell, steps)
    different = bits_that_differ(eager(cell), found) if cell.dims.pp == 1 else []
    return different, gathered(cell, found) if cell.precision == FP64 else {}, sent


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(PP_EP, id="PP-2-x-FSDP-2-x-EP-2"),
        *(pytest.param(cell, id=name, marks=pytest.mark.slow) for name, cell in SLOW.items()),
    ],
)
def test_the_graph_is_eager_and_both_are_one_rank(cell: matrix.Cell) -> None:
    results = run_on(cell.dims.num_ranks, both, cell, timeout=280)
    for different, found, _ in results:
        assert different == []
        assert cell.precision != FP64 or off_one_rank(cell, found) == []
    check_order(cell, [sent for _, _, sent in results])


def check_order(cell: matrix.Cell, by_rank: list[list[Message]]) -> None:
    assert out_of_order(by_rank) == []
    sizes, dims = {len(m.ranks) for m in by_rank[0]}, cell.dims
    assert {degree for degree in (dims.fsdp, dims.tp, dims.cp, dims.ep, dims.pp) if degree > 1} <= sizes
    assert any(m.kind == RECEIVE for m in by_rank[0]) == (dims.pp > 1)


# --- the check can fail ----------------------------------------------------------------------------------------------


def norm_of_one_stage(cell: matrix.Cell) -> str:
    with patch.object(build, "clip_grad_norm", lambda parameters, max_norm, *_: clip_grad_norm(parameters, max_norm)):
        seen = train(cell, build_graph(cell))
    try:
        gathered(cell, seen)
    except AssertionError as error:
        return str(error)
    return "the stages agree"


@pytest.mark.slow
def test_a_norm_that_is_not_summed_over_the_stages_is_seen() -> None:
    for said in run_on(4, norm_of_one_stage, PP_EP):
        assert said == "step 1: norm differs between stages"


def test_messages_that_do_not_meet_are_named() -> None:
    gather, sum_ = Message("gather", (0, 1), 4), Message("sum", (0, 1), 4)
    sent, received = Message(SEND, (0, 1), 8), Message(RECEIVE, (0, 1), 8)
    back, got_back = Message(SEND, (1, 0), 8), Message(RECEIVE, (1, 0), 8)
    of_others = Message("gather", (0, 2), 4)
    assert out_of_order([[gather, of_others, sent, sum_], [gather, sum_, received], [of_others]]) == []
    assert out_of_order([[gather, sum_], [sum_, gather]]) == ["collectives of (0, 1)"]
    assert out_of_order([[gather, sent], [gather]]) == ["messages between (0, 1)"]
    assert out_of_order([[sent, got_back], [received, back]]) == []
    assert out_of_order([[sent, got_back], [back, received]]) == ["messages between (0, 1)"]
