"""The second capture gives the first's graph; and it notices what the first one bakes in."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.fx.traceback as fx_traceback
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from torchtitan_graph.capture.dynamo import CAPTURES, dynamo_capture
from torchtitan_graph.capture.stamp import described
from torchtitan_graph.capture.trace import InParts, make_fx_capture
from torchtitan_graph.capture.traced import TracedResult, run_traced
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.passes.cleanup import cleanup

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo captures steps from torch 2.13 on")
X = torch.arange(6.0).view(2, 3)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Setting:
    x: Tensor
    factor: int


torch.utils._pytree.register_dataclass(Setting)


class Net(nn.Module):
    """Holds what a forward pass may read beside parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first  # shared: it has two names
        self.last = nn.Linear(3, 1, bias=False)
        self.doubles = False
        self.scale = torch.tensor(2.0)  # neither parameter nor buffer
        self.calls = 0
        self.factors, self.table, self.note = [1.0, 2.0], {"a": 1.0}, None
        self.register_buffer("shift", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        with fx_traceback.annotate({"part": "first"}):
            x = self.again(torch.tanh(self.first(x)))
        x = self.first(x)  # repeated
        if self.doubles:
            x = 2 * x
        if self.note is None:
            x = x * self.factors[1]
        for key in self.table:
            x = x + self.table[key]
        return self.last(x) * self.scale


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def stepping(model: nn.Module, forward: Callable[..., Tensor]) -> InParts:
    def step(forward: Callable[..., Tensor], *arguments: Tensor) -> Any:
        loss = forward(*arguments)
        wanted = {name: p for name, p in model.named_parameters()}
        return loss, dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))

    return InParts(step, forward)


def loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return model(x).square().sum()

    return forward


def captured(model: nn.Module, forward: Callable[..., Any] | None = None) -> TracedResult:
    return dynamo_capture(stepping(model, forward or loss_of(model)), model)(X)


def test_the_graph_is_the_other_capture_s_node_for_node() -> None:
    """Modules too, where one is shared or called again, and annotations."""
    model = net()
    graphs = [cleanup(capture(stepping(model, loss_of(model)), model)(X).gm) for capture in CAPTURES.values()]
    assert described(graphs[0]) == described(graphs[1])
    names = [[node.target for node in gm.graph.find_nodes(op="placeholder")] for gm in graphs]
    assert names[1] == names[0] == ["first_weight", "first_bias", "last_weight", "shift", "args_0"]
    found = {(meta.module(node), node.meta["custom"].get("part")) for node in graphs[1].graph.nodes}
    assert ("first", "first") in found and ("last", None) in found


def test_it_computes_what_autograd_does() -> None:
    model = net()
    loss, gradients = run_traced(captured(model), module=model)(X)
    expected = loss_of(model)(X)
    expected.backward()
    assert torch.equal(loss, expected)
    assert all(torch.equal(gradients[name], p.grad) for name, p in model.named_parameters() if p.grad is not None)


def test_pytrees_come_and_go_in_the_author_s_order() -> None:
    """So do results that are an argument, a constant, or one tensor twice."""
    model = net()

    def fn(pair: Pair, by_name: dict[str, Tensor], factor: int) -> Any:
        y = model(by_name["b"]) * factor
        return {"same": pair.right, "pair": Pair([y, y], pair.left), "word": "a", "none": None}

    arguments = Pair(X, X + 1), {"b": X + 2, "a": X + 3}, 3
    traced = dynamo_capture(fn, model)(*arguments)
    assert traced.names == ("pair.left", "pair.right", "by_name['b']", "by_name['a']", "factor")
    found, expected = run_traced(traced, module=model)(*arguments), fn(*arguments)
    assert list(found) == list(expected) and isinstance(found["pair"], Pair)
    assert (found["word"], found["none"]) == ("a", None)
    for each, other in (
        (found["same"], X + 1),
        (found["pair"].right, X),
        (found["pair"].left[1], fn(*arguments)["pair"].left[1]),
    ):
        assert torch.equal(each, other)


