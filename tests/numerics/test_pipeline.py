"""A pipeline's step is torch's own `PipelineStage` under `fully_shard` bit for bit, and that of one rank in fp64.

Torch's schedules run the first; it shares the modules of a stage with the graph's side, and nothing of the cut, the
messages or the sums.
"""

import dataclasses
import functools
import logging
import warnings
from unittest.mock import patch

import faults
import pytest
import torch
import torch.distributed as dist
from matrix import (
    BF16,
    CPU,
    FP32,
    FP64,
    SEED,
    Cell,
    Seen,
    bits_that_differ,
    build_graph,
    build_model,
    build_plain,
    far_apart,
    gathered,
    initialize,
    layout_of,
    microbatches,
    train,
)
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from pool import run_on
from torchtitan_graph.loss import cross_entropy
from torchtitan_graph.models.layers.moe import AuxiliaryLoss
from torchtitan_graph.models.spec import load_family
from torchtitan_graph.parallel.layout import PP, ParallelDims
from torchtitan_graph.parallel.pipeline import Stage
from torchtitan_graph.parallel.recompute import Budget, Recompute, recompute_eager
from torchtitan_graph.parallel.schedule import SCHEDULES, V
from torchtitan_graph.parallel.storage import Reshard, shard_eager
from torchtitan_graph.quantize.products import DELAYED, Recipe
from torchtitan_graph.steps import Assembly, build_steps
from torchtitan_graph.steps.inputs import of_this_rank

TOLERANCE = 1e-12
PP2, PP2_FSDP2, PP4 = ParallelDims(pp=2), ParallelDims(pp=2, dp_shard=2), ParallelDims(pp=4)
PP2_TP2, PP2_DDP2 = ParallelDims(pp=2, tp=2), ParallelDims(pp=2, dp_replicate=2)


def cell(dims: ParallelDims, schedule: str, precision=FP32, **other) -> Cell:
    """Four microbatches (of two rows, or one) through four layers."""
    return Cell(
        dims,
        precision,
        num_microbatches=4,
        **{"changes": (("num_layers", 4),), "pipeline": (("pipeline_parallel_schedule", schedule),), **other},
    )


TOTALS = torch.ones(2, dtype=torch.int64)  # not read: no stage here has losses of experts

# --- torch's own stages, bit for bit ---------------------------------------------------------------------------------


def seen_by_torch(cell: Cell) -> Seen:
    """Run one step of torch's runtime: the loss, where the last stage is, and the gradients."""
    layout, plan = layout_of(cell.dims), cell.schedule()
    batches, num_tokens = microbatches(cell, layout.data_rank, 1)
    models, stages = [], []
    for number in plan.stages_of(layout.rank(PP)):
        model, names = build_model(cell), plan.stages[number]
        model.keep(names)
        Assembly(model, load_family(cell.family), layout, cell.options("graph")).prepare()
        recompute_eager(model.blocks, cell.recompute)
        model.forward = functools.partial(run_stage, model, layout, names, batches, number)
        reshard = Reshard(cell.reshard.root, cell.reshard.root)
        shard_eager(model, model.blocks, layout, cell.precision, reshard, CPU)
        initialize(model, SEED)
        B, L = batches[0].tokens_BL.shape
        of_rank = B, L // cell.dims.cp
        passed = torch.empty(*of_rank, model.config.dim, dtype=cell.precision.compute, requires_grad=True)
        x = passed if number else batches[0].tokens_BL
        y = passed if number < len(plan.stages) - 1 else passed.new_empty(*of_rank, cell.vocab_size)
        group = layout.group(PP)
        stages.append(PipelineStage(model, number, len(plan.stages), CPU, input_args=x, output_args=y, group=group))
        models.append(model)
    make = get_schedule_class(dict(cell.pipeline)["pipeline_parallel_schedule"])

    def loss(y, at):
        labels_BL = of_this_rank(batches[int(at)], TOTALS, models[-1], layout)[0].labels_BL
        return cross_entropy(y, labels_BL, num_tokens)

    runtime = make(stages if len(stages) > 1 else stages[0], len(batches), loss_fn=loss, scale_grads=False)
    numbers, losses = torch.arange(len(batches)), []
    tokens = [torch.cat([batch.tokens_BL for batch in batches])] if 0 in plan.stages_of(layout.rank(PP)) else []
    runtime.step(*tokens, target=numbers, losses=losses, return_outputs=False, at=numbers)
    total = sum(losses[1:], losses[0]).detach() if losses else torch.zeros((), dtype=torch.float32)
    return {"loss": total} | {name: p.grad for model in models for name, p in model.named_parameters()}


