"""The optimizer: torch's own, on the live parameters, with its state there from the start."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from pool import mesh, run_on
from torchtitan_graph.config import job
from torchtitan_graph.optim import build_optimizer, takes_stops


def train(optimizer: torch.optim.Optimizer, model: nn.Module, num_steps: int = 3) -> None:
    torch.manual_seed(1)
    for _ in range(num_steps):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()


def tied_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_steps_are_bitwise_those_of_the_torch_optimizer(name: str, implementation: str) -> None:
    ours, theirs = tied_model(), tied_model()
    config = job.Optimizer(name=name, implementation=implementation, lr=1e-2, beta1=0.8, beta2=0.9, eps=1e-6)
    reference = getattr(torch.optim, name)(
        theirs.parameters(),
        lr=1e-2,
        betas=(0.8, 0.9),
        eps=1e-6,
        weight_decay=0.1,
        fused=implementation == "fused",
        foreach=implementation == "foreach",
    )
    train(build_optimizer(ours, config), ours)
    train(reference, theirs)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_state_is_there_before_the_first_step_and_stays_the_same_tensors(implementation: str) -> None:
    model = tied_model()
    optimizer = build_optimizer(model, job.Optimizer(implementation=implementation))
    before = {(param, key): id(value) for param in model.parameters() for key, value in optimizer.state[param].items()}
    assert {key for _, key in before} == {"step", "exp_avg", "exp_avg_sq"}
    train(optimizer, model)
    after = {(param, key): id(value) for param in model.parameters() for key, value in optimizer.state[param].items()}
    assert after == before
    assert all(optimizer.state[param]["step"].item() == 3 for param in model.parameters())


def test_frozen_parameters_have_no_state() -> None:
    model = tied_model()
    model[0].bias.requires_grad_(False)
    optimizer = build_optimizer(model, job.Optimizer())
    assert model[0].bias not in optimizer.state
    assert len(optimizer.param_groups[0]["params"]) == 2  # the tied weight, once, and the other bias


def test_on_meta_adam_has_a_state_without_numbers_and_no_class_is_rehearsed() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    assert build_optimizer(model, job.Optimizer()).state[model.weight]["exp_avg"].is_meta
    with pytest.raises(AssertionError, match="needs numbers"):
        build_optimizer(model, job.Optimizer(name="torch.optim.SGD"))


def step_with_stops(name: str) -> list[bool]:
    """Step parameters of two meshes when the step is to be taken and when not: is it the plain step, or none?"""
    whole, halves = mesh((2,), ("dp_shard",)), mesh((1, 2), ("pp", "ep"))
    layouts = [(whole, [Shard(0)]), (halves, [Replicate(), Shard(0)])]

    def train_once(stops: float | None) -> tuple[list[Tensor], list[Tensor]]:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(4, 3, generator=generator) for _ in range(2 * len(layouts))]
        there = [distribute_tensor(x, *each) for x, each in zip(values, layouts * 2, strict=True)]
        params = [nn.Parameter(x) for x in there[:2]]
        optimizer = build_optimizer(nn.ParameterList(params), job.Optimizer(name=name, weight_decay=0.1))
        assert takes_stops(optimizer, torch.device("cpu")) and not takes_stops(optimizer, torch.device("cuda"))
        for param, gradient in zip(params, there[2:], strict=True):
            param.grad = gradient
        before = held(params, optimizer)
        if stops is not None:
            optimizer.found_inf = torch.tensor(stops)
        optimizer.step()
        return before, held(params, optimizer)

    (before, plain), (_, taken), (_, not_taken) = train_once(None), train_once(0.0), train_once(1.0)
    return [all(map(torch.equal, *pair)) for pair in ((plain, taken), (before, not_taken), (before, plain))]


def held(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copy this rank's parts of parameters and state."""
    all_held = [*params, *(x for param in params for x in optimizer.state[param].values())]
    return [(x.to_local() if isinstance(x, DTensor) else x).detach().clone() for x in all_held]


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_a_step_that_is_not_to_be_taken_touches_nothing(name: str) -> None:
    assert run_on(2, step_with_stops, name) == [[True, True, False]] * 2
