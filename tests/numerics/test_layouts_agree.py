"""The graph's training step is that of a plain `nn.Module` under plain autograd: no FSDP2 and no DTensor on that side.

On one rank in fp32 bit for bit; in every layout in fp64 to 1e-12 of each tensor's largest value: layouts add in
different orders.
"""

import dataclasses
import functools

import faults
import pytest
import torch
import torch.distributed as dist
from matrix import (
    DDP2,
    FP64,
    FSDP2,
    FSDP2_TP2,
    LAYOUTS,
    ONE,
    ONE_LAYER,
    TP2,
    Cell,
    Data,
    Seen,
    bits_that_differ,
    build_eager,
    build_graph,
    build_plain,
    eager,
    far_apart,
    gathered,
    layout_of,
    microbatches,
    off_one_rank,
    train,
)

from pool import run_on
from torchtitan_graph.models.layers.moe import AuxiliaryLoss
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Recompute

TOLERANCE = 1e-12


# --- one rank, fp32 -------------------------------------------------------------------------------------------------


def differences_from_plain(cell: Cell, data: Data = microbatches) -> list[str]:
    plain = train(cell, build_plain(cell))
    graph = {
        name: x.to_local() if hasattr(x, "to_local") else x for name, x in train(cell, build_graph(cell), data).items()
    }
    return bits_that_differ(plain, graph)


@pytest.mark.parametrize(
    "cell",
    [
        Cell(),
        pytest.param(Cell(tied=True), marks=pytest.mark.slow),
        pytest.param(Cell(num_microbatches=2), marks=pytest.mark.slow),
        Cell(recompute=Recompute(by_op=True)),
        Cell(attn="flex"),
    ],
    ids=["sdpa", "tied", "accumulate-2", "recompute-op", "flex"],
)
def test_one_rank_is_the_plain_module(cell):
    assert run_on(1, differences_from_plain, cell) == [[]]


def test_a_mask_off_by_one_is_seen():
    ((first, *_),) = run_on(1, differences_from_plain, Cell(), faults.shift_the_mask)
    assert first == "step 1: loss"


# --- every layout, fp64 ---------------------------------------------------------------------------------------------


@functools.cache
def plain(vocab_size: int, tied: bool = False, family: str = "llama3") -> Seen:
    cell = Cell(precision=FP64, vocab_size=vocab_size, tied=tied, family=family)
    return train(cell, build_plain(cell))


def whole_graph(cell: Cell, edit=None, data: Data = microbatches) -> Seen:
    return gathered(cell, train(cell, build_graph(cell, edit), data))


def whole_eager(cell: Cell) -> Seen:
    return gathered(cell, eager(cell))


def check(whole, cell: Cell) -> None:
    for found in run_on(cell.dims.num_ranks, whole, cell):
        assert far_apart(plain(cell.vocab_size, cell.tied, cell.family), found, TOLERANCE) == []


@pytest.mark.slow
def test_two_axes_at_once_are_the_plain_module():
    """Each axis alone is among the variants."""
    cell = Cell(FSDP2_TP2, FP64, **ONE_LAYER)
    for found in run_on(4, whole_graph, cell):
        assert off_one_rank(cell, found) == []