def run_stage(model, layout, names, batches, number, x, at):
    batch, masks = of_this_rank(batches[int(at)], TOTALS, model, layout)
    x = x if number else batch.tokens_BL
    return type(model).forward(model, x, batch.positions_BL, masks, only=names)


def differences_from_torch(cell: Cell) -> tuple[int, list[str]]:
    warnings.simplefilter("ignore")  # of torch's runtime, about what it does itself
    logging.disable(logging.WARNING)
    try:
        expected = seen_by_torch(cell)
    finally:
        logging.disable(logging.NOTSET)  # other tests run in this process
    steps = build_graph(cell)
    loss, *_ = steps.train(*microbatches(cell, layout_of(cell.dims).data_rank, 1))
    found = {"loss": loss} | {name: p.grad for name, p in steps.model.named_parameters()}
    return len(expected), bits_that_differ(expected, found)


def check_bits(cell: Cell) -> None:
    for number, different in run_on(cell.dims.num_ranks, differences_from_torch, cell):
        assert number > 3 and different == []


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(name, marks=[] if name == "1F1B" else [pytest.mark.slow]) for name in SCHEDULES],
)
def test_every_schedule_is_torchs(schedule):
    if SCHEDULES[schedule] == V and torch.__version__ < "2.12":
        pytest.skip("torch 2.11's own V schedules send from a rank to itself, which gloo can't")
    check_bits(cell(PP2, schedule))


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11's own V schedules send from a rank to itself")
@pytest.mark.parametrize(
    "other",
    [{}, {"dims": ParallelDims(pp=2, dp_shard=2, ep=2), "family": "qwen3", "flavor": "debugmodel_moe"}],
    ids=["PP-2", "PP-2-EP-2"],
)
def test_pairs_are_what_torch_overlaps(other):
    """A forward and a backward in one graph of ours are one OVERLAP_F_B of torch's, which runs its two in turn."""
    together = (("pipeline_parallel_schedule", "DualPipeV"), ("overlap_microbatches", True))
    tried = cell(**{"dims": PP2, "schedule": "DualPipeV", "pipeline": together, **other})
    assert tried.schedule().pairs
    check_bits(tried)


FLOAT8 = {"precision": BF16, "float8": Recipe(DELAYED), "ffn_dim": 128}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "schedule", "other"),
    [
        (PP2, "1F1B", {}),
        (PP2, "ZBVZeroBubble", {"precision": FP32}),
        (PP2_FSDP2, "1F1B", {"family": "qwen3", "flavor": "debugmodel_moe"}),
        (PP2_DDP2, "Interleaved1F1B", {"recompute": Recompute(1)}),
    ],
)
def test_stages_in_float8_are_torchs(dims, schedule, other):
    check_bits(cell(dims, schedule, **FLOAT8 | other))


def two_steps(cell: Cell) -> tuple[float, dict[str, torch.Tensor]]:
    """Give the loss of a second step, on other rows, and what the first has told it."""
    steps, losses = build_graph(cell), []
    for k in (1, 2):
        losses.append(steps.train(*microbatches(cell, 0, k)).loss)
        for p in steps.model.parameters():
            p.grad = None
    return losses[1].item(), {n: b for n, b in steps.model.named_buffers() if n.endswith("amax_history")}


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_what_stages_see_in_float8_is_what_one_rank_sees(tp):
    other = FLOAT8 | {"precision": FP32}
    whole = run_on(tp, two_steps, cell(ParallelDims(tp=tp), "1F1B", **other))
    of_stages = run_on(2 * tp, two_steps, cell(ParallelDims(pp=2, tp=tp), "1F1B", **other))
    for (expected, seen), (_, first), (found, last) in zip(whole, of_stages[:tp], of_stages[tp:], strict=True):
        assert found == expected and first.keys().isdisjoint(last) and (first | last).keys() == seen.keys()
        assert all(torch.equal(x, seen[name]) and (x[:2] > 0).all() for name, x in (first | last).items())


