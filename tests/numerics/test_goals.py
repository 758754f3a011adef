"""Steps of the user's, DPO and distillation among them: graph equals eager, and layouts agree."""

import dataclasses
from contextlib import nullcontext

import faults
import pytest
from matrix import (
    BF16,
    FP64,
    FSDP2,
    FSDP2_TP2,
    LAYOUTS,
    ONE,
    ONE_LAYER,
    TP2,
    Cell,
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
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.parallel.storage import Reshard
from torchtitan_graph.steps import assembly

LORA = (("rank", 4), ("alpha", 8.0))
DPO, DISTILLATION = "torchtitan_graph.goals.dpo", "torchtitan_graph.goals.distillation"
KINDS = {
    "DPO, adapters": {
        "own_step": DPO,
        "lora": LORA,
        "step_options": (("label_smoothing", 0.1),),
        "changes": (("num_layers", 2),),
    },
    "DPO, reference": {"own_step": DPO, "reference": ()},
    "distillation": {
        "own_step": DISTILLATION,
        "reference": (("family", "qwen3"), ("dim", 96), ("num_layers", 4)),
        "step_options": (("temperature", 2.0),),
    },
}
CP2, EP2 = ParallelDims(cp=2), ParallelDims(dp_shard=2, ep=2)
MOE = {"family": "qwen3", "flavor": "debugmodel_moe", "auxiliary": AuxiliaryLoss(0.01), "num_steps": 3}


def differences(cell: Cell, edit=None) -> list[str]:
    return bits_that_differ(eager(cell), train(cell, build_graph(cell, edit)))


def off(cell: Cell, adapters_stay_on: bool = False) -> list[str]:
    """Return what differs from one rank, which may have no adapters to turn off."""
    with patched(assembly, "adapters_off", nullcontext_of) if adapters_stay_on else nullcontext():
        seen = train(cell, build_graph(cell))
    return off_one_rank(cell, gathered(cell, seen))


def nullcontext_of(model):
    return nullcontext()


def cells(dims: ParallelDims, kinds=tuple(KINDS), **more):
    layout = next((name for name, each in LAYOUTS.items() if each == dims), "CP-2")
    return [pytest.param(Cell(dims, num_steps=3, **KINDS[kind], **more), id=f"{layout}, {kind}") for kind in kinds]


def _small(cell: Cell):
    return None if cell.reference is None else (*cell.reference, *ONE_LAYER["changes"])


def small(cells):
    """Return the cells with one layer each."""
    few = [dataclasses.replace(*cell.values, reference=_small(*cell.values), **ONE_LAYER) for cell in cells]
    return [pytest.param(cell, id=f"{of.id}, one layer") for cell, of in zip(few, cells, strict=True)]


def slow(cells):
    return [pytest.param(*cell.values, id=cell.id, marks=pytest.mark.slow) for cell in cells]


LORA_KIND, REFERENCE, TEACHER = KINDS


@pytest.mark.parametrize(
    "cell",
    [
        *small(cells(FSDP2, [LORA_KIND], precision=BF16)),
        *small(cells(TP2, [TEACHER])),
        *slow(cells(FSDP2, precision=BF16)),
        *slow(cells(TP2)),
        *slow(cells(ONE)),
        *slow(cells(FSDP2_TP2)),
        *slow(cells(CP2, [TEACHER])),
        *slow(cells(FSDP2, precision=BF16, recompute=Recompute(every=1), num_microbatches=2)),
        *slow(cells(FSDP2, attn="flex")),
        *slow(cells(FSDP2, reshard=Reshard(blocks=False))),
        pytest.param(Cell(EP2, BF16, own_step=DPO, reference=(), **MOE), id="experts", marks=pytest.mark.slow),
        pytest.param(
            Cell(TP2, own_step=DISTILLATION, reference=(("family", "gpt_oss"),), num_steps=2),
            id="a teacher with masks of its own",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Cell(TP2, own_step=DISTILLATION, reference=(("family", "transformers"),), num_steps=2),
            id="a teacher of transformers",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Cell(FSDP2, own_step="own_models.steps.two_passes", num_steps=2, **ONE_LAYER),
            id="two passes with gradients",
        ),
    ],
)
def test_the_graph_is_eager(cell: Cell) -> None:
    assert run_on(cell.dims.num_ranks, differences, cell) == [[]] * cell.dims.num_ranks


@pytest.mark.parametrize(
    "cell",
    [
        *slow(small(cells(FSDP2, [LORA_KIND], precision=FP64))),
        *slow(cells(ONE, precision=FP64, num_microbatches=2)),
        *slow(cells(FSDP2, precision=FP64)),
        *slow(cells(TP2, precision=FP64)),
        *slow(cells(FSDP2_TP2, precision=FP64)),
        *slow(cells(CP2, [TEACHER], precision=FP64)),
        pytest.param(
            Cell(EP2, FP64, own_step=DPO, reference=(("family", "qwen3"), ("flavor", "debugmodel_moe")), **MOE),
            id="experts",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_each_layout_is_one_rank(cell: Cell) -> None:
    assert run_on(cell.dims.num_ranks, off, cell) == [[]] * cell.dims.num_ranks


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_dynamo_captures_it(kind: str) -> None:
    (differing,) = run_on(1, differences, Cell(capture="dynamo", num_steps=2, **KINDS[kind]))
    assert differing == []


def test_a_lost_reduction_is_seen() -> None:
    cell = Cell(FSDP2, BF16, num_steps=3, **KINDS[LORA_KIND] | ONE_LAYER)
    assert all(run_on(2, differences, cell, faults.drop_one_reduction))


def test_adapters_that_stay_on_are_seen() -> None:
    assert all(run_on(1, off, Cell(precision=FP64, num_steps=2, **KINDS[LORA_KIND] | ONE_LAYER), True))
