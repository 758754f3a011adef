"""Moments in another dtype than the parameters: torch's own Adam in fp32, rounded after each step."""

import pytest
import torch
from torch import nn

from torchtitan_graph.config import job
from torchtitan_graph.optim import build_optimizer


def model_with_gradients(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 3).to(dtype)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("implementation", ["fused", "for-loop"])
def test_a_step_is_torchs_on_the_widened_moments(name: str, implementation: str) -> None:
    ours, theirs = model_with_gradients(), model_with_gradients()
    config = job.Optimizer(name, lr=1e-2, implementation=implementation, state_dtype="bfloat16")
    optimizer = build_optimizer(ours, config)
    reference = build_optimizer(theirs, job.Optimizer(name, lr=1e-2, implementation=implementation))
    for step in range(3):
        torch.manual_seed(step)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p, q)
            for key in ("exp_avg", "exp_avg_sq"):
                rounded = reference.state[q][key].bfloat16()
                assert torch.equal(optimizer.state[p][key], rounded)
                reference.state[q][key].copy_(rounded)


def test_parameters_of_bfloat16_may_have_moments_of_float32() -> None:
    model = model_with_gradients(torch.bfloat16)
    optimizer = build_optimizer(model, job.Optimizer(state_dtype="float32"))
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    before = model.weight.detach().clone()
    optimizer.step()
    assert optimizer.state[model.weight]["exp_avg"].dtype == torch.float32
    assert model.weight.dtype == torch.bfloat16 and not torch.equal(model.weight, before)


@pytest.mark.parametrize("stops", [0.0, 1.0])
def test_a_step_that_is_not_to_be_taken_touches_nothing(stops: float) -> None:
    model = model_with_gradients()
    optimizer = build_optimizer(model, job.Optimizer(state_dtype="bfloat16"))
    for number in range(2):
        before = [x.clone() for p in model.parameters() for x in (p.detach(), *optimizer.state[p].values())]
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.found_inf = torch.tensor(stops if number else 0.0)
        optimizer.step()
    after = [x for p in model.parameters() for x in (p.detach(), *optimizer.state[p].values())]
    assert all(map(torch.equal, before, after)) == bool(stops)
