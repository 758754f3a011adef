"""Muon updates matrices that ranks hold shards of as one rank does, in the graph of its step as without one."""

import dataclasses
from pathlib import Path

import pytest
import torch
from matrix import (
    FP64,
    FSDP2,
    ONE,
    TP2,
    Cell,
    Seen,
    bits_that_differ,
    build_eager,
    build_graph,
    far_apart,
    gathered,
    train,
)
from test_every_family import MODELS
from test_optimizer_in_graph import Job, differences, state_of
from torch import Tensor

from pool import run_on
from torchtitan_graph.checkpoint import Checkpointer
from torchtitan_graph.config import job
from torchtitan_graph.optim import build_lr_scheduler, build_optimizer, muon, owners
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.storage import set_local

MUON = job.Optimizer("Muon", lr=1e-2, param_groups=[job.ParamGroup("layers.1.*", lr=3e-3, weight_decay=0.0)])
MOE = "deepseek_v3-debugmodel"
LAYOUTS = {
    "FSDP-2": FSDP2,
    "TP-2": TP2,
    "DDP-2": ParallelDims(dp_replicate=2),
    "HSDP-2x2": ParallelDims(dp_replicate=2, dp_shard=2),
    "FSDP-4": ParallelDims(dp_shard=4),
    "FSDP-2 x TP-2": ParallelDims(dp_shard=2, tp=2),
    "EP-2": ParallelDims(dp_shard=2, ep=2),
    "HSDP-2x2, EP-2": ParallelDims(dp_replicate=2, dp_shard=2, ep=2),
    "FSDP-4, EP-2": ParallelDims(dp_shard=4, ep=2),
    "FSDP-2 x TP-2, EP-2": ParallelDims(dp_shard=2, tp=2, ep=2),
    "FSDP-2 x TP-2, EP-2, ETP-2": ParallelDims(dp_shard=2, tp=2, ep=2, etp=2),
}
FAST = [("llama3-debugmodel", "FSDP-2"), (MOE, "EP-2")]


def step_with_whole_gradients(each: Job, number: int) -> None:
    """Take a step on gradients that are, put together, the same in every layout."""
    for k, (name, parameter) in enumerate(each.model.named_parameters()):
        generator = torch.Generator().manual_seed(1000 * number + k)
        parameter.grad = each.storages[name].empty(torch.device("cpu"))
        set_local(parameter.grad, torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    each.steps.clip(1.0)
    each.optimizer.step()
    each.optimizer.zero_grad()


def after_steps(cell: Cell, config: job.Optimizer = MUON, num_steps: int = 3) -> Seen:
    each = Job(cell, config, False)
    for number in range(num_steps):
        step_with_whole_gradients(each, number)
    return gathered(cell, each.seen())


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, marks=[] if (model, layout) in FAST else [pytest.mark.slow])
        for model in ("llama3-debugmodel", MOE, "gpt_oss-debugmodel")
        for layout in LAYOUTS
        if model != "llama3-debugmodel" or "EP" not in layout
    ],
)
def test_every_layout_updates_as_one_rank(model: str, layout: str) -> None:
    dims = LAYOUTS[layout]
    cell = Cell(dims, FP64, vocab_size=510, **MODELS[model])
    alone = dataclasses.replace(cell, dims=ONE)
    (expected,) = run_on(1, after_steps, alone)
    for found in run_on(dims.num_ranks, after_steps, cell):
        assert far_apart(expected, found, 1e-12) == []


# --- the graph of its step --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama3-debugmodel", "FSDP-2"),
        pytest.param("llama3-debugmodel", "TP-2", marks=pytest.mark.slow),
        pytest.param(MOE, "EP-2", marks=pytest.mark.slow),
        pytest.param(MOE, "HSDP-2x2, EP-2", marks=pytest.mark.slow),
    ],
)
def test_the_graph_is_the_step_bit_for_bit(model: str, layout: str) -> None:
    dims = LAYOUTS[layout]
    config = dataclasses.replace(MUON, state_dtype="bfloat16") if model == MOE else MUON
    assert run_on(dims.num_ranks, differences, Cell(dims, **MODELS[model]), config) == [[]] * dims.num_ranks


def whole_runs_that_differ(cell: Cell) -> list[str]:
    """Train with the optimizer's step in the graph and, on the same graphs, without; and by FSDP2 and autograd."""
    seen = []
    for build, in_graph in ((build_graph, True), (build_graph, False), (build_eager, False)):
        steps = build(cell)
        optimizer = build_optimizer(steps.model, MUON)
        using = optimizer, build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=2), cell.num_steps)
        seen.append(train(cell, steps, using=using, in_graph=in_graph) | state_of(steps.model, optimizer))
    return bits_that_differ(seen[0], seen[1]) + bits_that_differ(seen[0], seen[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"),
    [*(("llama3-debugmodel", layout) for layout in ("FSDP-2", "TP-2", "FSDP-2 x TP-2")), (MOE, "TP-2"), (MOE, "EP-2")],
)
def test_whole_training_steps(model: str, layout: str) -> None:
    dims = LAYOUTS[layout]
    cell = Cell(dims, num_steps=3, **MODELS[model])
    assert run_on(dims.num_ranks, whole_runs_that_differ, cell) == [[]] * dims.num_ranks


def whole_runs_of_stages_that_differ(cell: Cell) -> list[str]:
    seen = []
    for in_graph in (False, True):
        steps = build_graph(cell)
        optimizer = build_optimizer(steps.model, MUON, in_part=True)
        using = optimizer, build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=2), cell.num_steps)
        seen.append(train(cell, steps, using=using, in_graph=in_graph) | state_of(steps.model, optimizer))
    return bits_that_differ(*seen)


