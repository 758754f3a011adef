"""moe.early_scores: the graph is eager's bit for bit, each layout is one rank's, and one rank's is that without it but
for rounding; backward does not compute the last product again."""

import pytest
import torch
from matrix import (
    BF16,
    FP64,
    FSDP2,
    ONE_LAYER,
    Cell,
    bits_that_differ,
    build_graph,
    eager,
    far_apart,
    gathered,
    off_one_rank,
    train,
)

from pool import run_on
from torchtitan_graph.check.matrix import build_plain, final_graphs
from torchtitan_graph.graph import meta
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Recompute

EXCHANGE = torch.ops.torchtitan_graph.exchange.default
PRODUCT = torch.ops.torchtitan_graph.grouped_mm.default
EP2, TP2, TP2_EP2 = ParallelDims(dp_shard=2, ep=2), ParallelDims(tp=2), ParallelDims(tp=2, ep=2)
QWEN = {"family": "qwen3", "flavor": "debugmodel_moe", "early_scores": True, "num_steps": 3}
DEEPSEEK = {"family": "deepseek_v3", "early_scores": True, "num_steps": 3}
FULL = {"recompute": Recompute(every=1)}


def slow(*cell, **options):
    return pytest.param(Cell(*cell, **options), marks=pytest.mark.slow)


def differences(cell: Cell) -> list[str]:
    return bits_that_differ(eager(cell), train(cell, build_graph(cell)))


def off(cell: Cell) -> list[str]:
    return off_one_rank(cell, gathered(cell, train(cell, build_graph(cell))))


def computed_again(cell: Cell) -> tuple[int, int]:
    """Return the number of exchanges of results, and of experts' products, that backward makes again."""
    _, graphs = final_graphs(cell)
    gm = graphs.train.gm  # type: ignore[union-attr]
    again = [node for node in gm.graph.nodes if meta.origin(node) == meta.RECOMPUTED]
    sent = sum(node.target is EXCHANGE and node.args[2] is True for node in again)
    return sent, sum(node.target is PRODUCT for node in again)


@pytest.mark.parametrize(
    "cell",
    [
        Cell(EP2, BF16, **QWEN, **FULL, **ONE_LAYER),
        slow(EP2, BF16, **QWEN, **FULL),
        slow(EP2, BF16, **DEEPSEEK, **FULL),
        slow(TP2, BF16, **QWEN),
        slow(TP2_EP2, BF16, **DEEPSEEK),
        slow(FSDP2, BF16, capture="dynamo", **QWEN),
        slow(EP2, BF16, num_microbatches=4, once="experts", pairs=True, **QWEN, **FULL),
    ],
)
def test_the_graph_is_eager(cell):
    assert run_on(cell.dims.num_ranks, differences, cell) == [[]] * cell.dims.num_ranks


@pytest.mark.parametrize("cell", [slow(dims, FP64, **QWEN) for dims in (EP2, TP2, TP2_EP2)])
def test_a_layout_is_one_rank(cell):
    assert run_on(cell.dims.num_ranks, off, cell) == [[]] * cell.dims.num_ranks


def test_it_is_the_same_sum_but_for_rounding():
    cells = (Cell(precision=FP64, **{**QWEN, **ONE_LAYER, "early_scores": early}) for early in (True, False))
    early, late = (train(cell, build_plain(cell)) for cell in cells)
    assert not far_apart(late, early, 1e-9) and bits_that_differ(late, early), "another order of the same terms"


def test_full_recomputation_sends_no_result_again_and_computes_a_product_less():
    cells = [Cell(EP2, **{**QWEN, **FULL, **ONE_LAYER, "early_scores": early}) for early in (False, True)]
    (late, of_three), (early, of_two) = (run_on(2, computed_again, cell)[0] for cell in cells)
    assert late == early == 0 and 0 < of_two == of_three * 2 // 3
