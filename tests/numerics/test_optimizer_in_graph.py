"""Clipping and the optimizer's step as a graph change every parameter and all of the state as they do without one."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from matrix import (
    BF16,
    FSDP2,
    MAX_NORM,
    ONE,
    ONE_LAYER,
    SEED,
    TP2,
    Cell,
    Seen,
    assemble,
    bits_that_differ,
    build_graph,
    optimizing,
    train,
)
from test_every_family import MODELS
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.optim import Optimizer

from pool import run_on
from torchtitan_graph.compiler import Extra, Pass
from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.edit import call
from torchtitan_graph.models.layers.init import initialize
from torchtitan_graph.optim import build_lr_scheduler, build_optimizer, forget_rehearsal
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.storage import cast_parameters, materialize, plan_storage
from torchtitan_graph.steps import GraphUpdate, Steps

LAYOUTS = {"one-rank": ONE, "FSDP-2": FSDP2, "TP-2": TP2}
FAST = [("llama3-debugmodel", "TP-2")]
EP2 = ParallelDims(dp_shard=2, ep=2)
MOE = {"family": "qwen3", "flavor": "debugmodel_moe", "changes": (("num_layers", 4),)}
DUALPIPE = (("pipeline_parallel_schedule", "DualPipeV"), ("overlap_microbatches", True))
GROUPED = job.Optimizer(
    name="Adam",
    lr=1e-2,
    param_groups=[
        job.ParamGroup("*norm*", weight_decay=0.0, lr=3e-3),
        job.ParamGroup("layers.1.*", beta1=0.8, beta2=0.99),
    ],
)


class Job:
    """A model at rest, its optimizer and its schedule, and gradients of its layout: no step is traced."""

    def __init__(self, cell: Cell, config: job.Optimizer, in_graph: bool) -> None:
        assembly = assemble(cell)
        self.model, layout, options = assembly.model, assembly.layout, assembly.options
        assembly.prepare()
        cast_parameters(self.model, options.precision.storage)
        self.storages = plan_storage(self.model, layout, options.precision)
        materialize(self.model, self.storages, options.target.device)
        initialize(self.model, SEED)
        self.steps = Steps(self.model, layout, None, None)  # type: ignore[arg-type]
        if config.name == "torch.optim.Muon":  # takes matrices alone
            for parameter in self.model.parameters():
                parameter.requires_grad_(parameter.dim() == 2)
        self.optimizer = build_optimizer(self.model, config)
        forget_rehearsal(self.optimizer)
        self.schedule = build_lr_scheduler(self.optimizer, job.LRScheduler(warmup_steps=2), 4)
        self.update = GraphUpdate(self.steps, self.optimizer, MAX_NORM)
        self.in_graph = in_graph
        self.limits: Tensor | None = None

    def step(self, number: int, loss: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        for name, parameter in self.model.named_parameters():
            padded = torch.randn(self.storages[name].padded_shape, generator=generator)
            if not parameter.requires_grad:
                continue
            parameter.grad = self.storages[name].unflatten([padded])
        if self.in_graph:
            norm = self.update.clip(torch.tensor(loss), self.limits)
        else:
            norm = self.steps.clip(MAX_NORM)
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return norm

    def seen(self) -> Seen:
        return state_of(self.model, self.optimizer)


def state_of(model: torch.nn.Module, optimizer: Optimizer) -> Seen:
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{name}.{key}": x.clone() for key, x in optimizer.state[p].items()}
    return found


def differences(cell: Cell, config: job.Optimizer) -> list[str]:
    eager, traced = (Job(cell, config, in_graph) for in_graph in (False, True))
    norms = [{f"norm {k}": each.step(k) for k in range(1, 5)} for each in (eager, traced)]
    return bits_that_differ(eager.seen() | norms[0], traced.seen() | norms[1])


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, marks=[] if (model, layout) in FAST else [pytest.mark.slow])
        for model in MODELS
        for layout in LAYOUTS
    ],
)
def test_every_family(model: str, layout: str) -> None:
    """Over four steps of a schedule."""
    cell = Cell(LAYOUTS[layout], **MODELS[model])
    for different in run_on(cell.dims.num_ranks, differences, cell, job.Optimizer(lr=1e-2)):
        assert different == []


OTHERS = {
    "Adam, for-loop": job.Optimizer("Adam", lr=1e-2, implementation="for-loop"),
    "AdamW, foreach, in groups": dataclasses.replace(GROUPED, name="AdamW", implementation="foreach"),
    "SGD": job.Optimizer("torch.optim.SGD", lr=1e-2, options={"momentum": 0.9, "nesterov": True}),
    "SGD, foreach, without state": job.Optimizer("torch.optim.SGD", lr=1e-2, options={"foreach": True}),
    "RMSprop, foreach": job.Optimizer("torch.optim.RMSprop", options={"momentum": 0.9, "foreach": True}),
    "Adagrad": job.Optimizer("torch.optim.Adagrad", options={"lr_decay": 0.1}),
}


FAST_OTHERS = ("SGD, foreach, without state",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST_OTHERS else [pytest.mark.slow]) for name in OTHERS]
)
def test_every_optimizer_in_FSDP(name: str) -> None:
    """That one too which makes its state in its first step."""
    assert run_on(2, differences, Cell(FSDP2, **ONE_LAYER), OTHERS[name]) == [[], []]


def refusal(cell: Cell, config: job.Optimizer) -> str:
    try:
        differences(cell, config)
    except UserError as error:
        return str(error)
    return "not refused"


def test_Muon_takes_whole_matrices() -> None:
    assert run_on(1, differences, Cell(**ONE_LAYER), job.Optimizer("torch.optim.Muon", lr=1e-2)) == [[]]
    for said in run_on(2, refusal, Cell(FSDP2, **ONE_LAYER), job.Optimizer("torch.optim.Muon", lr=1e-2)):
        assert "'torch.optim.Muon': not with compile.optimizer_in_graph where ranks hold" in said


@pytest.mark.slow
def test_groups_of_settings_and_experts_on_a_mesh_of_their_own() -> None:
    cell = Cell(ParallelDims(dp_shard=2, ep=2), **MODELS["deepseek_v3-debugmodel"])
    assert run_on(2, differences, cell, GROUPED) == [[], []]


def test_an_entry_may_leave_the_first_group_empty() -> None:
    assert run_on(1, differences, Cell(), job.Optimizer(param_groups=[job.ParamGroup("*", lr=1e-2)])) == [[]]


def without_a_gradient() -> list[tuple[float, list[str]]]:
    """As on a pipeline's rank whose parameters the loss does not depend on."""
    found = []
    for in_graph in (False, True):
        each = Job(Cell(), job.Optimizer(lr=1e-2), in_graph)
        before = each.seen()
        norm = each.update.clip(torch.tensor(1.0)) if in_graph else each.steps.clip(MAX_NORM)
        found.append((float(norm), bits_that_differ(before, each.seen())))
    return found