@pytest.mark.slow
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "other",
    [
        {"dims": ParallelDims(pp=2, cp=2), "family": "gpt_oss"},
        {"dims": ParallelDims(pp=2, dp_shard=2, ep=2), "family": "deepseek_v3"},
        {"dims": ParallelDims(pp=2, cp=2, ep=2), "family": "qwen3", "flavor": "debugmodel_moe"},
    ],
    ids=["CP-2", "FSDP-2-EP-2", "CP-2-EP-2"],
)
def test_stages_of_products_are_torchs(other, precision):
    """Not TP: there torch adds up a norm's gradients of all microbatches before those of the ranks."""
    check_bits(cell(schedule="1F1B", precision=precision, **other))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "precision", "other"),
    [
        ("1F1B", BF16, {}),
        *(pytest.param(schedule, FP32, {}, marks=pytest.mark.slow) for schedule in SCHEDULES),
        pytest.param("1F1B", FP32, {"recompute": Recompute(every=1)}, marks=pytest.mark.slow),
        pytest.param("1F1B", FP32, {"recompute": Recompute(budget=Budget(0.0))}, marks=pytest.mark.slow),
        pytest.param("1F1B", BF16, {"reshard": Reshard(True, True)}, marks=pytest.mark.slow),
        pytest.param("1F1B", FP32, {"attn": "flex"}, marks=pytest.mark.slow),
    ],
)
def test_sharded_stages_are_torchs(schedule, precision, other):
    check_bits(cell(PP2_FSDP2, schedule, precision, **other))


def messages(cell: Cell) -> list[tuple[str, torch.Size]]:
    """Give what a rank sends and receives in a step, and when a stage reduces its gradients, in its order."""
    found: list[tuple[str, torch.Size]] = []

    def noting(name, start):
        return lambda x, **to: (found.append((name, x.shape)), start(x, **to))[1]

    sending = patch.multiple(dist, isend=noting("sent", dist.isend), irecv=noting("got", dist.irecv))
    reduce = Stage.reduce
    with (
        sending,
        patch.object(Stage, "reduce", lambda self: (found.append(("reduced", torch.Size())), reduce(self))[1]),
    ):
        build_graph(cell).train(*microbatches(cell, layout_of(cell.dims).data_rank, 1))
    return found


def test_two_ranks_messages_come_in_one_order():
    """Each waits for its receiver on NCCL; the gradient of a tied weight, which goes both ways, is among them."""
    both = run_on(2, messages, cell(PP2, "1F1B", tied=True))
    # The first rank waits for the last gradient: it is on its way before the second one reduces its weights'.
    assert [name for name, _ in both[1]][-4:] == ["sent", "reduced", "got", "sent"]
    first, second = ([each for each in found if each[0] != "reduced"] for found in both)
    assert second == [("got" if name == "sent" else "sent", shape) for name, shape in first]
    assert [shape for _, shape in first[-2:]] == [(509, 64)] * 2


def without_gradient(cell: Cell) -> list[str]:
    """Take a step with a table of embeddings that takes no gradient."""
    model = build_model(cell)
    model.tok_embeddings.requires_grad_(False)
    steps = build_steps(Assembly(model, load_family(cell.family), layout_of(cell.dims), cell.options("graph")))
    initialize(model, SEED)
    steps.train(*microbatches(cell, layout_of(cell.dims).data_rank, 1))
    return [name for name, p in model.named_parameters() if p.grad is None]


def test_a_tied_weight_that_takes_no_gradient_is_left_alone():
    assert run_on(2, without_gradient, cell(PP2, "1F1B", tied=True)) == [["tok_embeddings.weight"]] * 2


# --- one rank, fp64 --------------------------------------------------------------------------------------------------


@functools.cache
def plain(one: Cell) -> Seen:
    return train(one, build_plain(one))


def differences_from_plain(cell: Cell, edit=None, data=microbatches) -> list[str]:
    one = dataclasses.replace(cell, dims=ParallelDims(), pipeline=(), recompute=Recompute(), reshard=Reshard())
    found = gathered(cell, train(cell, build_graph(cell, edit), data))
    return far_apart(plain(one), found, TOLERANCE)


def check_plain(cell: Cell) -> None:
    assert run_on(cell.dims.num_ranks, differences_from_plain, cell) == [[]] * cell.dims.num_ranks


@pytest.mark.parametrize(
    ("schedule", "tied"),
    [
        ("1F1B", True),
        pytest.param("ZBVZeroBubble", False, marks=pytest.mark.slow),
        pytest.param("1F1B", False, marks=pytest.mark.slow),
        pytest.param("ZBVZeroBubble", True, marks=pytest.mark.slow),
    ],
    ids=["1F1B-tied", "ZBVZeroBubble", "1F1B", "ZBVZeroBubble-tied"],
)
def test_two_stages_on_two_ranks_are_the_plain_module(schedule, tied):
    check_plain(cell(PP2, schedule, FP64, tied=tied))


