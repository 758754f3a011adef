"""Gradients, steps and writes that a graph would lose are refused by name, and what is live stays as it was."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchtitan_graph.capture.dynamo import dynamo_capture
from torchtitan_graph.capture.trace import InParts, minimal_fx_tracer
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.errors import UserError

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
MAKE = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


def stepped(make: Callable, *, parts: bool = False) -> tuple[nn.Linear, list[torch.optim.Optimizer]]:
    """Give a layer that took a step, with one optimizer or one for each parameter, and gradients of another step."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizers = [make([p]) for p in model.parameters()] if parts else [make(model.parameters())]
    for i in range(2):
        model(X).square().mean().backward()
        for each in optimizers if i == 0 else ():
            each.step()
    return model, optimizers


def everything(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    """Give all that is live: parameters, gradients (themselves, and their numbers), state."""
    state = [x for each in optimizers for held in each.state.values() for x in held.values()]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *state]
    return [(id(x), None if x is None else x.tolist(), type(x), x is not None and x.requires_grad) for x in tensors]


def training(model: nn.Module, stepper: Any) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        stepper.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        stepper.step()
        return loss.detach()

    return step


class Container(torch.optim.Optimizer):
    def __init__(self, inner: list[torch.optim.Optimizer]) -> None:
        super().__init__([p for each in inner for group in each.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        for each in self.inner:
            each.step()


class Shares(torch.optim.Optimizer):
    """Has the groups and the state of an inner one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("passed", ["module", "nothing"])
def test_the_step_of_an_optimizer_that_is_not_passed_is_refused(name: str, passed: str) -> None:
    model, (optimizer,) = stepped(MAKE[name])
    before = everything(model, [optimizer])
    with pytest.raises(UserError, match="takes a step of an optimizer|passes over|backward reaches .*model.weight"):
        minimal_fx_tracer(training(model, optimizer), model if passed == "module" else None)(X)
    assert everything(model, [optimizer]) == before


def test_a_forward_that_dynamo_takes_is_no_other() -> None:
    model, (optimizer,) = stepped(MAKE["SGD"])

    def whole(forward: Callable, x: Tensor) -> Tensor:
        loss = forward(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with pytest.raises(UserError, match=r"takes a step of an optimizer \(SGD\), which was not passed: .*optimizer="):
        dynamo_capture(InParts(whole, lambda x: model(x)), model)(X)


@pytest.mark.parametrize("make", [Container, lambda inner: Shares(inner[0])])
def test_an_optimizer_inside_another_is_refused(make: Callable) -> None:
    model, inner = stepped(MAKE["SGD"], parts=make is Container)
    before = everything(model, inner)
    container = make(inner)
    with pytest.raises(UserError, match=r"an optimizer \(SGD\), inside the (Container|Shares) that was passed"):
        minimal_fx_tracer(training(model, container), model, container)(X)
    assert everything(model, inner) == before


def test_the_second_of_two_optimizers_is_refused() -> None:
    model, (first, second) = stepped(MAKE["SGD"], parts=True)

    def step(x: Tensor) -> None:
        training(model, first)(x)
        second.step()

    with pytest.raises(UserError, match=r"an optimizer \(SGD\), inside the SGD that was passed"):
        minimal_fx_tracer(step, model, first)(X)


def backward_alone(model: nn.Module) -> Callable:
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return step


def one_of_two(model: nn.Module) -> Callable:
    def step(x: Tensor) -> Any:
        loss = backward_alone(model)(x)
        return loss, model.bias.grad

    return step


@pytest.mark.parametrize(("make", "names"), [(backward_alone, "weight, bias"), (one_of_two, "weight")])
def test_gradients_that_nothing_takes_are_refused_by_name(make: Callable, names: str) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(UserError, match=rf"leaves gradients in \.grad of {names}, which no opti.*optimizer="):
        minimal_fx_tracer(make(model), model)(X)
    assert model.weight.grad is None


def test_what_an_optimizer_does_not_hold_is_refused_by_name() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD([model.bias], lr=0.1)
    with pytest.raises(UserError, match=r"in \.grad of weight, which no optimizer takes"):
        minimal_fx_tracer(training(model, optimizer), model, optimizer)(X)


def cleared(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable:
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        for p in model.parameters():
            p.grad.zero_()
        return loss.detach()

    return step


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable:
    def step(x: Tensor) -> Any:
        model(x).square().mean().backward()
        return [p.detach() - 0.1 * p.grad for p in model.parameters()]

    return step


@pytest.mark.parametrize(("make", "takes"), [(training, True), (cleared, True), (by_hand, False)])
def test_gradients_that_are_taken_are_left_to_the_function(make: Callable, takes: bool) -> None:
    model, (optimizer,) = stepped(MAKE["SGD"])
    traced = minimal_fx_tracer(make(model, optimizer), model, optimizer if takes else None)(X)
    run, (eager, (its,)) = run_traced(traced, model, optimizer if takes else None), stepped(MAKE["SGD"])
    eager.zero_grad()
    step = make(eager, its)
    for _ in range(3):
        torch.testing.assert_close(run(X), step(X), rtol=0, atol=0)
        eager.zero_grad()


def uncleared(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable:
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def partly(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable:
    return before(lambda: setattr(model.weight, "grad", None), uncleared(model, optimizer))


def before(deed: Callable, step: Callable) -> Callable:
    def both(x: Tensor) -> Any:
        deed()
        return step(x)

    return both


def after(deed: Callable, step: Callable) -> Callable:
    def both(x: Tensor) -> Any:
        result = step(x)
        deed()
        return result

    return both


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize(("make", "names"), [(uncleared, "weight, bias"), (partly, "bias")])
def test_gradients_that_add_up_from_call_to_call_are_refused_by_name(make: Callable, names: str, name: str) -> None:
    model, (optimizer,) = stepped(MAKE[name])
    was = everything(model, [optimizer])
    with pytest.raises(UserError, match=rf"adds to \.grad of {names}, which it does not clear: .*zero_grad\(\) in the"):
        minimal_fx_tracer(make(model, optimizer), model, optimizer)(X)
    assert everything(model, [optimizer]) == was


def zeroed(model: nn.Module) -> Callable:
    def clear() -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.detach_()
                p.grad.zero_()

    return clear


@pytest.mark.parametrize("name", ["SGD", "AdamW"])  # numbers that are read are symbols
@pytest.mark.parametrize("when", [before, after])
@pytest.mark.parametrize("how", ["to None", "to zeros", "by hand"])
def test_gradients_may_be_cleared_first_or_at_the_end(how: str, when: Callable, name: str) -> None:
    def cleared_so() -> tuple[Callable, nn.Module, torch.optim.Optimizer]:
        model, (optimizer,) = stepped(MAKE[name])
        model.unused = nn.Parameter(torch.ones(1))  # has no gradient
        clear = zeroed(model) if how == "by hand" else lambda: optimizer.zero_grad(set_to_none=how == "to None")
        clear()
        return when(clear, uncleared(model, optimizer)), model, optimizer

    (fn, model, optimizer), (eager, *_) = cleared_so(), cleared_so()
    run = run_traced(minimal_fx_tracer(fn, model, optimizer)(X), model, optimizer)
    for _ in range(3):
        assert torch.equal(run(X), eager(X))


def test_gradients_may_add_up_inside_a_call() -> None:
    model, (optimizer,) = stepped(MAKE["SGD"])

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        for part in x.split(2):
            model(part).square().mean().backward()
        optimizer.step()

    minimal_fx_tracer(step, model, optimizer)(X)


def test_a_step_on_gradients_from_outside_is_refused() -> None:
    model, (optimizer,) = stepped(MAKE["SGD"])
    with pytest.raises(UserError, match=r"step of SGD, and has computed no gradients: those .* in \.grad .* not read"):
        minimal_fx_tracer(lambda x: optimizer.step(), model, optimizer)(X)


@pytest.mark.parametrize(
    "register",
    [
        lambda o: o.register_step_post_hook(lambda *_: None),
        lambda o: o.register_step_pre_hook(lambda *_: None),
        lambda o: register_optimizer_step_post_hook(lambda *_: None),
    ],
)
def test_a_hook_on_a_step_is_refused(register: Callable) -> None:
    model, (optimizer,) = stepped(MAKE["SGD"])
    handle = register(optimizer)
    with pytest.raises(UserError, match="SGD has a hook on its step, which a graph would not call: remove it"):
        minimal_fx_tracer(training(model, optimizer), model, optimizer)(X)
    handle.remove()
    minimal_fx_tracer(training(model, optimizer), model, optimizer)(X)


# what is live stays as it was, whatever ends a trace


def closed_over(c: Tensor, model: nn.Module) -> Any:
    c.add_(1)


def of_a_parameter(c: Tensor, model: nn.Module) -> Any:
    c.mul_(model.weight[0])


def many(c: Tensor, model: nn.Module) -> Any:
    torch._foreach_add_([c], 1)


def out(c: Tensor, model: nn.Module) -> Any:
    torch.add(c, 1, out=c)


@pytest.mark.parametrize("deed", [closed_over, of_a_parameter, many, out])
@pytest.mark.parametrize("capture", ["make_fx", "dynamo"])
def test_a_trace_writes_to_nothing_that_is_live(deed: Callable, capture: str) -> None:
    model, c = nn.Linear(3, 3), torch.zeros(3)

    def step(x: Tensor) -> Tensor:
        deed(c, model)
        return x + c

    with pytest.raises(UserError, match="tensor that it closes over"):
        minimal_fx_tracer(step, model)(X) if capture == "make_fx" else dynamo_capture(step, model)(X)
    assert torch.equal(c, torch.zeros(3)) and not c.requires_grad and c._version == 0


@pytest.mark.parametrize("passed", [False, True])
def test_gradients_are_what_they_were_after_an_interrupt(passed: bool) -> None:
    model = nn.Linear(3, 3)
    model(X).sum().backward()
    before = [p.grad for p in model.parameters()]

    def step(x: Tensor) -> None:
        model.zero_grad()
        model(x).sum().backward()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        minimal_fx_tracer(step, model if passed else None)(X)
    assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))


def test_a_buffer_of_a_module_that_is_not_passed_stays_as_it_was() -> None:
    norm = nn.BatchNorm1d(3)
    with pytest.raises(UserError, match=r"to a tensor that it closes over, by aten.add_.Tensor \(test_"):
        minimal_fx_tracer(lambda x: norm(x))(X)
    assert norm.num_batches_tracked == 0 and torch.equal(norm.running_mean, torch.zeros(3))


# parameters under another reference


def test_a_gradient_of_parameters_listed_outside_is_refused_by_name() -> None:
    model = nn.Linear(3, 3)
    listed = list(model.parameters())
    for allow_unused in (False, True):
        with pytest.raises(UserError, match=r"differentiates by weight, bias as listed outside.*list\(model\.param"):
            minimal_fx_tracer(
                lambda x, a=allow_unused: torch.autograd.grad(model(x).sum(), listed, allow_unused=a), model
            )(X)


def test_a_parameter_read_by_a_reference_from_outside_is_refused_by_name() -> None:
    model = nn.Linear(3, 3)
    weight = model.weight
    with pytest.raises(UserError, match="reads weight by a reference that was made outside"):
        minimal_fx_tracer(lambda x: model(x).sum() + weight.square().sum(), model)(X)


def test_parameters_among_the_constants_are_told_once_by_name(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 3)
    with caplog.at_level(logging.WARNING):
        run = run_traced(minimal_fx_tracer(lambda x: model(x))(X))
    (told,) = [r.getMessage() for r in caplog.records if "constants of the trace" in r.getMessage()]
    assert "model.weight, model.bias" in told and "module=" in told
    assert torch.equal(run(X), model(X))


# what is found by what holds it


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(3, 3)

    def clear(self, x: Tensor) -> Tensor:
        self.model.zero_grad()
        return x * 2


def by_a_method() -> tuple[Callable, nn.Module]:
    held = Trainer()
    return held.clear, held.model


def by_a_container() -> tuple[Callable, nn.Module]:
    held = {"all": [Trainer()]}
    return lambda x: held["all"][0].clear(x), held["all"][0].model


def by_a_partial() -> tuple[Callable, nn.Module]:
    held = Trainer()
    return functools.partial(lambda factor, x: held.clear(x) * factor, 2.0), held.model


def by_a_function() -> tuple[Callable, nn.Module]:
    held = Trainer()

    def inner(x: Tensor) -> Tensor:
        return held.clear(x)

    return lambda x: inner(x), held.model


@pytest.mark.parametrize("make", [by_a_method, by_a_container, by_a_partial, by_a_function])
def test_a_gradient_that_is_only_cleared_is_put_back(make: Callable) -> None:
    fn, model = make()
    model(X).sum().backward()
    before = [p.grad for p in model.parameters()]
    minimal_fx_tracer(fn)(X)
    assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))


def test_a_variable_that_has_no_value_yet_is_none_that_the_function_holds() -> None:
    def step(x: Tensor) -> Tensor:
        return later if x.shape[0] == 99 else x * 2

    assert torch.equal(run_traced(minimal_fx_tracer(step)(X))(X), X * 2)
    later = X


def test_a_write_in_place_to_a_parameter_is_refused_with_its_line() -> None:
    model = nn.Linear(2, 2)

    def step(x: Tensor) -> Tensor:
        model.weight.mul_(2.0)
        return model(x)

    with pytest.raises(UserError, match=r"writes in place to a parameter.*test_trace_lost.py.*compute a new tensor"):
        minimal_fx_tracer(step, model)(torch.ones(1, 2))
