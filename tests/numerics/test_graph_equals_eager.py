"""The graph's training step is FSDP2's, bit for bit: losses, gradients, norms, and parameters after five steps."""

import dataclasses
from pathlib import Path

import faults
import pytest
from matrix import (
    BF16,
    DDP2,
    FP32,
    FSDP2,
    FSDP2_TP2,
    FSDP4,
    LAYOUTS,
    MAX_NORM,
    NUM_STEPS,
    ONE,
    ONE_LAYER,
    TP2,
    Cell,
    bits_that_differ,
    build_eager,
    build_graph,
    eager,
    train,
)

from pool import run_on
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Budget, Recompute
from torchtitan_graph.parallel.storage import Reshard

PRECISIONS = {"fp32": FP32, "bf16": BF16}

VARIANTS = {
    "accumulate-2": {"num_microbatches": 2},
    "tied": {"tied": True},
    "stay-gathered": {"reshard": Reshard(blocks=False)},
    "reshard-the-root-too": {"reshard": Reshard(root=True)},
    "recompute-full": {"recompute": Recompute.from_option("full", "")},
    "recompute-op": {"recompute": Recompute.from_option("selective", "op")},
    "recompute-every-2": {"recompute": Recompute.from_option("selective", "2")},
    "by-module": {
        "recompute": Recompute(
            by_op=True,
            saved=frozenset({"layers.0.attention"}),
            again=frozenset({"layers.0", "layers.1.attention", "layers.1.feed_forward.w1"}),
        )
    },
    "budget-half": {"recompute": Recompute(budget=Budget(0.5))},
    "budget-least": {"recompute": Recompute(budget=Budget(0.0))},
}
FAST = {(layout, "bf16") for layout in ("one-rank", "FSDP-2")}
FAST_VARIANTS = {("FSDP-2", variant, "bf16") for variant in ("recompute-full", "budget-half")}


def differences(cell: Cell) -> list[str]:
    return bits_that_differ(eager(cell), train(cell, build_graph(cell)))


def check(cell: Cell) -> None:
    assert run_on(cell.dims.num_ranks, differences, cell) == [[]] * cell.dims.num_ranks


def slow_unless(condition: bool) -> list[pytest.MarkDecorator]:
    return [] if condition else [pytest.mark.slow]


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            Cell(dims, PRECISIONS[p]),
            id=f"{layout}-{p}",
            marks=slow_unless((layout, p) in FAST),
        )
        for layout, dims in LAYOUTS.items()
        for p in PRECISIONS
    ]
    + [
        pytest.param(Cell(dims, BF16, **ONE_LAYER), id=f"{name}-one-layer")
        for name, dims in (("DDP-2", DDP2), ("TP-2", TP2))
    ],
)
def test_every_layout(cell):
    check(cell)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            Cell(dims, PRECISIONS[p], **options),
            id=f"{layout}-{variant}-{p}",
            marks=slow_unless((layout, variant, p) in FAST_VARIANTS),
        )
        for layout, dims in LAYOUTS.items()
        for variant, options in VARIANTS.items()
        for p in PRECISIONS
    ],
)
def test_every_variant_of_a_layout(cell):
    check(cell)


@pytest.mark.parametrize(
    "names",
    [
        "bucket_collectives",
        "merge_equal tag_elementwise",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("tag_resharding", "tag_recomputation", "rematerialize", "overlap_collectives")
        ),
    ],
)
def test_without_a_pass(names):
    """Which passes run changes no bit on two ranks."""
    check(Cell(FSDP2, BF16, recompute=Recompute.from_option("full", ""), disabled=tuple(names.split())))


# FSDP2 warns of in-place operations on its output, which DTensor makes a view here: there are none.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(Cell(TP2, BF16, loss_parallel=False, **ONE_LAYER), marks=pytest.mark.slow),
        pytest.param(Cell(TP2, BF16, loss_parallel=False), marks=pytest.mark.slow),
        pytest.param(Cell(FSDP2_TP2, BF16, loss_parallel=False), marks=pytest.mark.slow),
    ],
    ids=["TP-2-one-layer", "TP-2", "FSDP-2-x-TP-2"],
)
def test_with_logits_gathered_over_the_vocabulary(cell):
    check(cell)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "p"),
    [(layout, p) for layout in ("one-rank", "FSDP-2") for p in PRECISIONS],
)
def test_with_flex_attention(layout, p):
    check(Cell(LAYOUTS[layout], PRECISIONS[p], attn="flex"))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")  # as above
