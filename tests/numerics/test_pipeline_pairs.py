"""DualPipeV's pairs, forward of one stage beside backward of another in one graph: the bits are those of one after the
other; and with a bound on what is put off, every layout is one rank's."""

import dataclasses
from unittest import mock

import pytest
from matrix import BF16, FP32, FP64, Cell, bits_that_differ, build_graph, gathered, off_one_rank, train

from pool import run_on
from torchtitan_graph.parallel.dispatch import Exchange
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.pipeline import Stage
from torchtitan_graph.parallel.recompute import Budget, Recompute

PAIRS = (("pipeline_parallel_schedule", "DualPipeV"), ("overlap_microbatches", True))
PP2, PP2_EP2 = ParallelDims(pp=2), ParallelDims(pp=2, dp_shard=2, ep=2)
DEEP = {"changes": (("num_layers", 4),), "num_steps": 2, "pipeline": PAIRS}
QWEN = {"family": "qwen3", "flavor": "debugmodel_moe", **DEEP}
FULL = {"recompute": Recompute(every=1)}


def slow(*cell, **options):
    return pytest.param(Cell(*cell, **options), marks=pytest.mark.slow)


def one_after_the_other(cell: Cell) -> Cell:
    return dataclasses.replace(cell, pipeline=PAIRS[:1])


def unlike(cell: Cell) -> list[str]:
    assert cell.schedule().pairs
    return bits_that_differ(*(train(each, build_graph(each)) for each in (one_after_the_other(cell), cell)))


def off(cell: Cell) -> list[str]:
    return off_one_rank(cell, gathered(cell, train(cell, build_graph(cell))))


@pytest.mark.parametrize(
    "cell",
    [
        Cell(PP2, BF16, num_microbatches=8, **DEEP, **FULL),
        slow(PP2_EP2, BF16, num_microbatches=4, **QWEN, **FULL),
        slow(PP2_EP2, BF16, num_microbatches=4, family="deepseek_v3", **DEEP),
        slow(PP2_EP2, BF16, num_microbatches=4, **QWEN, recompute=Recompute(budget=Budget(0.25))),
        slow(PP2_EP2, BF16, num_microbatches=4, family="gpt_oss", **DEEP),
        slow(PP2_EP2, BF16, num_microbatches=4, family="llama4", **DEEP, **FULL),
        slow(dataclasses.replace(PP2_EP2, ep_near=1), BF16, num_microbatches=4, exchange=Exchange(False, True), **QWEN),
        slow(ParallelDims(pp=2, tp=2), BF16, num_microbatches=8, **DEEP),
        slow(PP2, BF16, num_microbatches=8, capture="dynamo", **DEEP),
        slow(PP2, BF16, num_microbatches=8, tied=True, **DEEP),
    ],
)
def test_pairs_are_one_after_the_other_bit_for_bit(cell):
    assert run_on(cell.dims.num_ranks, unlike, cell) == [[]] * cell.dims.num_ranks


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 1], ids=["kept", "recomputed"])
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "gpt_oss", "llama4"])
def test_pairs_of_every_family_are_one_after_the_other(family, precision, every):
    of = QWEN if family == "qwen3" else {"family": family, **DEEP}
    cell = Cell(PP2_EP2, precision, num_microbatches=4, recompute=Recompute(every), **of)
    assert run_on(cell.dims.num_ranks, unlike, cell) == [[]] * cell.dims.num_ranks


@pytest.mark.parametrize(
    "cell", [slow(PP2, FP64, num_microbatches=8, **DEEP, **FULL), slow(PP2_EP2, FP64, num_microbatches=4, **QWEN)]
)
def test_a_layout_is_one_rank(cell):
    assert run_on(cell.dims.num_ranks, off, cell) == [[]] * cell.dims.num_ranks


def with_another_microbatch(cell: Cell) -> list[str]:
    """Return how pairs differ whose forward reads the microbatch before."""
    right, seen = Stage.forward_beside, []

    def wrong(self, i, inputs, *others):
        seen.append(inputs)
        return right(self, i, seen[-2] if len(seen) > 1 else inputs, *others)

    with mock.patch.object(Stage, "forward_beside", wrong):
        found = train(cell, build_graph(cell))
    plain = one_after_the_other(cell)
    return bits_that_differ(train(plain, build_graph(plain)), found)


@pytest.mark.slow
def test_another_microbatch_is_seen():
    assert all(run_on(2, with_another_microbatch, Cell(PP2, BF16, num_microbatches=8, **DEEP)))