# A model of transformers whose stages have one module each, apart from the last.
WRAPPED = {"family": "transformers", "changes": (("num_layers", 2),)}


@pytest.mark.parametrize(
    "schedule", ["Interleaved1F1B", *(pytest.param(name, marks=pytest.mark.slow) for name in SCHEDULES if "V" in name)]
)
def test_stages_of_one_module_of_another_librarys_model(schedule):
    tried = cell(PP2, schedule, **WRAPPED)
    assert [len(names) for names in tried.schedule().stages] == [1, 1, 1, 2]
    check_bits(tried)
    check_plain(dataclasses.replace(tried, precision=FP64))


MOE = {"family": "qwen3", "flavor": "debugmodel_moe", "auxiliary": AuxiliaryLoss(load_balance=0.01, router_z=0.01)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        *(
            pytest.param(each, id=name)
            for name, each in {
                "TP-2": cell(PP2_TP2, "ZBVZeroBubble", FP64),
                "FSDP-2": cell(PP2_FSDP2, "1F1B", FP64, tied=True, reshard=Reshard(True, True)),
                "experts": cell(PP2, "1F1B", FP64, **MOE),
                "chunks": cell(PP2, "ZBVZeroBubble", FP64, loss_chunks=3),
                "PP-4": cell(PP4, "1F1B", FP64, tied=True),
                "DDP-2": cell(PP2_DDP2, "Interleaved1F1B", FP64),
                "FSDP-2-DualPipeV-tied": cell(PP2_FSDP2, "DualPipeV", FP64, tied=True),
                "TP-2-tied": cell(PP2_TP2, "1F1B", FP64, tied=True),
            }.items()
        ),
    ],
)
def test_every_layout_is_the_plain_module(cell):
    check_plain(cell)


def gaps_where_compiled(one: Cell) -> dict[str, float]:
    """Compile the blocks in each part of the stages; give the largest relative differences of the gradients."""
    found = []
    for regions in ({}, {"layers.*": {}}):
        model, options = build_model(one), dataclasses.replace(one.options("graph"), regions=regions)
        steps = build_steps(Assembly(model, load_family(one.family), layout_of(one.dims), options))
        initialize(model, SEED)
        steps.train(*microbatches(one, layout_of(one.dims).data_rank, 1))
        found.append({name: p.grad.to_local() for name, p in model.named_parameters()})
    exact, compiled = found
    return {name: float((compiled[name] - x).norm() / x.norm()) for name, x in exact.items()}


@pytest.mark.slow
def test_parts_are_compiled_up_to_rounding():
    """In bf16: sums over microbatches reach the reduction in fp32, which no compiled cast may expect otherwise."""
    for gaps in run_on(2, gaps_where_compiled, cell(PP2, "ZBVZeroBubble", BF16), timeout=300):
        assert 0 < max(gaps.values()) < 2**-4


# --- the check can fail ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "dims"),
    [(faults.shift_the_mask, PP2), pytest.param(faults.count_own_targets_only, PP2_FSDP2, marks=pytest.mark.slow)],
    ids=["mask", "targets"],
)
def test_wrong_data_is_seen(fault, dims):
    for different in run_on(dims.num_ranks, differences_from_plain, cell(dims, "1F1B", FP64), data=fault):
        assert different[0].startswith("step 1: loss")


def differences_after_a_dropped_microbatch(cell: Cell) -> list[str]:
    add = Stage.backward_weight
    dropped = functools.partialmethod(lambda stage, i: stage._held.pop(i) and None if i == 1 else add(stage, i))
    with patch.object(Stage, "backward_weight", dropped):
        return differences_from_plain(cell)


def test_a_microbatch_whose_gradients_are_dropped_is_seen():
    for different in run_on(2, differences_after_a_dropped_microbatch, cell(PP2, "1F1B", FP64)):
        assert different[0].startswith("step 1: gradient")


@pytest.mark.slow
def test_a_dropped_reduction_is_seen():
    for different in run_on(4, differences_from_plain, cell(PP2_FSDP2, "1F1B", FP64), faults.drop_one_reduction):
        assert any("step 1: gradient" in name for name in different)