@pytest.mark.parametrize(
    "cell",
    [
        Cell(FSDP2, BF16, num_microbatches=2, loss_chunks=3, **ONE_LAYER),
        pytest.param(Cell(TP2, BF16, fused_layers=True, loss_chunks=4, **ONE_LAYER), marks=pytest.mark.slow),
        *(
            pytest.param(dataclasses.replace(cell, loss_chunks=3), marks=pytest.mark.slow)
            for cell in (
                Cell(FSDP2, BF16, capture="dynamo", fused_layers=True),
                Cell(FSDP2_TP2, FP32, num_microbatches=2, tied=True),
                Cell(ONE, BF16, "deepseek_v3", changes=(("num_mtp_layers", 1),)),
                Cell(FSDP2, FP32, reshard=Reshard(True, True)),
            )
        ),
    ],
    ids=["accumulate-2", "TP-2", "dynamo", "FSDP-2-x-TP-2-tied", "MTP", "resharded"],
)
def test_with_the_loss_in_chunks(cell):
    check(cell)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dims",
    [ParallelDims(dp_replicate=4), ParallelDims(dp_replicate=2, tp=2), ParallelDims(dp_shard=3)],
    ids=["DDP-4", "DDP-2-x-TP-2", "FSDP-3"],
)
@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
def test_more_layouts(dims, precision):
    check(Cell(dims, precision))


@pytest.mark.slow
def test_a_rank_without_a_row():
    """Nine rows over four ranks: three, three, three, none."""
    check(Cell(FSDP4, BF16, ffn_dim=9))


# --- the checks can fail ----------------------------------------------------------------------------------------------


def alive(cell: Cell) -> tuple[list[float], list[float], list[str]]:
    seen = eager(cell)
    losses, norms = ([seen[f"step {k}: {what}"].item() for k in range(1, NUM_STEPS + 1)] for what in ("loss", "norm"))
    return losses, norms, [name for name, x in seen.items() if "gradient" in name and not x.any()]


def test_what_is_compared_moves():
    """Else equality would say nothing: the loss falls, every gradient counts, every step is clipped."""
    ((losses, norms, zeros),) = run_on(1, alive, Cell())
    assert losses[-1] < losses[0] - 0.1
    assert min(norms) > MAX_NORM
    assert zeros == []


def differences_after(cell: Cell, edit) -> list[str]:
    return bits_that_differ(eager(cell), train(cell, build_graph(cell, edit)))


@pytest.mark.parametrize(
    ("dims", "edit"),
    [
        (FSDP2, faults.drop_one_reduction),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (FSDP2, faults.average_one_reduction),
                (FSDP2, faults.take_the_largest_in_one_reduction),
                (DDP2, faults.drop_one_reduction),
            )
        ),
    ],
)
def test_a_wrong_reduction_is_seen_in_the_first_gradients(dims, edit):
    for different in run_on(2, differences_after, Cell(dims, **ONE_LAYER), edit):
        assert different[0].startswith("step 1: gradient of ")


def test_a_sum_that_tensor_parallelism_needs_and_lacks_is_seen_in_the_first_loss():
    for different in run_on(2, differences_after, Cell(TP2, **ONE_LAYER), faults.drop_one_sum_of_activations):
        assert different[0] == "step 1: loss"


def test_a_wrong_gather_is_seen_in_the_first_loss():
    for different in run_on(2, differences_after, Cell(FSDP2, **ONE_LAYER), faults.scale_one_gather):
        assert different[0] == "step 1: loss"


def test_wrong_labels_in_the_losss_gradient_are_seen_in_the_first_gradients():
    (different,) = run_on(1, differences_after, Cell(**ONE_LAYER), faults.shift_the_labels_of_the_gradient)
    assert different[0].startswith("step 1: gradient of ")


def test_a_wrong_place_in_the_vocabulary_is_seen_in_the_first_loss():
    for different in run_on(2, differences_after, Cell(TP2, **ONE_LAYER), faults.begin_at_the_first_class):
        assert different[0] == "step 1: loss"


def differences_with_data(cell: Cell, data) -> list[str]:
    return bits_that_differ(eager(cell), train(cell, build_graph(cell), data))


@pytest.mark.parametrize("fault", [faults.shift_the_mask, faults.drop_a_microbatch, faults.count_own_targets_only])
def test_wrong_data_is_seen_in_the_first_loss(fault):
    for different in run_on(2, differences_with_data, Cell(FSDP2, num_microbatches=2, **ONE_LAYER), fault):
        assert different[0] == "step 1: loss"


def differences_with_a_bit_flipped(cell: Cell, name: str) -> list[str]:
    reference, graph = build_eager(cell), build_graph(cell)
    faults.flip_lowest_bit(graph.model.get_parameter(name))
    return bits_that_differ(train(cell, reference), train(cell, graph))


def test_one_bit_flipped_in_one_parameter_is_seen():
    name = "layers.0.feed_forward.w2.weight"
    for different in run_on(2, differences_with_a_bit_flipped, Cell(FSDP2, **ONE_LAYER), name):
        assert f"parameter {name}" in different


def names_after_one_flip(cell: Cell, name: str) -> list[str]:
    seen = train(cell, build_graph(cell))
    changed = seen | {name: seen[name].clone()}
    faults.flip_lowest_bit(changed[name])
    return bits_that_differ(seen, changed)


def test_one_bit_flipped_in_what_was_seen_is_named():
    name = "step 3: gradient of norm.weight"
    assert run_on(1, names_after_one_flip, Cell(**ONE_LAYER), name) == [[name]]


def test_an_operator_of_ones_own(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    recompute = Recompute.from_option("selective", "op")
    check(Cell(TP2, BF16, family="own_operator.squared_relu", recompute=recompute, **ONE_LAYER))
