"""Steps of the user's, DPO and distillation among them: graph equals eager, and layouts agree."""

import pytest
from matrix import (
    BF16,
    FP64,
    FSDP2,
    FSDP2_TP2,
    LAYOUTS,
    ONE,
    TP2,
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

LORA = (("rank", 4), ("alpha", 8.0))
DPO, DISTILLATION = "torchtitan_graph.goals.dpo", "torchtitan_graph.goals.distillation"
KINDS = {
    "DPO, adapters": {"own_step": DPO, "lora": LORA, "step_options": (("label_smoothing", 0.1),)},
    "DPO, reference": {"own_step": DPO, "reference": ()},
    "distillation": {
        "own_step": DISTILLATION,
        "reference": (("family", "qwen3"), ("dim", 96), ("num_layers", 4)),
        "step_options": (("temperature", 2.0),),
    },
}
CP2 = ParallelDims(cp=2)


def differences(cell: Cell) -> list[str]:
    return bits_that_differ(eager(cell), train(cell, build_graph(cell)))


def off(cell: Cell) -> list[str]:
    return off_one_rank(cell, gathered(cell, train(cell, build_graph(cell))))


def cells(dims: ParallelDims, **more):
    layout = next((name for name, each in LAYOUTS.items() if each == dims), "CP-2")
    kinds = {f"{layout}, {name}": kind for name, kind in KINDS.items()}
    return [pytest.param(Cell(dims, num_steps=3, **kind, **more), id=name) for name, kind in kinds.items()]


@pytest.mark.parametrize("cell", [*cells(ONE), *cells(FSDP2, precision=BF16), *cells(TP2), *cells(FSDP2_TP2)])
def test_the_graph_is_eager(cell: Cell) -> None:
    assert run_on(cell.dims.num_ranks, differences, cell) == [[]] * cell.dims.num_ranks


@pytest.mark.parametrize(
    "cell",
    [*cells(ONE, precision=FP64, num_microbatches=2), *cells(FSDP2, precision=FP64), *cells(TP2, precision=FP64)],
)
def test_each_layout_is_one_rank(cell: Cell) -> None:
    assert run_on(cell.dims.num_ranks, off, cell) == [[]] * cell.dims.num_ranks
