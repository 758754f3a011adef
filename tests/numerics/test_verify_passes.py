"""`verify_passes` accepts every pass in every layout, and names the pass that changes a number."""

from collections.abc import Callable

import faults
import pytest
import torch
from matrix import BF16, CPU, DDP2, FP32, FSDP2, LAYOUTS, ONE, ONE_LAYER, TP2, Cell, trace
from torch.fx import GraphModule

from pool import run_on
from torchtitan_graph.compiler import Inspection, Pass, passes, run_passes
from torchtitan_graph.graph.edit import call
from torchtitan_graph.models.layers.moe import AuxiliaryLoss
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.parallel.storage import Reshard

PRECISIONS = {"fp32": FP32, "bf16": BF16}
# All ranks have gradients of such losses, whatever their targets are.
AUXILIARY = Cell(
    FSDP2,
    BF16,
    family="qwen3",
    flavor="debugmodel_moe",
    auxiliary=AuxiliaryLoss(load_balance=0.01, router_z=0.01),
    **ONE_LAYER,
)


def outcome(cell: Cell, broken: Callable[[GraphModule], GraphModule] | None = None) -> str:
    """Verify the passes, or the layout passes and a broken one after them; give what the error says, or nothing."""
    traced = trace(cell)
    ordered = passes(traced.plan)
    if broken is not None:
        ordered = [*ordered[:3], Pass(broken.__name__, broken)]
    try:
        run_passes(traced.train.gm, ordered, (), CPU, Inspection(verify_on=traced.inputs))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            Cell(dims, PRECISIONS[p]),
            id=f"{layout}-{p}",
        )
        for layout, dims in LAYOUTS.items()
        for p in PRECISIONS
    ],
)
def test_every_pass_keeps_its_promise(cell):
    assert run_on(cell.dims.num_ranks, outcome, cell) == [""] * cell.dims.num_ranks


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(Cell(FSDP2, BF16, tied=True), marks=pytest.mark.slow),
        Cell(FSDP2, BF16, **ONE_LAYER),
        pytest.param(Cell(FSDP2, FP32, recompute=Recompute(every=1), cpu_offload=True), marks=pytest.mark.slow),
        pytest.param(
            Cell(FSDP2, FP32, recompute=Recompute(by_op=True), reshard=Reshard(blocks=False)), marks=pytest.mark.slow
        ),
        pytest.param(Cell(TP2, BF16, tied=True), marks=pytest.mark.slow),
        pytest.param(Cell(TP2, BF16, async_tp=True, recompute=Recompute(every=1), **ONE_LAYER), marks=pytest.mark.slow),
        pytest.param(Cell(ONE, FP32, attn="flex"), marks=pytest.mark.slow),
        pytest.param(Cell(ParallelDims(cp=2), BF16), marks=pytest.mark.slow),
        pytest.param(AUXILIARY, marks=pytest.mark.slow),
        pytest.param(Cell(ParallelDims(dp_shard=2, cp=2), BF16), marks=pytest.mark.slow),
    ],
    ids=[
        "tied",
        "FSDP-2-one-layer",
        "recompute-full-on-host",
        "recompute-op-stay-gathered",
        "TP-2-tied",
        "TP-2-async",
        "flex",
        "CP-2",
        "auxiliary-loss",
        "FSDP-2-x-CP-2",
    ],
)
def test_every_pass_keeps_its_promise_in_variants(cell):
    assert run_on(cell.dims.num_ranks, outcome, cell) == [""] * cell.dims.num_ranks


def compiled_outcome(factor: float) -> str:
    """Verify a region that gives all its results times a factor."""
    traced = trace(Cell(ONE, FP32, **ONE_LAYER))

    def scale(gm: GraphModule) -> GraphModule:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.silu.default):
            with gm.graph.inserting_after(node):
                scaled = call(gm.graph, node, torch.ops.aten.mul.Tensor, node, factor)
            node.replace_all_uses_with(scaled, delete_user_cb=lambda user, scaled=scaled: user is not scaled)
        gm.recompile()
        return gm

    ordered = [*passes(traced.plan), Pass("scale", scale, exact=False)]
    try:
        run_passes(traced.train.gm, ordered, (), CPU, Inspection(verify_on=traced.inputs))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_pass_that_promises_less_may_round_but_not_err():
    assert run_on(1, compiled_outcome, 1 + 1e-6) == [""]
    (error,) = run_on(1, compiled_outcome, 1.01)
    assert error.startswith("pass scale promises the same numbers up to rounding")


BROKEN = [
    faults.drop_one_reduction,
    pytest.param(faults.average_one_reduction, marks=pytest.mark.slow),
    pytest.param(faults.take_the_largest_in_one_reduction, marks=pytest.mark.slow),
    faults.scale_one_gather,
]


@pytest.mark.parametrize("precision", [pytest.param(FP32, marks=pytest.mark.slow), BF16], ids=PRECISIONS)
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_pass_is_named(broken, precision):
    for error in run_on(2, outcome, Cell(FSDP2, precision, **ONE_LAYER), broken):
        assert error.startswith(f"pass {broken.__name__} promises")


