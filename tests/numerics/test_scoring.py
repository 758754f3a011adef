"""The scores of labels are those of a plain module in every layout, and the graph's are eager's to the bit."""

import dataclasses
import functools

import pytest
import torch
from matrix import FP64, FSDP2, SEED, TP2, Cell, assemble, build_plain, global_rows, layout_of, microbatches
from torch import Tensor

from pool import run_on
from torchtitan_graph import loss
from torchtitan_graph.data.batch import IGNORE_INDEX
from torchtitan_graph.models.layers.init import initialize
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.steps import build_scoring

CP2 = ParallelDims(cp=2)


def scores(cell: Cell, mode: str) -> Tensor:
    """Return the scores (2, B, L) of this rank's rows."""
    options = cell.options(mode)
    scoring = build_scoring(assemble(cell, dataclasses.replace(options, eval_rows=options.rows)))
    initialize(scoring.model, SEED)
    ((batch,), _) = microbatches(cell, layout_of(cell.dims).data_rank, 1)
    return scoring(batch)


def both(cell: Cell) -> tuple[int, Tensor, Tensor]:
    return layout_of(cell.dims).data_rank, scores(cell, "graph"), scores(cell, "eager")


def with_parts_that_all_begin_at_0(cell: Cell) -> tuple[int, Tensor, Tensor]:
    """A fault: every rank takes its part of the vocabulary for the first."""
    part_of = loss._part_of
    loss._part_of = lambda table: part_of(table)._replace(first=0)
    try:
        return both(cell)
    finally:
        loss._part_of = part_of


@functools.cache
def plain(vocab_size: int, family: str) -> Tensor:
    model = build_plain(Cell(precision=FP64, vocab_size=vocab_size, family=family)).model
    rows = global_rows(vocab_size, 1)
    with torch.no_grad():
        masks = model.masks(rows.documents_BL, rows.positions_BL)
        log_BLV = model(rows.tokens_BL, rows.positions_BL, masks).log_softmax(-1)
    wanted = rows.labels_BL != IGNORE_INDEX
    labels_BL = rows.labels_BL.clamp(min=0)
    of_label = log_BLV.gather(-1, labels_BL[..., None])[..., 0]
    return torch.stack([of_label, (log_BLV.argmax(-1) == labels_BL).double()]) * wanted


def furthest(cell: Cell, run=both) -> float:
    """Return the largest difference of any rank's scores from the plain module's; graph and eager are equal."""
    expected, found = plain(cell.vocab_size, cell.family), 0.0
    for data_rank, graph, eager in run_on(cell.dims.num_ranks, run, cell):
        assert torch.equal(graph, eager)
        found = max(found, float((graph - expected.chunk(cell.dims.data, dim=1)[data_rank]).abs().max()))
    return found


@pytest.mark.parametrize(
    "cell",
    [
        Cell(TP2, FP64),
        pytest.param(Cell(precision=FP64), marks=pytest.mark.slow),
        pytest.param(Cell(FSDP2, FP64), marks=pytest.mark.slow),
        pytest.param(Cell(CP2, FP64), marks=pytest.mark.slow),
        pytest.param(Cell(TP2, FP64, loss_chunks=3), marks=pytest.mark.slow),
        pytest.param(Cell(TP2, FP64, loss_parallel=False), marks=pytest.mark.slow),
        pytest.param(Cell(ParallelDims(dp_shard=2, tp=2), FP64), marks=pytest.mark.slow),
        pytest.param(Cell(ParallelDims(cp=2, tp=2), FP64), marks=pytest.mark.slow),
        pytest.param(Cell(ParallelDims(dp_shard=2, ep=2), FP64, family="deepseek_v3"), marks=pytest.mark.slow),
    ],
)
def test_scores_are_those_of_the_plain_module(cell: Cell) -> None:
    assert furthest(cell) < 1e-12


def test_a_part_of_the_vocabulary_at_the_wrong_place_is_seen() -> None:
    assert furthest(Cell(TP2, FP64), with_parts_that_all_begin_at_0) > 1e-3


def test_layers_that_predict_further_tokens_are_in_no_score() -> None:
    cell = Cell(precision=FP64, family="deepseek_v3", changes=(("num_mtp_layers", 1),))
    ((_, graph, eager),) = run_on(1, both, cell)
    assert torch.equal(graph, eager) and graph.any()


def test_of_equal_logits_the_first_is_the_likeliest() -> None:
    labels_BL = torch.tensor([[1, 2, IGNORE_INDEX]])
    logits_BLV = torch.tensor([0.0, 3.0, 3.0]).expand(1, 3, 3).contiguous()
    _, is_likeliest = loss.score_labels(logits_BLV, labels_BL, torch.ones(()))
    assert is_likeliest.tolist() == [1.0, 0.0, 0.0]
