"""Tokens exchanged by machine, four ranks as machines of one, two and four: exact, the bits are those of the direct
exchange; summed, and in float8, the graph is eager's, and the sums are one rank's."""

import dataclasses

import pytest
import torch
from matrix import (
    BF16,
    FP64,
    Cell,
    bits_that_differ,
    build_eager,
    build_graph,
    eager,
    far_apart,
    gathered,
    off_one_rank,
    patched,
    train,
)

from pool import run_on
from torchtitan_graph.parallel import by_machine
from torchtitan_graph.parallel.dispatch import Exchange
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Recompute

EP4 = ParallelDims(dp_shard=4, ep=4)
TWO, ALONE, ONE = (dataclasses.replace(EP4, ep_near=near) for near in (2, 1, 4))  # ranks of a machine
TP2_EP4 = ParallelDims(dp_shard=2, tp=2, ep=4, ep_near=2)
TP2_ETP2 = ParallelDims(dp_shard=2, tp=2, ep=2, etp=2, ep_near=1)
PP2 = ParallelDims(pp=2, dp_shard=2, ep=2, ep_near=1)
MANY = {"changes": (("num_experts", 8), ("top_k", 3)), "num_steps": 2}
QWEN = {"family": "qwen3", "flavor": "debugmodel_moe", **MANY}
GROUPS = {"changes": (("num_experts", 8), ("num_groups", 4), ("num_chosen_groups", 2)), "num_steps": 2}
DEEPSEEK = {"family": "deepseek_v3", **GROUPS}
PAIR = ParallelDims(dp_shard=2, ep=2, ep_near=1)  # two machines of a rank each
FEW = DEEPSEEK | {"changes": (*GROUPS["changes"], ("num_layers", 2))}  # one is dense
FULL = {"recompute": Recompute(every=1)}
SUMS, FLOAT8 = Exchange(exact=False), Exchange(exact=False, float8=True)


def slow(*cell, **options):
    return pytest.param(Cell(*cell, **options), marks=pytest.mark.slow)


def directly(cell: Cell) -> Cell:
    return dataclasses.replace(cell, dims=dataclasses.replace(cell.dims, ep_near=0))


def unlike_the_direct_exchange(cell: Cell, build=build_graph) -> list[str]:
    return bits_that_differ(*(train(each, build(each)) for each in (cell, directly(cell))))


def unlike_eager(cell: Cell) -> list[str]:
    return bits_that_differ(eager(cell), train(cell, build_graph(cell)))


def off(cell: Cell, build=build_graph) -> list[str]:
    return off_one_rank(cell, gathered(cell, train(cell, build(cell))))


def far_from_direct(cell: Cell, tolerance: float) -> list[str]:
    plain = dataclasses.replace(directly(cell), exchange=Exchange())
    runs = (gathered(each, train(each, build_graph(each))) for each in (plain, cell))
    return far_apart(*({name: x for name, x in seen.items() if name.startswith("step")} for seen in runs), tolerance)


@pytest.mark.parametrize(
    "cell",
    [
        slow(TWO, BF16, **DEEPSEEK, **FULL),
        slow(TWO, BF16, **QWEN),
        slow(ALONE, BF16, **QWEN),
        slow(ONE, BF16, **QWEN),
        slow(TWO, BF16, family="gpt_oss", **MANY),
        slow(TWO, BF16, family="llama4", changes=(("num_experts", 8),), num_steps=2),
        slow(TP2_EP4, BF16, **QWEN),
        slow(TP2_ETP2, BF16, **QWEN),
        slow(PP2, BF16, num_microbatches=2, **QWEN),
        slow(TWO, BF16, capture="dynamo", **QWEN),
        slow(TWO, BF16, num_microbatches=2, once="experts", pairs=True, **QWEN, **FULL),
    ],
)
def test_exact_it_is_the_direct_exchange_bit_for_bit(cell):
    assert run_on(4, unlike_the_direct_exchange, cell) == [[]] * 4


def test_eagerly_it_is_that_bit_for_bit_and_sums_are_those_of_one_rank():
    assert run_on(2, unlike_the_direct_exchange, Cell(PAIR, BF16, **FEW), build_eager) == [[]] * 2
    assert run_on(2, off, Cell(PAIR, FP64, exchange=SUMS, **FEW), build_eager) == [[]] * 2


@pytest.mark.parametrize(
    "cell",
    [
        Cell(PAIR, BF16, **FEW, **FULL),
        slow(TWO, BF16, exchange=FLOAT8, **DEEPSEEK, **FULL),
        slow(TWO, BF16, **QWEN),
        slow(TWO, BF16, exchange=SUMS, **QWEN),
        slow(ALONE, BF16, exchange=SUMS, **QWEN, **FULL),
        slow(ONE, BF16, exchange=SUMS, early_scores=True, **QWEN),
        slow(TWO, BF16, exchange=FLOAT8, family="gpt_oss", **MANY),
        slow(TWO, BF16, exchange=SUMS, family="llama4", changes=(("num_experts", 8),), num_steps=2),
        slow(EP4, BF16, exchange=Exchange(float8=True), **QWEN),
        slow(TP2_EP4, BF16, exchange=FLOAT8, **QWEN, **FULL),
        slow(TP2_ETP2, BF16, exchange=SUMS, **QWEN),
        slow(TWO, BF16, exchange=FLOAT8, num_microbatches=2, once="experts", pairs=True, **QWEN, **FULL),
        slow(TWO, BF16, exchange=FLOAT8, recompute=Recompute(by_op=True), **QWEN),
    ],
)
def test_the_graph_is_eager(cell):
    assert run_on(cell.dims.num_ranks, unlike_eager, cell) == [[]] * cell.dims.num_ranks


@pytest.mark.parametrize(
    "cell",
    [
        slow(TWO, FP64, exchange=SUMS, **DEEPSEEK),
        slow(ALONE, FP64, exchange=SUMS, **QWEN),
        slow(ONE, FP64, exchange=SUMS, **QWEN),
        slow(TWO, FP64, exchange=SUMS, family="gpt_oss", **MANY),
        slow(TP2_EP4, FP64, exchange=SUMS, **QWEN),
        slow(TP2_ETP2, FP64, exchange=SUMS, **QWEN),
        slow(PP2, FP64, exchange=SUMS, num_microbatches=2, **QWEN),
    ],
)
def test_sums_are_those_of_one_rank(cell):
    assert run_on(4, off, cell) == [[]] * 4


def misplaced(cell: Cell) -> list[str]:
    """Return how a run differs from the direct exchange where each slot takes the first of its source's rows."""
    after_begins = torch.ops.torchtitan_graph.after_begins.default
    wrong_places = lambda place, *others: after_begins(place * 0, *others)  # noqa: E731
    with patched(by_machine, "after_begins", wrong_places):
        wrong = train(cell, build_graph(cell))
    return bits_that_differ(wrong, train(directly(cell), build_graph(directly(cell))))


@pytest.mark.slow
def test_a_row_that_is_taken_for_another_is_seen():
    assert all(run_on(4, misplaced, Cell(TWO, BF16, **QWEN)))


@pytest.mark.slow
def test_in_float8_it_is_near():
    cell = Cell(TWO, FP64, exchange=Exchange(float8=True), **{**QWEN, "num_steps": 1})
    near, far = (run_on(4, far_from_direct, cell, tolerance) for tolerance in (0.1, 1e-3))
    assert near == [[]] * 4 and all(far)
