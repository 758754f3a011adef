"""The moving average of the weights: what it is after steps, and that the weights come back from under it."""

import pytest
import torch
from torch import nn

from torchtitan_graph.config import job
from torchtitan_graph.optim import Average, build_optimizer


def test_it_is_the_weighted_mean_of_what_the_weights_were() -> None:
    model = nn.Linear(3, 2, bias=False).to(torch.bfloat16)
    optimizer = build_optimizer(model, job.Optimizer(ema_decay=0.75))
    average = Average(optimizer, 0.75)
    average.begin()
    values = [model.weight.detach().double()]
    for step in range(3):
        with torch.no_grad():
            model.weight.fill_(step)
        average.update()
        values.append(model.weight.detach().double())
    shares = (0.75**3, 0.25 * 0.75**2, 0.25 * 0.75, 0.25)
    expected = sum(share * value for share, value in zip(shares, values, strict=True))
    held = optimizer.state[model.weight]["average"]
    assert held.dtype == torch.float32
    torch.testing.assert_close(held.double(), expected, rtol=1e-6, atol=1e-7)


def test_the_weights_come_back_even_from_an_error() -> None:
    model = nn.Linear(3, 2)
    average = Average(build_optimizer(model, job.Optimizer(ema_decay=0.9)), 0.9)
    before = model.weight.detach().clone()
    with pytest.raises(ZeroDivisionError), average.in_place_of_weights():
        assert not model.weight.any()  # it has not begun
        raise ZeroDivisionError
    assert torch.equal(model.weight, before)
