"""Losses with label smoothing and z-loss, and of the user's own: graph equals eager, and layouts agree; metrics too."""

import dataclasses

import pytest
from matrix import (
    BF16,
    FP64,
    FSDP2,
    ONE,
    ONE_LAYER,
    TP2,
    Cell,
    bits_that_differ,
    build_eager,
    build_graph,
    build_plain,
    far_apart,
    gathered,
    layout_of,
    microbatches,
    train,
)

from pool import run_on
from torchtitan_graph.loss import Regularizers
from torchtitan_graph.parallel.layout import ParallelDims

OWN = {"own_loss": "own_models.losses.focal"}
SMOOTH = {"regularizers": Regularizers(label_smoothing=0.1, z_loss=0.01)}
KINDS = {"own": OWN, "smoothing, z-loss": SMOOTH, "in chunks": {**SMOOTH, "loss_chunks": 3}}
FEW = {"num_steps": 2, **ONE_LAYER}


def whole(cell: Cell):
    return gathered(cell, train(cell, build_graph(cell)))


def plain(cell: Cell):
    return train(cell, build_plain(cell))


def differing_bits(cell: Cell) -> list[str]:
    return bits_that_differ(train(cell, build_eager(cell)), train(cell, build_graph(cell)))


def check(cell: Cell) -> None:
    one = dataclasses.replace(cell, dims=ONE, num_microbatches=1, loss_chunks=1, vocab_size=cell.vocab_size)
    (expected,) = run_on(1, plain, one)
    for found in run_on(cell.dims.num_ranks, whole, cell):
        assert far_apart(expected, found, 1e-12) == []


def cells(dims: ParallelDims, **more):
    return [pytest.param(Cell(dims, **FEW, **kind, **more), id=f"{dims}, {name}") for name, kind in KINDS.items()]


def slow(cells):
    return [pytest.param(*cell.values, id=cell.id, marks=pytest.mark.slow) for cell in cells]


def first_of(cells):
    """Return the cells, all but the first slow."""
    return [cells[0], *slow(cells[1:])]


@pytest.mark.parametrize("cell", [*first_of(cells(FSDP2, precision=BF16)), *slow(cells(TP2))])
def test_the_graph_is_eager(cell: Cell) -> None:
    for differing in run_on(cell.dims.num_ranks, differing_bits, cell):
        assert differing == []


@pytest.mark.parametrize(
    "cell",
    [
        *slow(cells(ONE, precision=FP64, num_microbatches=4)),
        *slow(cells(FSDP2, precision=FP64)),
        *first_of(cells(TP2, precision=FP64)[::-1]),  # in chunks, of a sharded vocabulary
    ],
)
def test_every_layout_computes_the_same(cell: Cell) -> None:
    check(cell)


PP2 = {"num_microbatches": 2, "pipeline": (("pipeline_parallel_schedule", "1F1B"),)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        *cells(ParallelDims(pp=2), precision=FP64, **PP2),
        *cells(ParallelDims(cp=2), precision=FP64),
        *cells(ParallelDims(dp_shard=2, tp=2), precision=FP64),
    ],
)
def test_more_layouts_compute_the_same(cell: Cell) -> None:
    check(cell)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_dynamo_captures_it(kind: str) -> None:
    (differing,) = run_on(1, differing_bits, Cell(capture="dynamo", **FEW, **KINDS[kind]))
    assert differing == []


def test_a_mean_in_place_of_a_sum_differs() -> None:
    with pytest.raises(AssertionError, match="loss"):
        check(Cell(num_microbatches=2, precision=FP64, own_loss="own_models.losses.mean", **FEW))


# --- metrics --------------------------------------------------------------------------------------------------------


def metrics_of(cell: Cell) -> dict[str, float]:
    layout = layout_of(cell.dims)
    output = build_graph(cell).train(*microbatches(cell, layout.data_rank, 1))
    return {name: float(x) for name, x in layout.of_all_stages(dict(output.metrics)).items()}


def metrics_in_eager_mode(cell: Cell) -> dict[str, float]:
    output = build_eager(cell).train(*microbatches(cell, layout_of(cell.dims).data_rank, 1))
    return {name: float(x) for name, x in output.metrics.items()}


BOTH = {"family": "own_models.own_loss", "precision": FP64, **OWN}


@pytest.mark.parametrize(
    ("find", "cell"),
    [
        pytest.param(metrics_of, Cell(num_microbatches=4, **BOTH), marks=pytest.mark.slow),
        (metrics_of, Cell(FSDP2, num_microbatches=2, **BOTH)),
        pytest.param(metrics_in_eager_mode, Cell(FSDP2, **BOTH), marks=pytest.mark.slow),
        pytest.param(metrics_of, Cell(TP2, **BOTH), marks=pytest.mark.slow),
        pytest.param(metrics_of, Cell(ParallelDims(pp=2), **PP2, **BOTH), marks=pytest.mark.slow),
    ],
    ids=["accumulate-4", "FSDP-2-accumulate-2", "eager-FSDP-2", "TP-2", "PP-2"],
)
def test_metrics_are_the_means_of_all_ranks_and_microbatches(find, cell: Cell) -> None:
    """Of a model over all tokens, of a loss over the targets."""
    (batch,), num_tokens = microbatches(Cell(vocab_size=cell.vocab_size), 0, 1)
    model = build_plain(dataclasses.replace(cell, dims=ONE)).model
    logits_BLV = model(batch.tokens_BL, batch.positions_BL, model.masks(batch.documents_BL, batch.positions_BL))
    is_right_BL = logits_BLV.argmax(-1) == batch.labels_BL
    expected = {"token": float(batch.tokens_BL.double().mean()), "accuracy": int(is_right_BL.sum()) / int(num_tokens)}
    assert expected["accuracy"] > 0
    for found in run_on(cell.dims.num_ranks, find, cell):
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_regularizers_show_the_cross_entropy_without_them() -> None:
    (found,) = run_on(1, metrics_of, Cell(precision=FP64, num_microbatches=2, **SMOOTH))
    steps = build_plain(Cell(precision=FP64))
    expected = steps.train(*microbatches(Cell(), 0, 1)).loss
    assert found.keys() == {"cross_entropy", "z_loss"}
    assert found["cross_entropy"] == pytest.approx(float(expected), rel=1e-12) and found["z_loss"] > 0