@pytest.mark.slow
@pytest.mark.parametrize("dims", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_is_the_plain_module(dims):
    check(whole_graph, Cell(dims, FP64))


@pytest.mark.parametrize(
    "cell",
    [
        Cell(FSDP2, FP64, num_microbatches=2),
        pytest.param(Cell(FSDP2, FP64, tied=True), marks=pytest.mark.slow),
        pytest.param(Cell(TP2, FP64, tied=True), marks=pytest.mark.slow),
        pytest.param(Cell(TP2, FP64, loss_parallel=False), marks=pytest.mark.slow),
        pytest.param(Cell(TP2, FP64, tied=True, loss_chunks=3), marks=pytest.mark.slow),
    ],
    ids=["FSDP-2-accumulate-2", "FSDP-2-tied", "TP-2-tied", "TP-2-gathered-logits", "TP-2-tied-chunks"],
)
def test_every_variant_is_the_plain_module(cell):
    check(whole_graph, cell)


OWN_TERMS = {"large_logits", "kind_of_row", "gain", "odd_tokens"}
OWN_LOSS = {"precision": FP64, "family": "own_models.own_loss"}


@pytest.mark.parametrize(
    ("whole", "cell"),
    [
        pytest.param(whole_graph, Cell(num_microbatches=4, **OWN_LOSS), marks=pytest.mark.slow),
        pytest.param(whole_graph, Cell(FSDP2, num_microbatches=2, **OWN_LOSS), marks=pytest.mark.slow),
        pytest.param(whole_eager, Cell(DDP2, **OWN_LOSS), marks=pytest.mark.slow),
        pytest.param(whole_graph, Cell(ParallelDims(tp=2), **OWN_LOSS), marks=pytest.mark.slow),
        pytest.param(
            whole_graph,
            Cell(ParallelDims(pp=2), pipeline=(("pipeline_parallel_schedule", "1F1B"),), **OWN_LOSS),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["accumulate-4", "FSDP-2-accumulate-2", "eager-DDP-2", "TP-2", "PP-2"],
)
def test_a_term_of_ones_own_has_one_size_in_every_layout(whole, cell):
    check(whole, cell)


def terms_of(build, cell: Cell) -> tuple[dict[str, float], float]:
    """Return the terms of a step's loss, and the loss, of all ranks."""
    layout = layout_of(cell.dims)
    output = build(cell).train(*microbatches(cell, layout.data_rank, 1))
    terms = layout.of_all_stages(dict(output.terms))
    losses = [torch.zeros_like(output.loss) for _ in range(cell.dims.num_ranks)]
    dist.all_gather(losses, output.loss)
    return {name: float(x) for name, x in terms.items()}, layout.total_loss([float(x) for x in losses])


@torch.no_grad()
def terms_of_a_plain_module(cell: Cell) -> dict[str, float]:
    model, (batches, _) = build_plain(cell).model, microbatches(cell, 0, 1)
    found = dict.fromkeys(OWN_TERMS, 0.0)
    for batch in batches:
        masks = model.masks(batch.documents_BL, batch.positions_BL)
        _, side = model(batch.tokens_BL, batch.positions_BL, masks, side_outputs=True)
        found = {name: found[name] + float(x.mean()) / len(batches) for name, x in side.losses.items()}
    return found


MTP = {"family": "deepseek_v3", "changes": (("num_mtp_layers", 1),), "auxiliary": AuxiliaryLoss(load_balance=0.1)}


@pytest.mark.parametrize(
    ("build", "cell", "names"),
    [
        pytest.param(*(build_graph, Cell(FSDP2, num_microbatches=2, **OWN_LOSS), OWN_TERMS), marks=pytest.mark.slow),
        pytest.param(*(build_eager, Cell(FSDP2, num_microbatches=2, **OWN_LOSS), OWN_TERMS), marks=pytest.mark.slow),
        (
            build_graph,
            Cell(ParallelDims(pp=2), pipeline=(("pipeline_parallel_schedule", "1F1B"),), **OWN_LOSS),
            OWN_TERMS,
        ),
        pytest.param(build_eager, Cell(ParallelDims(tp=2), **OWN_LOSS), OWN_TERMS, marks=pytest.mark.slow),
        pytest.param(
            *(build_graph, Cell(ParallelDims(tp=2, ep=2), FP64, **MTP), {"experts", "ahead"}), marks=pytest.mark.slow
        ),
    ],
    ids=["FSDP-2-accumulate-2", "eager", "PP-2", "eager-TP-2", "TP-2-EP-2"],
)
def test_the_terms_of_a_loss_add_up_to_it(build, cell, names):
    of_ranks = run_on(cell.dims.num_ranks, terms_of, build, cell)
    for terms, loss in of_ranks:
        assert terms.keys() == names | {"cross_entropy"} and min(terms.values()) > 1e-3
        assert sum(terms.values()) == pytest.approx(loss, rel=TOLERANCE)
    if "large_logits" in names:
        whole = dataclasses.replace(cell, dims=ONE, pipeline=())
        ((found, _), (expected,)) = of_ranks[0], run_on(1, terms_of_a_plain_module, whole)
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dims",
    [ParallelDims(dp_replicate=4), ParallelDims(dp_replicate=2, tp=2)],
    ids=["DDP-4", "DDP-2-x-TP-2"],
)
def test_more_layouts_are_the_plain_module(dims):
    check(whole_graph, Cell(dims, FP64))


@pytest.mark.slow
@pytest.mark.parametrize("dims", LAYOUTS.values(), ids=LAYOUTS)
def test_eager_too_is_the_plain_module(dims):
    check(whole_eager, Cell(dims, FP64))


# --- the check can fail ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "edit"),
    [
        pytest.param(FSDP2, faults.average_one_reduction, marks=pytest.mark.slow),
        pytest.param(FSDP2, faults.take_the_largest_in_one_reduction, marks=pytest.mark.slow),
        pytest.param(FSDP2, faults.drop_one_reduction, marks=pytest.mark.slow),
        pytest.param(TP2, faults.drop_one_sum_of_activations, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_collective_is_seen(dims, edit):
    cell = Cell(dims, FP64)
    for found in run_on(2, whole_graph, cell, edit):
        assert any("step 1" in name for name in far_apart(plain(cell.vocab_size), found, TOLERANCE))


def whole_or_refused(cell: Cell, edit) -> str:
    try:
        whole_graph(cell, edit)
    except AssertionError as error:
        return str(error)
    return "copies agree"


def test_copies_that_part_are_refused():
    for outcome in run_on(2, whole_or_refused, Cell(DDP2, FP64, **ONE_LAYER), faults.drop_one_reduction):
        assert "differs between the copies on dp_replicate" in outcome


@pytest.mark.parametrize(
    "fault",
    [
        faults.count_own_targets_only,
        *(pytest.param(fault, marks=pytest.mark.slow) for fault in (faults.shift_the_mask, faults.drop_a_microbatch)),
    ],
)
def test_wrong_data_is_seen(fault):
    cell = Cell(FSDP2, FP64, num_microbatches=2)
    for found in run_on(2, whole_graph, cell, data=fault):
        assert far_apart(plain(cell.vocab_size), found, TOLERANCE)[0].startswith("step 1: loss")


def test_the_tolerance_is_one_part_in_a_million_million():
    expected = plain(509)
    name = "parameter layers.0.attention.wq.weight"
    largest = expected[name].abs().max()
    for parts, far in ((0.5e-12, []), (2e-12, [name])):
        found = expected | {name: expected[name] + largest * parts * torch.eye(64, dtype=torch.float64)}
        assert [each.split(" (")[0] for each in far_apart(expected, found, TOLERANCE)] == far
