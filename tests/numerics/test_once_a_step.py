"""Weights gathered and gradients reduced once a step, and microbatches in pairs: the graph is FSDP2 with its own
switches, bit for bit, and each layout is one rank's. Under tensor parallelism what is done once is FSDP2's but for
rounding: the terms of a norm's gradient are summed over tp in each microbatch, there after all."""

import faults
import pytest
from matrix import (
    BF16,
    FP32,
    FP64,
    FSDP2,
    FSDP2_TP2,
    HSDP,
    ONE_LAYER,
    Cell,
    bits_that_differ,
    build_graph,
    eager,
    gathered,
    off_one_rank,
    train,
)

from pool import run_on
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.parallel.storage import Reshard

FOUR = {"num_microbatches": 4, "num_steps": 3}
TWO = {"num_microbatches": 2, "num_steps": 3}
MOE = {"family": "qwen3", "flavor": "debugmodel_moe"}
TWO_LAYERS = {"changes": (("num_layers", 2),)}
EP2, EP2_FSDP2, TP2_EP2 = ParallelDims(dp_shard=2, ep=2), ParallelDims(dp_shard=4, ep=2), ParallelDims(tp=2, ep=2)


def slow(*cell, **options):
    return pytest.param(Cell(*cell, **options), marks=pytest.mark.slow)


def differences(cell: Cell, edit=None) -> list[str]:
    return bits_that_differ(eager(cell), train(cell, build_graph(cell, edit)))


def off(cell: Cell) -> list[str]:
    return off_one_rank(cell, gathered(cell, train(cell, build_graph(cell))))


@pytest.mark.parametrize(
    "cell",
    [
        Cell(FSDP2, BF16, once="all", **FOUR, **ONE_LAYER),
        slow(FSDP2, BF16, once="all", **FOUR),
        slow(EP2_FSDP2, BF16, once="experts", **TWO, **MOE),
        slow(EP2, BF16, once="experts", pairs=True, num_microbatches=2, num_steps=2, **MOE, **TWO_LAYERS),
        slow(EP2, BF16, once="experts", pairs=True, recompute=Recompute(every=1), **FOUR, **MOE),
        slow(EP2_FSDP2, once="all", **TWO, **MOE),
        slow(EP2_FSDP2, pairs=True, **TWO, **MOE),
        slow(EP2, BF16, "deepseek_v3", once="experts", pairs=True, **FOUR),
        slow(EP2, BF16, "gpt_oss", once="all", pairs=True, recompute=Recompute(every=1), **FOUR),
        slow(EP2, BF16, "llama4", once="experts", pairs=True, **FOUR),
        slow(TP2_EP2, BF16, pairs=True, **TWO, **MOE),
        slow(EP2_FSDP2, BF16, once="experts", recompute=Recompute(every=1), **TWO, **MOE),
        slow(EP2, BF16, once="experts", **FOUR, **MOE),
        slow(EP2, BF16, "deepseek_v3", once="experts", **FOUR),
        slow(EP2, BF16, "gpt_oss", once="all", **FOUR),
        slow(EP2, BF16, "llama4", once="experts", **FOUR),
        slow(FSDP2, once="all", reshard=Reshard(blocks=True, root=True), **FOUR),
        slow(FSDP2_TP2, BF16, pairs=True, **TWO),
        slow(HSDP, BF16, once="all", **TWO),
        slow(FSDP2, BF16, once="all", capture="dynamo", **FOUR),
        slow(FSDP2, BF16, once="all", lora=(("rank", 4),), **FOUR),
    ],
)
def test_the_graph_is_eager(cell):
    assert run_on(cell.dims.num_ranks, differences, cell) == [[]] * cell.dims.num_ranks


EXPERTS = {"qwen3": MOE, **{name: {"family": name} for name in ("deepseek_v3", "gpt_oss", "llama4")}}
EIGHT_EXPERTS = {"changes": (("num_layers", 2), ("num_experts", 8))}
LAYOUTS = {"EP 2": EP2, "EP 2 x FSDP 2": EP2_FSDP2, "TP 2 x EP 4": ParallelDims(dp_shard=2, tp=2, ep=4)}


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 1], ids=["kept", "recomputed"])
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", EXPERTS)
def test_pairs_of_every_family_are_eager(family, layout, precision, every):
    cell = Cell(
        LAYOUTS[layout], precision, pairs=True, recompute=Recompute(every), **TWO, **EIGHT_EXPERTS, **EXPERTS[family]
    )
    assert run_on(cell.dims.num_ranks, differences, cell) == [[]] * cell.dims.num_ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        slow(FSDP2, FP64, once="all", **FOUR),
        slow(EP2_FSDP2, FP64, once="experts", **TWO, **MOE),
        slow(TP2_EP2, FP64, once="all", **TWO, **MOE),
        slow(FSDP2_TP2, FP64, once="all", **TWO),
        slow(HSDP, FP64, once="all", **TWO),
    ],
)
def test_a_layout_is_one_rank(cell):
    assert run_on(cell.dims.num_ranks, off, cell) == [[]] * cell.dims.num_ranks


@pytest.mark.slow
def test_a_wrong_reduction_is_seen():
    cell = Cell(FSDP2, once="all", **TWO)
    for found in run_on(2, differences, cell, faults.average_one_reduction):
        assert any("gradient" in name for name in found)