def test_results_may_be_state_and_arguments_come_by_name() -> None:
    model = net()

    def fn(x: Tensor, y: Tensor, factor: int = 2) -> Any:
        return {"weight": model.last.weight, "shift": model.shift, "twice": [y, y], "sum": factor * model(x).sum()}

    run = run_traced(dynamo_capture(fn, model)(X, X + 1), module=model)
    for found in (run(X, X + 1), run(y=X + 1, x=X), run(X, y=X + 1)):
        assert torch.equal(found["weight"], model.last.weight) and torch.equal(found["shift"], model.shift)
        assert torch.equal(found["twice"][1], X + 1) and torch.equal(found["sum"], fn(X, X)["sum"])
    model.doubles = True
    model.last.weight = nn.Parameter(model.last.weight.detach().clone())
    with pytest.raises(UserError, match="model.doubles == False"):
        run(y=X + 1, x=X)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((X, 3), "factor is 3, traced with 2"),
        ((X[:1], 2), r"x has shape \[1, 3\] .* traced with \[2, 3\]"),
        ((X.double(), 2), "x has shape .* torch.float64, traced with .* torch.float32"),
        ((None, 2), "x is a NoneType, traced as a tensor"),
        ((X,), "factor is missing"),
    ],
)
def test_an_argument_that_differs_is_named(arguments: tuple[Any, ...], words: str) -> None:
    model = net()
    traced = dynamo_capture(lambda x, factor: model(x) * factor, model)(X, 2)
    with pytest.raises(UserError, match=words):
        run_traced(traced, module=model)(*arguments)


def test_forward_may_take_any_number_of_arguments() -> None:
    model = net()
    traced = dynamo_capture(stepping(model, lambda *xs: model(xs[0] + xs[1]).sum()), model)(X, X)
    assert torch.equal(run_traced(traced, module=model)(X, X + 1)[0], model(X + X + 1).sum())


