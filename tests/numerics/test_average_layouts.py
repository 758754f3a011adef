"""The moving average of the weights is that of one rank in every layout, and that of eager mode bit for bit."""

import dataclasses

import pytest
import torch
from matrix import (
    FP32,
    FP64,
    FSDP2,
    ONE,
    ONE_LAYER,
    TP2,
    Cell,
    Precision,
    Seen,
    bits_that_differ,
    build_eager,
    build_graph,
    far_apart,
    gathered,
    train,
)

from pool import run_on
from torchtitan_graph.config import job
from torchtitan_graph.optim import Average, build_lr_scheduler, build_optimizer
from torchtitan_graph.parallel.layout import ParallelDims

DECAY = 0.5
LAYOUTS = {"FSDP-2": FSDP2, "TP-2": TP2, "PP-2": ParallelDims(pp=2), "FSDP-2 x TP-2": ParallelDims(dp_shard=2, tp=2)}
FAST = ("FSDP-2",)


def averaged(cell: Cell, mode: str = "graph", decay: float = DECAY) -> Seen:
    """Train with a moving average, which is in fp32 in every layout, and return it as weights."""
    steps = build_eager(cell) if mode == "eager" else build_graph(cell)
    config = job.Optimizer(lr=1e-2, ema_decay=decay)
    optimizer = build_optimizer(steps.model, config, in_part=cell.dims.pp > 1)
    schedule = build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=2), cell.num_steps)
    average = Average(optimizer, decay)
    average.begin()
    after_step = steps.model.after_step

    def also_average(state: Seen) -> None:
        after_step(state)
        average.update()

    steps.model.after_step = also_average  # type: ignore[method-assign]
    train(cell, steps, using=(optimizer, schedule), in_graph=mode == "optimizer in the graph")
    with average.in_place_of_weights():
        return {name: p.detach().clone() for name, p in steps.model.named_parameters()}


def whole(cell: Cell, decay: float = DECAY) -> Seen:
    return gathered(cell, averaged(cell, decay=decay))


def modes_that_differ(cell: Cell) -> list[str]:
    eager = averaged(cell, "eager") if cell.dims.pp == 1 else averaged(cell)
    return [x for mode in ("graph", "optimizer in the graph") for x in bits_that_differ(eager, averaged(cell, mode))]


def cell_of(layout: str, precision: Precision) -> Cell:
    few = ONE_LAYER if LAYOUTS[layout].pp == 1 else {}
    return Cell(LAYOUTS[layout], precision, num_microbatches=4 // LAYOUTS[layout].data, vocab_size=510, **few)


EACH = pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[] if layout in FAST else [pytest.mark.slow]) for layout in LAYOUTS]
)


@EACH
def test_modes_agree(layout: str) -> None:
    dims = LAYOUTS[layout]
    assert run_on(dims.num_ranks, modes_that_differ, cell_of(layout, FP32)) == [[]] * dims.num_ranks


@pytest.mark.slow
@EACH
def test_each_layout_is_one_rank(layout: str) -> None:
    cell = cell_of(layout, FP64)
    alone = dataclasses.replace(cell, dims=ONE, num_microbatches=4)
    ((expected,), (other,)) = run_on(1, whole, alone), run_on(1, whole, alone, 0.6)
    for found in run_on(cell.dims.num_ranks, whole, cell):
        assert far_apart(expected, found, 1e-12) == []
        assert len(far_apart(other, found, 1e-12)) == len(found)  # the check can fail
        assert all(x.dtype == torch.float64 for x in found.values())