@pytest.mark.slow
def test_each_stage_of_a_pipeline_steps_its_own() -> None:
    """On four ranks in each stage, of two axes, whose group is of no axis."""
    cell = Cell(ParallelDims(pp=2, dp_shard=2, tp=2), num_microbatches=2, num_steps=2)
    assert run_on(8, whole_runs_of_stages_that_differ, cell) == [[]] * 8


def trained(cell: Cell, in_graph: bool) -> Seen:
    """Train on the graph, and return gradients, parameters and the optimizer's state, whole."""
    steps = build_graph(cell)
    optimizer = build_optimizer(steps.model, MUON, in_part=cell.dims.pp > 1)
    using = optimizer, build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=2), cell.num_steps)
    seen = train(cell, steps, using=using, in_graph=in_graph) | state_of(steps.model, optimizer)
    kept = ("gradient of", "parameter", "momentum_buffer", "exp_avg")
    return gathered(cell, {name: x for name, x in seen.items() if any(word in name for word in kept)})


@pytest.mark.slow
@pytest.mark.parametrize("in_graph", [False, True], ids=["outside", "in the graph"])
@pytest.mark.parametrize(
    ("model", "dims"),
    [
        ("llama3-debugmodel", ParallelDims(pp=2)),
        ("llama3-debugmodel", ParallelDims(pp=2, dp_shard=2)),
        (MOE, TP2),
        (MOE, ParallelDims(dp_shard=2, ep=2)),
        (MOE, ParallelDims(pp=2, dp_shard=2, ep=2)),
    ],
    ids=str,
)
def test_whole_runs_are_those_of_one_rank(model: str, dims: ParallelDims, in_graph: bool) -> None:
    cell = Cell(dims, FP64, num_microbatches=4 // dims.data, num_steps=3, vocab_size=510, **MODELS[model])
    alone = dataclasses.replace(cell, dims=ONE, num_microbatches=4)
    (expected,) = run_on(1, trained, alone, False)
    assert any(name.endswith("momentum_buffer") for name in expected)
    for found in run_on(dims.num_ranks, trained, cell, in_graph):
        assert far_apart(expected, found, 1e-12) == []


# --- the checks can fail ----------------------------------------------------------------------------------------------


def after_steps_on_shards(cell: Cell) -> Seen:
    """As if each rank's shard were a matrix of its own."""
    plan = owners.plan_owners

    def plan_as_if_alone(parameters: list[Tensor]) -> owners.Plan:
        return plan([x.to_local() for x in parameters])  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "plan_owners", plan_as_if_alone)
        return after_steps(cell)


def test_Newton_Schulz_on_a_shard_is_seen() -> None:
    cell = Cell(FSDP2, FP64, vocab_size=510)
    (expected,) = run_on(1, after_steps, dataclasses.replace(cell, dims=ONE))
    for found in run_on(2, after_steps_on_shards, cell):
        far = far_apart(expected, found, 1e-12)
        assert any(name.startswith("layers.0.attention.wq.weight (") for name in far)
        assert not any("norm" in name or "momentum_buffer" in name for name in far)  # they are right


# --- a run that goes on ----------------------------------------------------------------------------------------------


def save_or_go_on(cell: Cell, config: job.Optimizer, folder: Path, begins: bool) -> Seen:
    each = Job(cell, config, False)
    checkpointer = Checkpointer(folder, job.Checkpoint(enable=True), each.model, each.optimizer, each.schedule)
    if not begins:
        checkpointer.load()
    for number in range(2) if begins else range(2, 4):
        step_with_whole_gradients(each, number)
    if begins:
        checkpointer.save(2, {})
    return gathered(cell, each.seen())


def test_it_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    """In fp64, where Newton-Schulz is too, all layouts have the same bits; with moments in bfloat16 as well."""
    config = dataclasses.replace(MUON, state_dtype="bfloat16", ema_decay=0.9)
    cell = Cell(FSDP2, FP64, vocab_size=510)
    run_on(2, save_or_go_on, cell, config, tmp_path, True)
    (whole,) = run_on(1, after_steps, dataclasses.replace(cell, dims=ONE), config, 4)
    (found,) = run_on(1, save_or_go_on, dataclasses.replace(cell, dims=ONE), config, tmp_path, False)
    assert found["layers.0.attention.wq.weight.momentum_buffer"].dtype == torch.bfloat16
    assert found["norm.weight.average"].dtype == torch.float32
    assert far_apart(whole, found, 1e-12) == []