def test_a_broken_pass_is_named_where_all_ranks_have_losses_without_targets():
    for error in run_on(2, outcome, AUXILIARY, faults.drop_one_reduction):
        assert error.startswith("pass drop_one_reduction promises")


def test_a_pass_after_which_ranks_would_wait_for_each_other_is_named_before_it_runs():
    for error in run_on(2, outcome, Cell(FSDP2, FP32, **ONE_LAYER), faults.gather_in_another_order_on_one_rank):
        assert error.startswith("pass gather_in_another_order_on_one_rank lets ranks send in different orders")
        assert "number 1 on rank 0 is" in error and "on rank 1" in error


def test_a_pass_that_edits_the_graph_of_one_rank_only_is_run_on_all():
    for error in run_on(2, outcome, Cell(FSDP2, FP32, **ONE_LAYER), faults.scale_one_gather_on_one_rank, timeout=60):
        assert error.startswith("pass scale_one_gather_on_one_rank promises")


# A fault for each pass of the list, and where its place is. Policies have none: nothing computes the tags they write.
SPOILED = {
    "cleanup": (faults.lose_a_write, Cell(ONE, FP32, **ONE_LAYER)),
    "shard_params": (faults.drop_one_reduction, Cell(FSDP2, FP32, **ONE_LAYER)),
    "mixed_precision": (faults.cast_one_parameter_too_narrow, Cell(FSDP2, BF16, **ONE_LAYER)),
    "rest_on_host": (faults.fetch_another, Cell(FSDP2, BF16, cpu_offload=True, **ONE_LAYER)),
    "gather_each_call": (
        faults.wait_for_another,
        Cell(FSDP2, BF16, own_step="torchtitan_graph.goals.dpo", lora=(("rank", 4),), **ONE_LAYER),
    ),
    "merge_equal": (faults.merge_unequal, Cell(ONE, FP32)),
    "rematerialize": (faults.recompute_another, Cell(ONE, FP32)),
    "bucket_collectives": (faults.swap_two_parts_of_a_bucket, Cell(FSDP2, BF16)),
    "overlap_context": (faults.use_before_it_is_there, Cell(ParallelDims(cp=2), BF16, **ONE_LAYER)),
    "overlap_collectives": (faults.wait_for_another, Cell(FSDP2, BF16)),
    "overlap_products": (faults.forget_a_part, Cell(TP2, FP32, async_tp=True, **ONE_LAYER)),
    "overlap_copies": (faults.fetch_another, Cell(ONE, BF16, cpu_offload=True)),
    "compile_regions": (faults.scale_every_silu, Cell(ONE, FP32, **ONE_LAYER)),
}


def outcome_of_one(cell: Cell, name: str, fault: Callable[[GraphModule], GraphModule] | None) -> str:
    """Verify one pass, with a fault in what it gives; give what the error says, or nothing."""
    traced = trace(cell)
    ordered = passes(traced.plan)
    place = [each.name for each in ordered].index(name)
    gm, own = run_passes(traced.train.gm, ordered[:place], (), CPU, Inspection()), ordered[place]
    if fault is not None:
        own = own._replace(run=lambda gm: fault(ordered[place].run(gm)))
    try:
        run_passes(gm, [own], (), CPU, Inspection(verify_on=traced.inputs))
    except RuntimeError as error:
        return str(error)
    return ""


DEAR = ("gather_each_call", "bucket_collectives", *(name for name in SPOILED if name.startswith("overlap_")))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in DEAR)) for name in SPOILED])
def test_a_fault_in_any_pass_is_named(name):
    fault, cell = SPOILED[name]
    for error in run_on(cell.dims.num_ranks, outcome_of_one, cell, name, fault):
        assert error.startswith(f"pass {name} promises")


def untouched(cell: Cell) -> dict[str, bool]:
    """Tell of each pass that has no fault above whether it leaves all that is computed as it is."""
    traced, found = trace(cell), {}
    gm = traced.train.gm
    for each in passes(traced.plan):
        before = [node.format_node() for node in gm.graph.nodes]
        gm = each.run(gm)
        if each.name not in SPOILED:
            found[each.name] = before == [node.format_node() for node in gm.graph.nodes]
    return found


def test_policies_change_nothing_that_is_computed():
    (found,) = run_on(1, untouched, Cell(ONE, FP32, recompute=Recompute(every=1)))
    assert found and all(found.values()), found


@pytest.mark.slow
def test_a_pass_that_breaks_the_sum_over_copies_is_named():
    for error in run_on(2, outcome, Cell(DDP2, BF16, **ONE_LAYER), faults.drop_one_reduction):
        assert error.startswith("pass drop_one_reduction promises")


@pytest.mark.parametrize(
    "broken",
    [
        faults.drop_one_sum_of_activations,
        pytest.param(faults.shift_the_labels_of_the_gradient, marks=pytest.mark.slow),
    ],
)
def test_a_pass_that_breaks_tensor_parallelism_is_named(broken):
    for error in run_on(2, outcome, Cell(TP2, BF16, **ONE_LAYER), broken):
        assert error.startswith(f"pass {broken.__name__} promises")