class Sum(torch.autograd.Function):
    """A sum of any number of tensors."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        return sum(tensors[1:], tensors[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise NotImplementedError


def test_an_autograd_function_keeps_its_context_where_nothing_takes_gradients() -> None:
    """Dynamo alone takes the first of two tensors for it, as forward has two parameters, and returns the other one."""
    traced = dynamo_capture(lambda x, y: Sum.apply(x, y))(X, 2 * X)  # type: ignore[no-untyped-call]
    assert torch.equal(run_traced(traced)(X, 2 * X), 3 * X)


def test_a_dataclass_comes_and_goes() -> None:
    model, given = net(), Setting(X, 2)
    traced = dynamo_capture(lambda s: Setting(model(s.x) * s.factor, s.factor + 1), model)(given)
    assert traced.names == ("s.x", "s.factor")
    found = run_traced(traced, module=model)(given)
    assert torch.equal(found.x, model(X) * 2) and found.factor == 3


def test_a_step_without_backward() -> None:
    model = net()

    def evaluate(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)

    traced = dynamo_capture(evaluate, model)(X)
    assert torch.equal(run_traced(traced, module=model)(X + 1), evaluate(X + 1))
    other = make_fx_capture(evaluate, model)(X)
    assert described(cleanup(traced.gm)) == described(cleanup(other.gm))


def test_lines_of_source_are_the_author_s() -> None:
    model = net()
    gm = dynamo_capture(stepping(model, loss_of(model)), model, stack_traces=True)(X).gm
    tanh = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)[0]
    assert "test_dynamo.py" in str(meta.source_line(tanh)) and meta.source_line(tanh) is not None


# --- what the graph rests on ------------------------------------------------------------------------------------------


def set_flag(model: Net) -> None:
    model.doubles = True


def add_hook(model: Net) -> None:
    model.last.register_forward_hook(lambda module, args, out: 2 * out)


def replace_tensor(model: Net) -> None:
    model.scale = torch.tensor(3.0)


def forward_otherwise(model: Net) -> None:
    model.last.forward = lambda x: x  # type: ignore[method-assign]


HERE = r" \(.*test_dynamo.py:\d+ in forward\)"
CHANGES: dict[str, tuple[Callable[[Net], None], str]] = {
    "item of a list": (
        lambda m: m.factors.__setitem__(1, 3.0),
        rf"model\.factors\[1\] == 2\.0{HERE}, and it is 3\.0 now",
    ),
    "length": (lambda m: m.factors.append(3.0), rf"len\(model\.factors\) == 2{HERE}, and it is 3 now"),
    "value of a dict": (lambda m: m.table.update(a=2.0), rf"model\.table\['a'\] == 1\.0{HERE}, and it is 2\.0 now"),
    "key of a dict": (lambda m: m.table.update(b=2.0), r"len\(model\.table\) == 1, and it is 2 now"),
    "None": (lambda m: setattr(m, "note", "a"), rf"model\.note is None{HERE}, and it is 'a' now"),
    "what is gone": (lambda m: delattr(m, "doubles"), r"model\.doubles, which is gone"),
    "class": (
        lambda m: setattr(m.last, "__class__", type("Own", (nn.Linear,), {})),
        r"model\.last being a .*Linear'> \(",
    ),
    "method": (forward_otherwise, r"model\.last\.forward being that of its class \("),
    "flag": (set_flag, r"model\.doubles == False \(.*test_dynamo.py:\d+.*it is True now"),
    "hook": (add_hook, r"not model\.last\._forward_hooks"),
    "tensor": (replace_tensor, r"model\.scale is another tensor"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_before_the_first_run_is_refused(name: str) -> None:
    model, (change, words) = net(), CHANGES[name]
    run = run_traced(captured(model), module=model)
    change(model)
    with pytest.raises(UserError, match=words):
        run(X)


def test_a_change_is_noticed_when_parameters_are_bound_again() -> None:
    model = net()
    run = run_traced(captured(model), module=model)
    run(X)
    model.last.weight = nn.Parameter(model.last.weight.detach().clone())
    run(X)
    model.doubles = True
    model.last.weight = nn.Parameter(model.last.weight.detach().clone())
    with pytest.raises(UserError, match=r"model\.doubles"):
        run(X)


def test_numbers_in_a_tensor_may_change() -> None:
    """It is read where it lies; and neither `no_grad` nor the number of threads is anything to refuse."""
    model = net()
    run, before = run_traced(captured(model), module=model), torch.get_num_threads()
    model.scale.fill_(4.0)
    try:
        torch.set_num_threads(before + 1)
        with torch.no_grad():
            assert torch.equal(run(X)[0], loss_of(model)(X))
    finally:
        torch.set_num_threads(before)


def test_another_default_of_torch_is_refused() -> None:
    model = net()
    run = run_traced(captured(model), module=model)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(UserError, match="another default_dtype of torch"):
            run(X)
    finally:
        torch.set_default_dtype(torch.float32)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_counter_that_a_graph_would_lose_is_refused() -> None:
    model = net()

    def forward(x: Tensor) -> Tensor:
        model.calls += 1
        return loss_of(model)(x)

    with pytest.raises(UserError, match=r"changes model.calls \(test_dynamo.py:\d+ in forward\), which a"):
        captured(model, forward)


def without_bias(model: Net, x: Tensor) -> Tensor:
    model.first.bias = None
    return model(x)


def with_another_weight(model: Net, x: Tensor) -> Tensor:
    model.last._parameters["weight"] = model.last.weight * 2
    return model(x)


@pytest.mark.parametrize(("deed", "name"), [(without_bias, "first"), (with_another_weight, "last")])
def test_parameters_that_a_graph_would_go_on_with_are_refused(deed: Callable[..., Tensor], name: str) -> None:
    model = net()
    with pytest.raises(UserError, match=rf"changes model.{name}._parameters \(test_dynamo.py:\d+ in {deed.__name__}\)"):
        captured(model, lambda x: deed(model, x).sum())


def test_what_dynamo_cannot_take_is_told_with_its_line() -> None:
    model = net()

    def forward(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return loss_of(model)(x)

    with pytest.raises(UserError, match=r"compile.capture = 'dynamo': .*test_dynamo.py:\d+ in forward.*use 'make_fx'"):
        captured(model, forward)


def test_a_region_that_returns_what_no_operator_can_is_told() -> None:
    model = net()

    def forward(x: Tensor) -> Tensor:
        return next(iter(checkpoint(lambda x: {model(x)}, x, use_reentrant=False))).sum()

    make_fx_capture(stepping(model, forward), model)(X)
    with pytest.raises(UserError, match="compile.capture = 'dynamo': .* does not belong to this Graph.*use 'make_fx'"):
        captured(model, forward)


def test_a_region_that_writes_to_what_is_around_it_is_told() -> None:
    model = net()

    def forward(x: Tensor) -> Tensor:
        around = x * 2
        return (checkpoint(lambda x: around.add_(1) * 0 + model(x), x, use_reentrant=False) + around).sum()

    make_fx_capture(stepping(model, forward), model)(X)
    with pytest.raises(UserError, match="'dynamo': a checkpointed region writes in place to a value .* use 'make_fx'"):
        captured(model, forward)


def test_a_function_without_tensors_is_refused() -> None:
    model = net()
    with pytest.raises(
        UserError, match="'dynamo': the function computes nothing of tensors; change that, or use 'make"
    ):
        dynamo_capture(lambda x: x.dim(), model)(X)


def test_what_no_graph_can_hold_is_told_as_by_the_other_capture() -> None:
    model = net()
    with pytest.raises(UserError, match="reads a tensor's value"):
        captured(model, lambda x: model(x).sum() if x.sum() > 0 else model(x).mean())
    with pytest.raises(UserError, match="draws random numbers"):
        captured(model, lambda x: nn.functional.dropout(model(x)).sum())


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    with pytest.raises(UserError, match="needs torch 2.13 or newer, and this is 2.11.0; use 'make_fx'"):
        captured(net())


def test_a_function_may_look_at_what_an_argument_is() -> None:
    """Dynamo captures on fake tensors, whose type no argument has."""
    model = net()
    run = run_traced(captured(model, lambda x: model(pytree.tree_leaves([x])[0]).sum()), module=model)
    assert torch.equal(run(X)[0], model(X).sum())


class Scaled:
    def step(self, x: Tensor, *, factor: Tensor) -> Tensor:
        return x.sin() * factor

    def __call__(self, x: Tensor, factor: int = 2) -> Tensor:
        return x.sin() * factor


def by_keyword_only(x: Tensor, *, z: Tensor, y: Tensor) -> Tensor:
    return x * y + z


@pytest.mark.parametrize("capture", CAPTURES.values())
@pytest.mark.parametrize(
    ("fn", "args", "kwargs"),
    [
        (by_keyword_only, (X,), {"z": X, "y": X + 1}),
        (lambda **batch: batch["x"] - batch["b"], (), {"x": X, "b": X + 1}),
        (lambda x, y: x - y, (), {"y": X, "x": X + 1}),
        (Scaled().step, (X,), {"factor": X}),
        (Scaled(), (), {"x": X}),
        (torch.sin, (X,), {}),
    ],
    ids=["keyword-only", "any keyword", "by keyword", "method", "object", "builtin"],
)
def test_both_are_called_as_the_function_is_without_a_module_too(
    capture: Any, fn: Any, args: tuple, kwargs: dict[str, Tensor]
) -> None:
    run = run_traced(capture(fn)(*args, **kwargs))
    for _ in range(2):
        assert torch.equal(run(*args, **dict(reversed(kwargs.items()))), fn(*args, **kwargs))


def test_what_the_graph_rests_on_is_checked_of_arguments_by_keyword_too() -> None:
    model = net()
    run = run_traced(dynamo_capture(lambda x, *, shift: model(x) + shift, model)(X, shift=X), model)
    assert torch.equal(run(x=X, shift=X), model(X) + X)
    model.doubles = True
    model.last.weight = nn.Parameter(model.last.weight.detach().clone())
    with pytest.raises(UserError, match="doubles == False"):
        run(X, shift=X)
