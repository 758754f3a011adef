"""`torch.cond` and `while_loop`: one operator with subgraphs, traced with symbols where only a run knows the rounds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

from torchtitan_graph.capture.dynamo import CAPTURES, dynamo_capture
from torchtitan_graph.capture.trace import InParts, capture_step, minimal_fx_tracer
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.errors import UserError

X = torch.rand(2, 3, generator=torch.Generator().manual_seed(0))


def doubled(x: Tensor) -> Tensor:
    return while_loop(lambda i, y: y.sum() < 100, lambda i, y: (i + 1, y * y + 1), (torch.tensor(0), x))[1]


@pytest.mark.parametrize("capture", ["make_fx", "dynamo"])
def test_a_loop_runs_as_often_as_the_call_says(capture: str) -> None:
    model = nn.Linear(3, 3)
    traced = minimal_fx_tracer(doubled)(X) if capture == "make_fx" else dynamo_capture(doubled, model)(X)
    run = run_traced(traced, None if capture == "make_fx" else model)
    for x in (X, X * 50):
        assert torch.equal(run(x), doubled(x))


@pytest.mark.parametrize("capture", ["make_fx", "dynamo"])
def test_the_gradient_of_a_loop_is_eagers_and_refused_in_a_training_step(capture: str) -> None:
    model = nn.Linear(3, 3)

    def forward(x: Tensor) -> Tensor:
        return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, model(y)), (torch.tensor(0), x))[1]

    def whole(forward: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        return torch.autograd.grad(forward(x).sum(), list(model.parameters()))

    step = InParts(whole, forward)
    run = run_traced(CAPTURES[capture](step, model)(X), model)
    torch.testing.assert_close(run(X), step(X), rtol=0, atol=0)
    with pytest.raises(UserError, match="gives what only a run knows .while_loop_stack_output.: a training step's"):
        capture_step(CAPTURES[capture], step, model, device=None)(X)


def test_a_branch_may_call_a_module() -> None:
    model = nn.Linear(3, 3)

    def fn(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: model(x), lambda x: model(x).sin(), (x,))

    run = run_traced(minimal_fx_tracer(fn, model, call_hierarchy=True)(X), model)
    for x in (X, -X):
        assert torch.equal(run(x), fn(x))


def test_a_reentrant_checkpoint_goes_with_backward_alone() -> None:
    model = nn.Linear(3, 3)

    def step(x: Tensor) -> Any:
        checkpoint(model, x.detach().requires_grad_(), use_reentrant=True).sum().backward()
        return [p.grad for p in model.parameters()]

    run = run_traced(minimal_fx_tracer(step, model)(X), model)
    found, expected = run(X), step(X)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
