"""A module's and an optimizer's state: inputs of the graph, known by name, bound to the live tensors."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.capture.traced import TracedResult, run_traced
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.signature import signature_of


def inputs(traced: TracedResult) -> list[str]:
    return [f"{slot.kind} {slot.name}" for slot in signature_of(traced.gm).inputs]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


class Scaled(nn.Module):
    """A buffer that is saved, one that is not, and a weight used at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((2,), 2.0))
        self.register_buffer("shift", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale + self.shift


def test_parameters_and_buffers_are_inputs_by_name_and_a_tied_one_is_one() -> None:
    model = Scaled()
    traced = minimal_fx_tracer(lambda x: model(x), module=model)(torch.zeros(1, 2))
    assert inputs(traced) == ["param first.weight", "buffer scale", "buffer shift", "input x"]


def test_the_graph_reads_the_live_state() -> None:
    model = Scaled()
    run = run_traced(minimal_fx_tracer(lambda x: model(x), module=model)(torch.zeros(1, 2)), module=model)
    x = torch.randn(1, 2)
    with torch.no_grad():
        model.first.weight.add_(1)
        model.scale.mul_(3)
    assert torch.equal(run(x), model(x))


class Asks(nn.Module):
    """Goes another way where its weight is not a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        number = sum(isinstance(p, nn.Parameter) for p in (self.inner.weight, self.inner.weight * 1, x))
        return self.inner(x) * number


@pytest.mark.parametrize("blocks", [(), ("0", "1")])
def test_a_parameter_is_one_in_the_trace_too(blocks: tuple[str, ...]) -> None:
    model, x = nn.Sequential(Asks(), Asks()), torch.randn(3, 2)
    traced = minimal_fx_tracer(lambda x: model(x), model, blocks={name: model.get_submodule(name) for name in blocks})
    assert torch.equal(run_traced(traced(x), module=model)(x), model(x))


def test_a_tied_parameter_gets_the_sum_of_its_gradients() -> None:
    model, x = Scaled(), torch.randn(3, 2)

    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(model(x).sum(), model.first.weight)[0]

    run = run_traced(minimal_fx_tracer(gradient, module=model)(x), module=model)
    assert torch.equal(run(x), gradient(x))


def test_gradients_through_grad_and_through_backward_are_those_of_eager() -> None:
    model, x = net(), torch.randn(5, 3)

    def by_grad(x: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))

    def by_backward(x: Tensor) -> list[Tensor]:
        model(x).square().mean().backward()
        return [p.grad for p in model.parameters()]

    expected = by_grad(x)
    for step in (by_grad, by_backward):
        found = run_traced(minimal_fx_tracer(step, module=model)(x), module=model)(x)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_a_gradient_keeps_the_dtype_that_its_parameter_allows() -> None:
    model, x = nn.Linear(3, 3, bias=False), torch.randn(2, 3, dtype=torch.float64)

    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad((x * Widened.apply(model.weight).sum()).sum(), model.weight)[0]

    assert run_traced(minimal_fx_tracer(gradient, module=model)(x), module=model)(x).dtype == torch.float32
    model.weight.grad_dtype = None
    assert run_traced(minimal_fx_tracer(gradient, module=model)(x), module=model)(x).dtype == torch.float64


class Widened(torch.autograd.Function):
    """Gives an fp64 value, and an fp64 gradient to an fp32 tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.double()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_a_meta_model_is_traced_as_if_it_lay_on_a_device() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    traced = minimal_fx_tracer(lambda x: model(x) + torch.ones(2), module=model, device="cpu")(torch.zeros(1, 2))
    with torch.no_grad():
        model.to_empty(device="cpu").weight.fill_(1)
        model.bias.zero_()
    assert torch.equal(run_traced(traced, module=model)(torch.ones(1, 2)), torch.full((1, 2), 3.0))


# --- other names ------------------------------------------------------------------------------------------------------


def test_a_module_with_other_names_is_refused_naming_the_difference() -> None:
    model = net()
    traced = minimal_fx_tracer(lambda x: model(x), module=model)(torch.zeros(1, 3))
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    with pytest.raises(UserError, match=r"missing param 2.bias, param 2.weight; not in the trace: param 1.bias"):
        run_traced(traced, module=other)


def test_a_module_without_its_buffer_is_refused() -> None:
    model = Scaled()
    traced = minimal_fx_tracer(lambda x: model(x), module=model)(torch.zeros(1, 2))
    del model.shift
    with pytest.raises(UserError, match="missing buffer shift"):
        run_traced(traced, module=model)


def test_a_module_of_other_shapes_is_refused_by_name() -> None:
    model = nn.Linear(3, 1)
    traced = minimal_fx_tracer(lambda x: model(x), module=model)(torch.zeros(1, 3))
    with pytest.raises(UserError, match=r"weight has shape \[1, 2\]"):
        run_traced(traced, module=nn.Linear(2, 1))


def test_a_trace_with_a_module_does_not_run_without_one() -> None:
    model = nn.Linear(3, 1)
    traced = minimal_fx_tracer(lambda x: model(x), module=model)(torch.zeros(1, 3))
    with pytest.raises(UserError, match="was traced with module=, and is run without"):
        run_traced(traced)


def test_another_module_with_the_same_names_is_bound_by_name_not_by_place() -> None:
    class Reordered(nn.Module):
        def __init__(self, names: str) -> None:
            super().__init__()
            for name in names:
                self.register_parameter(name, nn.Parameter(torch.full((1,), float(ord(name)))))

    model, other = Reordered("ab"), Reordered("ba")
    traced = minimal_fx_tracer(lambda: model.a - 2 * model.b, module=model)()
    assert run_traced(traced, module=other)() == model.a - 2 * model.b


# --- what a trace must not change -------------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Does one unwanted thing to itself in forward."""

    def __init__(self, deed: Callable) -> None:
        super().__init__()
        self.child = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("empty", None)
        self.seen: list = []
        self.last = None
        self.deed = deed

    def forward(self, x: Tensor) -> Tensor:
        y = self.child(x)
        self.deed(self, y)
        return y * self.count


def rebind(self: Any, y: Tensor) -> None:
    self.count = self.count + 1


def replace_parameter(self: Any, y: Tensor) -> None:
    self.child.weight = nn.Parameter(self.child.weight * 2)


def fill_empty(self: Any, y: Tensor) -> None:
    self.empty = y


def add_module(self: Any, y: Tensor) -> None:
    self.added = nn.BatchNorm1d(2)  # its tensors are of the trace


def keep(self: Any, y: Tensor) -> None:
    self.last = y


def keep_new(self: Any, y: Tensor) -> None:
    self.child.other = [y]


def append(self: Any, y: Tensor) -> None:
    self.seen.append(y)


def count_in_place(self: Any, y: Tensor) -> None:
    self.count += 1


def scale_in_place(self: Any, y: Tensor) -> None:
    with torch.no_grad():
        self.child.weight.view(-1).mul_(2)


def fail(self: Any, y: Tensor) -> None:
    keep(self, y)
    append(self, y)
    rebind(self, y)
    raise UserError("no further")


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        (rebind, "assigns new tensors to count: .*write it back outside"),
        (replace_parameter, "assigns new tensors to child.weight"),
        (fill_empty, "assigns new tensors to empty"),
        (add_module, "assigns new tensors to added.bias, added.num_batches_tracked, "),
        (keep, "keeps a tensor in last: .*return it from the function"),
        (keep_new, "keeps a tensor in child.other"),
        (append, "keeps a tensor in seen"),
        (count_in_place, r"writes in place to count \(aten.add_"),
        (scale_in_place, r"writes in place to child.weight \(aten.mul_"),
        (fail, "no further"),
    ],
)
def test_changed_state_is_refused_by_name_and_the_module_stays_real(deed: Callable, message: str) -> None:
    model = Stateful(deed)
    before = {name: (t, t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    with pytest.raises(UserError, match=message):
        minimal_fx_tracer(lambda x: model(x), module=model)(torch.ones(1, 2))
    after = model.state_dict(keep_vars=True)
    assert after.keys() == before.keys()
    assert all(after[name] is live and torch.equal(live, value) for name, (live, value) in before.items())
    assert model.last is None and model.empty is None
    assert not hasattr(model, "added")
    assert model.seen == []
    assert not hasattr(model.child, "other")


def test_what_a_module_keeps_of_its_own_is_left_alone() -> None:
    model = Stateful(lambda self, y: None)
    table = torch.ones(2)
    model.last = table
    minimal_fx_tracer(lambda x: model(x), module=model)(torch.ones(1, 2))
    assert model.last is table


# --- replaced state ---------------------------------------------------------------------------------------------------


def assign(model: nn.Module) -> None:
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)


def swap_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data + 1


def replace_module(model: nn.Module) -> None:
    model[0] = net(1)[0]


def replace_parameter_object(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(model[2].weight + 1)


@pytest.mark.parametrize("replace", [assign, swap_data, replace_module, replace_parameter_object])
def test_replaced_state_is_bound_again(replace: Callable) -> None:
    model, x = net(), torch.randn(2, 3)
    run = run_traced(minimal_fx_tracer(lambda x: model(x), module=model)(x), module=model)
    before = run(x)
    replace(model)
    assert torch.equal(run(x), model(x))
    assert not torch.equal(run(x), before)


def test_state_of_another_layout_is_refused_when_it_is_bound_again() -> None:
    model, x = net(), torch.randn(2, 3)
    run = run_traced(minimal_fx_tracer(lambda x: model(x), module=model)(x), module=model)
    model[0] = nn.Linear(3, 4, dtype=torch.float64)
    with pytest.raises(UserError, match="0.weight has shape .* traced with"):
        run(x)


def test_a_call_walks_no_module_while_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net(), torch.randn(2, 3)
    run = run_traced(minimal_fx_tracer(lambda x: model(x), module=model)(x), module=model)

    def walk(*args: Any, **kwargs: Any) -> Iterator:
        raise AssertionError("a call walks the module")

    for name in ("named_parameters", "named_buffers", "named_modules", "modules"):
        monkeypatch.setattr(nn.Module, name, walk)
    run(x)
    replace_parameter_object(model)
    with pytest.raises(AssertionError, match="walks"):
        run(x)


# --- the optimizer ----------------------------------------------------------------------------------------------------


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True, **options)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, **options)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def warmed_up(make: Callable, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Give a model and an optimizer that has state: it took a step with gradients of zero."""
    model = net()
    optimizer = make(model, **options)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator)


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = dict(model.named_parameters())
    for name, p in model.named_parameters():
        found |= {f"{name}.{key}": x for key, x in optimizer.state[p].items()}
    return found


@pytest.mark.parametrize(
    ("make", "options"),
    [(adamw, {}), (adamw, {"weight_decay": 0.0, "amsgrad": True}), (sgd, {"foreach": True}), (sgd, {"foreach": False})],
)
def test_a_step_with_its_optimizer_is_bitwise_eagers_while_the_learning_rate_changes(
    make: Callable, options: dict
) -> None:
    (eager, eager_optimizer), (model, optimizer) = warmed_up(make, **options), warmed_up(make, **options)
    traced = minimal_fx_tracer(train_step(model, optimizer), module=model, optimizer=optimizer)(*data(0))
    run = run_traced(traced, module=model, optimizer=optimizer)
    held = state(model, optimizer)
    for number in range(4):
        if make is adamw:
            for each in (optimizer, eager_optimizer):
                each.param_groups[0]["lr"].fill_(1e-2 / (number + 1))
        assert torch.equal(run(*data(number)), train_step(eager, eager_optimizer)(*data(number)))
    found, expected = state(model, optimizer), state(eager, eager_optimizer)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(found[name] is held[name] for name in held), "updated in place"


def test_optimizer_state_is_named_by_its_parameter() -> None:
    model, optimizer = warmed_up(adamw)
    traced = minimal_fx_tracer(train_step(model, optimizer), module=model, optimizer=optimizer)(*data(0))
    assert {"optim 0.weight.exp_avg", "optim 2.bias.step", "optim group of 0.bias.lr"} < set(inputs(traced))


def test_optimizer_state_is_matched_by_name_not_by_order() -> None:
    (eager, eager_optimizer), (model, optimizer) = warmed_up(adamw), warmed_up(adamw)
    traced = minimal_fx_tracer(train_step(model, optimizer), module=model, optimizer=optimizer)(*data(0))
    reordered = torch.optim.AdamW(list(model.parameters())[::-1], lr=torch.tensor(1e-2), fused=True)
    for p in reordered.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    state_before = optimizer.state
    reordered.state.update({p: state_before[p] for p in reversed(list(state_before))})
    run = run_traced(traced, module=model, optimizer=reordered)
    for number in range(3):
        assert torch.equal(run(*data(number)), train_step(eager, eager_optimizer)(*data(number)))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), eager.parameters(), strict=True))


def test_an_optimizer_without_its_module_is_refused() -> None:
    model, optimizer = warmed_up(adamw)
    with pytest.raises(UserError, match="optimizer without its module"):
        minimal_fx_tracer(lambda: None, optimizer=optimizer)
    traced = minimal_fx_tracer(lambda x: x)(torch.ones(1))
    with pytest.raises(UserError, match="optimizer without its module"):
        run_traced(traced, optimizer=optimizer)


def test_an_optimizer_of_another_module_is_refused() -> None:
    model, optimizer = warmed_up(adamw)
    with pytest.raises(UserError, match=r"holds a parameter of shape \[4, 3\] that its module does not"):
        minimal_fx_tracer(lambda: None, module=net(), optimizer=optimizer)()


def test_an_optimizer_that_makes_its_state_in_the_trace_is_refused() -> None:
    model = net()
    for optimizer in (adamw(model), sgd(model)):
        with pytest.raises(UserError, match="take one step before tracing"):
            minimal_fx_tracer(train_step(model, optimizer), module=model, optimizer=optimizer)(*data(0))
        assert not optimizer.state


@pytest.mark.parametrize("name", ["RAdam", "Adafactor"])
def test_an_optimizer_that_branches_on_its_step_counter_is_refused_naming_what_works(name: str) -> None:
    model, optimizer = warmed_up(lambda model: getattr(torch.optim, name)(model.parameters()))
    with pytest.raises(UserError, match=rf"{name} branches on .*: such as AdamW\(fused=True, lr=torch.tensor\(...\)\)"):
        minimal_fx_tracer(train_step(model, optimizer), module=model, optimizer=optimizer)(*data(0))


def test_an_optimizer_without_state_needs_no_first_step() -> None:
    model, eager = net(), net()
    optimizer, eager_optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, eager))
    traced = minimal_fx_tracer(train_step(model, optimizer), module=model, optimizer=optimizer)(*data(0))
    run_traced(traced, module=model, optimizer=optimizer)(*data(0))
    train_step(eager, eager_optimizer)(*data(0))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), eager.parameters(), strict=True))


def fused_adamw_with_a_number(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


@pytest.mark.parametrize(
    ("make", "form"),
    [(sgd, r"SGD\(fused=True, lr=torch.tensor"), (fused_adamw_with_a_number, r"AdamW\(fused=True, lr=torch.tensor")],
)
def test_another_learning_rate_that_is_no_tensor_is_refused(make: Callable, form: str) -> None:
    model, optimizer = warmed_up(make)
    traced = minimal_fx_tracer(train_step(model, optimizer), module=model, optimizer=optimizer)(*data(0))
    run = run_traced(traced, module=model, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(UserError, match=rf"group of 0.bias.lr is 0.5, traced with 0.01: .*{form}"):
        run(*data(0))


def test_other_parameter_groups_are_refused_naming_the_difference() -> None:
    model, optimizer = warmed_up(sgd)
    traced = minimal_fx_tracer(train_step(model, optimizer), module=model, optimizer=optimizer)(*data(0))
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    split = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    split.state.update(optimizer.state)
    with pytest.raises(UserError, match=r"group of 0.bias.params is \['0.bias', '0.weight'\]"):
        run_traced(traced, module=model, optimizer=split)


def load_state(optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def replace_learning_rate(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)


@pytest.mark.parametrize("replace", [load_state, replace_learning_rate])
def test_replaced_optimizer_state_is_bound_again(replace: Callable) -> None:
    (eager, eager_optimizer), (model, optimizer) = warmed_up(adamw), warmed_up(adamw)
    traced = minimal_fx_tracer(train_step(model, optimizer), module=model, optimizer=optimizer)(*data(0))
    run = run_traced(traced, module=model, optimizer=optimizer)
    for each in (optimizer, eager_optimizer):
        replace(each)
    for number in range(2):
        assert torch.equal(run(*data(number)), train_step(eager, eager_optimizer)(*data(number)))
    found, expected = state(model, optimizer), state(eager, eager_optimizer)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("fails", [False, True])
def test_the_optimizer_is_itself_after_the_trace(fails: bool) -> None:
    model, optimizer = warmed_up(adamw)
    before, groups = state(model, optimizer), optimizer.param_groups
    step = train_step(model, optimizer)

    def fn(x: Tensor, y: Tensor) -> Tensor:
        loss = step(x, y)
        if fails:
            raise UserError("no further")
        return loss

    try:
        minimal_fx_tracer(fn, module=model, optimizer=optimizer)(*data(0))
    except UserError as error:
        assert fails and "no further" in str(error)
    after = state(model, optimizer)
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert optimizer.param_groups is groups
    assert [id(p) for p in groups[0]["params"]] == [id(p) for p in model.parameters()]