def test_a_rank_may_have_no_gradient() -> None:
    assert run_on(1, without_a_gradient) == [[(0.0, []), (0.0, [])]]


def whole_runs_that_differ(cell: Cell) -> list[str]:
    seen = []
    for in_graph in (False, True):
        steps = build_graph(cell)
        using = optimizing(steps.model)
        seen.append(train(cell, steps, using=using, in_graph=in_graph) | state_of(steps.model, using[0]))
    return bits_that_differ(*seen)


@pytest.mark.parametrize(
    "cell",
    [
        Cell(FSDP2, num_microbatches=2, num_steps=3, **ONE_LAYER),
        pytest.param(Cell(ParallelDims(pp=2), num_microbatches=2, tied=True), marks=pytest.mark.slow),
        pytest.param(Cell(FSDP2, num_microbatches=2), marks=pytest.mark.slow),
        pytest.param(Cell(EP2, BF16, pairs=True, once="all", num_microbatches=4, **MOE), marks=pytest.mark.slow),
        pytest.param(
            Cell(dataclasses.replace(EP2, pp=2), BF16, num_microbatches=4, pipeline=DUALPIPE, **MOE),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["FSDP-2, one layer", "PP-2, tied", "FSDP-2", "EP-2, pairs once a step", "PP-2 EP-2, pairs"],
)
def test_whole_training_steps(cell: Cell) -> None:
    assert run_on(cell.dims.num_ranks, whole_runs_that_differ, cell) == [[]] * cell.dims.num_ranks


# --- what else a run does between steps -------------------------------------------------------------------------------


def now_and_then_in_the_graph() -> list[str]:
    eager, mixed = (Job(Cell(), job.Optimizer(lr=1e-2), False) for _ in range(2))
    for k in range(1, 5):
        eager.step(k)
        mixed.in_graph = k in (2, 4)
        mixed.step(k)
    return bits_that_differ(eager.seen(), mixed.seen())


def test_a_run_goes_on_either_way() -> None:
    """The state is one, and so is what is saved of it, whether a run traces its step or not."""
    assert run_on(1, now_and_then_in_the_graph) == [[]]


def after_a_step_that_is_not_taken(loss: float, gradient: float, by: str = "fused") -> tuple[list[str], float]:
    each = Job(Cell(FSDP2, **ONE_LAYER), job.Optimizer(lr=1e-2, implementation=by), True)
    each.step(1)
    before, bad = each.seen(), dist.get_rank() == 1
    right = each.storages["norm.weight"].unflatten
    if bad:
        spoilt = dataclasses.replace(each.storages["norm.weight"])
        object.__setattr__(spoilt, "unflatten", lambda tensors: right([tensors[0] * gradient]))
        each.storages["norm.weight"] = spoilt
    norm = each.step(2, loss if bad else 1.0)
    return bits_that_differ(before, each.seen()), float(norm)


@pytest.mark.parametrize(
    ("loss", "gradient", "is_taken", "by"),
    [
        (float("nan"), 1.0, False, "fused"),
        pytest.param(float("inf"), 1.0, False, "fused", marks=pytest.mark.slow),
        pytest.param(1.0, float("nan"), False, "fused", marks=pytest.mark.slow),
        (1.0, 1.0, True, "fused"),
        pytest.param(1.0, float("nan"), False, "foreach", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_is_not_finite_on_one_rank_changes_nothing_on_any(
    loss: float, gradient: float, is_taken: bool, by: str
) -> None:
    for different, norm in run_on(2, after_a_step_that_is_not_taken, loss, gradient, by):
        assert bool(different) == is_taken
        assert (norm == norm) == (gradient == 1.0)


def after_a_step_with_limits(limits: tuple[float, float], config: job.Optimizer) -> tuple[bool, float]:
    each = Job(Cell(FSDP2, **ONE_LAYER), config, True)
    each.step(1)
    before = each.seen()
    each.limits = torch.tensor(limits, dtype=torch.float64)
    each.step(2, 1.5)
    return bool(bits_that_differ(before, each.seen())), float(each.update.stops)  # type: ignore[arg-type]


@pytest.mark.parametrize(("limits", "is_taken"), [((3.0, 1e9), True), ((2.9, 1e9), False), ((3.0, 1.0), False)])
def test_a_step_above_a_limit_is_not_taken(limits: tuple[float, float], is_taken: bool) -> None:
    """The losses of two ranks are 1.5 each."""
    found = run_on(2, after_a_step_with_limits, limits, job.Optimizer(lr=1e-2))
    assert found == [(is_taken, float(not is_taken))] * 2


@pytest.mark.slow
def test_nor_by_Muon_in_its_graph() -> None:
    assert run_on(2, after_a_step_with_limits, (2.9, 1e9), job.Optimizer("Muon", lr=1e-2)) == [(False, 1.0)] * 2


def after_a_first_step_that_is_not_taken() -> list[str]:
    eager, traced = (Job(Cell(), OTHERS["SGD"], in_graph) for in_graph in (False, True))
    before = traced.seen()
    traced.step(1, float("nan"))
    different = bits_that_differ(before, traced.seen())
    eager.schedule.step()
    for k in (2, 3):
        eager.step(k)
        traced.step(k)
    return different + bits_that_differ(eager.seen(), traced.seen())


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_the_first_step_that_is_taken_makes_the_state() -> None:
    assert run_on(1, after_a_first_step_that_is_not_taken) == [[]]


def addresses_and_nodes() -> tuple[bool, list[str], list[str]]:
    each = Job(Cell(FSDP2, **ONE_LAYER), job.Optimizer(lr=1e-2), True)

    def held() -> list[int]:
        tensors = [x for p in each.model.parameters() for x in (p, *each.optimizer.state[p].values())]
        return [(x.to_local() if isinstance(x, DTensor) else x).data_ptr() for x in tensors]

    before = held()
    each.step(1)
    gradients = {name: p.detach().clone() for name, p in each.model.named_parameters()}
    gm = each.update.trace(gradients, torch.tensor(1.0)).gm
    signature = [f"{slot.kind} {slot.name}" for slot in gm.meta["signature"].inputs]
    return before == held(), [str(node.target) for node in gm.graph.nodes if node.op == "call_function"], signature


def test_it_is_one_graph_with_its_collectives_that_writes_in_place() -> None:
    for are_held, nodes, inputs in run_on(2, addresses_and_nodes):
        assert are_held
        assert nodes.count("_c10d_functional.all_reduce.default") == 2  # of the squares, and of who is not finite
        assert nodes.count("aten._fused_adamw_.tensor_lr") == 1
        assert "aten.empty_strided.default" not in nodes
        assert not [node for node in nodes if node.startswith(("profiler.", "aten.detach", "c10d."))]
        assert "optim group of layers.0.attention.wk.weight.lr" in inputs  # what a schedule sets is not a constant
        assert "optim norm.weight.step" in inputs


def outcome_of_verifying(spoil: bool) -> str:
    each = Job(Cell(FSDP2, **ONE_LAYER), job.Optimizer(lr=1e-2), True)
    each.update = GraphUpdate(each.steps, each.optimizer, MAX_NORM, extra=[DOUBLE_RATES] * spoil, verify=True)
    try:
        each.step(1)
    except RuntimeError as error:
        return str(error)
    return ""


def double_rates(gm: GraphModule) -> GraphModule:
    """Let the update take twice the learning rate: what the graph gives, the norm, does not tell."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten._fused_adamw_.tensor_lr):
        with gm.graph.inserting_before(node):
            lr = call(gm.graph, node, torch.ops.aten.mul.Tensor, node.kwargs["lr"], 2.0)
        node.update_kwarg("lr", lr)
    return gm


DOUBLE_RATES = Extra("cleanup_update", Pass("double_rates", double_rates))


def test_a_pass_that_spoils_the_update_is_named() -> None:
    assert run_on(2, outcome_of_verifying, False) == ["", ""]
    for message in run_on(2, outcome_of_verifying, True):
        assert "pass double_rates promises the same numbers bit for bit" in message
        assert "param tok_embeddings.weight afterwards" in message


def changed_settings(key: str, value: object) -> str:
    each = Job(Cell(), job.Optimizer(lr=1e-2), True)
    each.step(1)
    each.optimizer.param_groups[0][key] = value
    try:
        each.step(2)
    except ValueError as error:
        return str(error)
    return ""


def test_a_setting_that_is_a_constant_of_the_graph_is_refused_by_name() -> None:
    (message,) = run_on(1, changed_settings, "weight_decay", 0.5)
    assert "weight_decay is 0.5, traced with 0.1" in message
    assert run_on(1, changed_settings, "lr", 0.5) == [""]
