"""A traced graph as a module of torch: what only checks is kept, and torch compiles it, before it ever ran."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sized import CAPTURES
from torch import Tensor, nn

from torchtitan_graph.capture.trace import make_fx_capture, minimal_fx_tracer
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.passes.cleanup import cleanup

X = torch.ones(2, 3)


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("message", [(), ("x must be above 0",)])
def test_an_assertion_is_kept(message: tuple[str, ...], capture: str) -> None:
    def fn(x: Tensor) -> Tensor:
        torch._assert_async(x.sum() > 0, *message)
        return x * 2

    traced = CAPTURES[capture](fn)(X)
    cleanup(traced.gm)
    run = run_traced(traced)
    assert torch.equal(run(X), fn(X))
    with pytest.raises(RuntimeError, match=(*message, "nonzero value")[0]):
        run(-X)


def chain() -> tuple[nn.Module, Callable[[Tensor], Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))

    def step(x: Tensor) -> Any:
        loss = model(x).square().mean()
        return loss, list(torch.autograd.grad(loss, list(model.parameters())))

    return model, step


@pytest.mark.parametrize("is_cleaned", [False, True])
@pytest.mark.parametrize("capture", [minimal_fx_tracer, make_fx_capture])
def test_torch_compiles_a_graph_that_never_ran(capture: Callable[..., Any], is_cleaned: bool) -> None:
    model, step = chain()
    gm = capture(step, model, blocks=dict(model.named_children()))(X).gm
    with torch.no_grad():
        compiled = torch.compile(cleanup(gm) if is_cleaned else gm, backend="eager", fullgraph=True)
        loss, *gradients = compiled(*model.parameters(), X)
    expected_loss, expected = step(X)
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_a_graph_with_a_branch_is_compiled_too() -> None:
    gm = minimal_fx_tracer(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))(X).gm
    for x in (X, -X):
        found = torch.compile(gm, backend="eager", fullgraph=True)(x)
        assert torch.equal(found[0], torch.sin(x) if x is X else torch.cos(x))
