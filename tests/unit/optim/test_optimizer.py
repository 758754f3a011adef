"""The optimizer: torch's own, on the live parameters, with its state there from the start."""

import pytest
import torch
from torch import nn

from torchtitan_graph.config import job
from torchtitan_graph.optim import build_optimizer


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
