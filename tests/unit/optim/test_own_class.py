"""An optimizer of the user's takes its own steps, and its state goes through a checkpoint; what can't is refused."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from pool import run_on
from torchtitan_graph.checkpoint import Checkpointer
from torchtitan_graph.config import job
from torchtitan_graph.config.own import find_own
from torchtitan_graph.errors import UserError
from torchtitan_graph.optim import (
    build_lr_scheduler,
    build_optimizer,
    check_first_step,
    check_optimizer,
    forget_rehearsal,
)
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.storage import Precision, plan_storage
from torchtitan_graph.torch_private.distributed import init_fake_process_group

CLASSES = {
    "torch.optim.SGD": {"momentum": 0.9, "dampening": 0.5},  # its first momentum is the gradient, undamped
    "torch.optim.NAdam": {},  # has a product that begins with 1
    "torch.optim.Adagrad": {"initial_accumulator_value": 0.5},  # has its state from when it is built
    "torch.optim.Adamax": {},
    "own.Sign": {"momentum": 0.8},
}


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: range) -> list[torch.Tensor]:
    for step in steps:
        torch.manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def config_of(name: str) -> job.Optimizer:
    return job.Optimizer(name=name, lr=0.1, weight_decay=0.1, options=CLASSES.get(name, {}))


def own(name: str, model: nn.Module) -> torch.optim.Optimizer:
    module, _, leaf = name.rpartition(".")
    cls = getattr(__import__(module, fromlist=[leaf]), leaf)
    settings = {"weight_decay": 0.1} if leaf != "Sign" else {}
    settings |= {"betas": (0.9, 0.95)} if leaf in ("NAdam", "Adamax") else {}
    settings |= {"eps": 1e-8} if leaf in ("NAdam", "Adamax", "Adagrad") else {}
    return cls(model.parameters(), lr=0.1, **settings, **CLASSES[name])


@pytest.mark.parametrize("name", CLASSES)
def test_steps_are_bitwise_those_of_the_class(name: str) -> None:
    ours, theirs = make_model(), make_model()
    torch.manual_seed(5)
    optimizer = build_optimizer(ours, config_of(name))
    forget_rehearsal(optimizer)
    torch.manual_seed(5)
    assert all(map(torch.equal, train(optimizer, ours, range(3)), train(own(name, theirs), theirs, range(3))))


def test_without_forgetting_the_rehearsal_the_steps_would_differ() -> None:
    ours, theirs = make_model(), make_model()
    optimizer = build_optimizer(ours, config_of("torch.optim.SGD"))
    ran = zip(train(optimizer, ours, range(3)), train(own("torch.optim.SGD", theirs), theirs, range(3)), strict=True)
    assert not all(torch.equal(a, b) for a, b in ran)


def test_a_rehearsal_changes_neither_parameters_nor_random_state() -> None:
    model = make_model()
    before, random = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    build_optimizer(model, config_of("own.Sign"))
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(random, torch.get_rng_state())
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("name", [*CLASSES, "torch.optim.SGD without state"])
def test_a_resumed_run_ends_on_the_same_bits(name: str, tmp_path: Path) -> None:
    config = config_of(name) if name in CLASSES else job.Optimizer(name="torch.optim.SGD", lr=0.1)

    def run() -> tuple[nn.Module, torch.optim.Optimizer, Checkpointer]:
        model = make_model()
        optimizer = build_optimizer(model, config)
        scheduler = build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=0), 10)
        saving = job.Checkpoint(enable=True)
        return model, optimizer, Checkpointer(tmp_path, saving, model, optimizer, scheduler)

    model, optimizer, checkpointer = run()
    forget_rehearsal(optimizer)
    train(optimizer, model, range(2))
    checkpointer.save(2, {"step": 2})
    resumed, resumed_optimizer, checkpointer = run()
    assert checkpointer.load() == {"step": 2}
    straight = train(optimizer, model, range(2, 4))
    assert all(map(torch.equal, straight, train(resumed_optimizer, resumed, range(2, 4))))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CountsInPython", "its state 'count' of 0.weight is not a tensor, but 1; make it one"),
        ("CountsInGroup", "a step changes 'count' of its param_groups"),
        ("HasGlobal", "'everything' that belongs to no parameter"),
        ("NeedsClosure", "can't take a step"),
    ],
)
def test_a_class_that_could_not_be_resumed_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        build_optimizer(make_model(), job.Optimizer(name=f"own.{name}"))
    assert message in str(caught.value) and name in str(caught.value)


def test_a_step_that_wants_a_closure_is_refused_before_any_work() -> None:
    with pytest.raises(UserError, match="optimizer.name: LBFGS can't take a step: missing a required argument"):
        check_optimizer(make_model(), job.Optimizer(name="torch.optim.LBFGS"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch.optim.Rprop", "Rprop can't take a step on parameters laid out over ranks"),
        ("torch.optim.SparseAdam", "SparseAdam can't take a step"),
        ("own.CountsInPython", "its state 'count' of 0.weight is not a tensor, but 1; make it one"),
        ("torch.optim.SGD", None),
    ],
)
def test_a_dry_run_takes_the_first_step_on_small_parameters(name: str, message: str | None) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**40, 3), nn.Linear(3, 2**40))
    init_fake_process_group(8)
    try:
        storages = plan_storage(model, ParallelDims(dp_shard=8).layout("cpu"), Precision())
        with pytest.raises(UserError) if message else nullcontext() as caught:
            check_first_step(model, storages, job.Optimizer(name=name))
    finally:
        dist.destroy_process_group()
    assert all(param.is_meta for param in model.parameters())
    assert message is None or message in str(caught.value)


@pytest.mark.parametrize(
    ("option", "hint"), [("momentun", "did you mean momentum?"), ("zz", "it takes params, lr, alpha, eps,")]
)
def test_an_option_that_the_class_does_not_take_is_named(option: str, hint: str) -> None:
    options = job.Optimizer(name="torch.optim.RMSprop", options={option: 0.5})
    with pytest.raises(UserError) as caught:
        build_optimizer(make_model(), options)
    assert f"optimizer.options: '{option}': torch.optim.RMSprop does not take it; {hint}" in str(caught.value)


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_an_option_that_no_step_can_be_taken_with_is_named(option: str) -> None:
    options = job.Optimizer(name="torch.optim.RMSprop", options={option: True})
    with pytest.raises(UserError, match=f"optimizer.options: RMSprop can't take a step with {option} .*; remove it"):
        build_optimizer(make_model(), options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "nowhere.Sign"}, "nowhere can't be imported"),
        ({"name": "own.Sing"}, "own has no Sing; did you mean Sign?"),
        ({"name": "own.Any"}, "must be a class derived from torch.optim.Optimizer"),
        ({"name": "own.WithoutRate"}, "must take lr"),
        ({"name": "own.Sign", "options": {"mometum": 1.0}}, "own.Sign does not take it; did you mean momentum?"),
        ({"name": "own.Sign", "weight_decay": 0.5}, "optimizer.weight_decay = 0.5: own.Sign does not take it"),
        ({"name": "own.Sign", "implementation": "foreach"}, "is for Adam and AdamW"),
        (
            {"name": "own.Sign", "param_groups": [job.ParamGroup("*", beta1=0.5)]},
            "optimizer.param_groups: beta1: own.Sign does not take it",
        ),
        ({"options": {"momentum": 0.5}}, "is for an optimizer with a dotted name"),
        ({"name": "torch.optim.Muon"}, "Muon only supports 2D parameters"),
        ({"name": "torch.optim.SGD", "options": {"nesterov": True}}, "Nesterov momentum requires a momentum"),
    ],
)
def test_what_the_class_does_not_take_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_optimizer(make_model().to("meta"), job.Optimizer(**changes))
    assert message in str(caught.value)


def build_on_shards(name: str, folder: str, options: dict[str, object] | None = None) -> str:
    import sys

    sys.path.insert(0, folder)
    model = fully_shard(make_model())
    try:
        optimizer = build_optimizer(model, job.Optimizer(name=name, options=options or {}))
    except UserError as error:
        return str(error)
    return type(optimizer.state[model[0].weight]["momentum"]).__name__


@pytest.mark.parametrize(
    ("name", "said"), [("own.Sign", "DTensor"), ("own.KeepsLocal", "its state 'own' of 0.weight is this rank's alone")]
)
def test_state_of_shards_is_sharded_too(name: str, said: str) -> None:
    assert all(said in answer for answer in run_on(2, build_on_shards, name, str(Path(__file__).parent)))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("SGD", {"fused": True, "momentum": 0.9}, "optimizer.options: SGD can't take a step with fused"),
        ("Rprop", {}, "optimizer.name: Rprop can't take a step on parameters laid out over ranks"),
    ],
)
def test_what_torch_has_for_no_shards_is_named(name: str, options: dict[str, object], said: str) -> None:
    (answer,) = run_on(1, build_on_shards, f"torch.optim.{name}", str(Path(__file__).parent), options)
    assert answer.startswith(said)


@pytest.mark.parametrize("name", ["Sign", "/own.Sign", "..", "own.", ".Sign", "own..Sign"])
def test_what_is_no_dotted_name_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="is not a dotted name, such as my_package.my_name"):
        find_own("optimizer.name", name)
