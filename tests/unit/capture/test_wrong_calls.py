"""A wrong call of a public function is refused in one line that has the call to write."""

import dataclasses
import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from torchtitan_graph.capture import (
    InParts,
    call_hierarchy,
    dynamo_capture,
    fwd_call_hierarchy,
    make_fx_capture,
    minimal_fx_tracer,
    origin,
    run_traced,
    shown,
    signature_of,
)
from torchtitan_graph.check.captures import compare_captures
from torchtitan_graph.errors import UserError

MODEL, X = nn.Linear(2, 2), torch.ones(1, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters())
RUN = r"write run_traced\(traced, module=model\)\(\*arguments\)$"
TRACE = r"write minimal_fx_tracer\(fn, module=model\)\(\*arguments\)$"


def step(x: Tensor) -> Tensor:
    return MODEL(x).sum()


def stepped() -> Any:
    def both(x: Tensor) -> None:
        OPTIMIZER.zero_grad()
        step(x).backward()
        OPTIMIZER.step()

    return minimal_fx_tracer(both, MODEL, OPTIMIZER)(X)


@pytest.fixture(scope="module")
def traced() -> Any:
    return minimal_fx_tracer(step, module=MODEL)(X)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: run_traced(t, MODEL, X), f"optimizer is of class Tensor: must be one torch.optim.Optimizer; {RUN}"),
        (lambda t: run_traced(t, MODEL, X, X), f"run_traced: too many positional arguments; {RUN}"),
        (lambda t: run_traced(t, X), f"module is of class Tensor: must be one nn.Module .*; {RUN}"),
        (lambda t: run_traced(t, [MODEL]), f"module is of class list: .*ModuleList.*; {RUN}"),
        (lambda t: run_traced(t, model=MODEL), f"keyword argument 'model'; {RUN}"),
        (lambda t: run_traced(t), f"was traced with module=, and is run without: {RUN}"),
        (lambda t: run_traced(t, MODEL, OPTIMIZER), "without optimizer=, and is run with one: write minimal_fx_tracer"),
        (lambda t: run_traced(stepped(), MODEL), "with optimizer=, and is run without: write run_traced.*optimizer="),
        (lambda t: run_traced(minimal_fx_tracer(lambda x: x)(X), MODEL), "without module=, and is run with one: .*; w"),
        (
            lambda t: run_traced(t.gm, MODEL),
            rf"traced is of class GraphModule: .*\(fn, module=model\).*; {RUN}",
        ),
        (lambda t: run_traced(minimal_fx_tracer(step, MODEL), MODEL), f"traced is of class function: .*; {RUN}"),
        (lambda t: t(MODEL, X), f"run on the live state of its module: {RUN}"),
    ],
)
def test_of_run_traced(call: Callable[[Any], Any], words: str, traced: Any) -> None:
    with pytest.raises(UserError, match=words) as error:
        call(traced)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ((X,), {}, f"fn is of class Tensor: must be the function to trace; {TRACE}"),
        ((step, X), {}, f"module is of class Tensor: .*; {TRACE}"),
        ((step, nn.Linear), {}, f"module is the class Linear: .*; {TRACE}"),
        ((step, MODEL, X), {}, f"optimizer is of class Tensor: .*; {TRACE}"),
        ((step, MODEL, [OPTIMIZER]), {}, f"optimizer is of class list: must be one .*; {TRACE}"),
        ((step, MODEL, OPTIMIZER, X), {}, f"minimal_fx_tracer: too many positional arguments; {TRACE}"),
        ((), {"module": MODEL}, f"missing a required argument: 'fn'; {TRACE}"),
        ((step,), {"call_hierachy": True}, f"'call_hierachy' .did you mean call_hierarchy.*; {TRACE}"),
        ((step,), {"optimizer": OPTIMIZER}, "pass module=, the one it optimizes"),
        ((step,), {"device": "gpu"}, "device = 'gpu': must be a device of torch, such as 'cpu' or 'cuda'"),
        ((step,), {"blocks": ["a"]}, "blocks is of class list: must be submodules of module, by their names"),
        ((step, MODEL), {"blocks": {"a": MODEL}}, "blocks: 'a' must be a submodule of module, by its name there"),
        ((step, MODEL), {"donated": "x"}, "donated is of class str: must be a list of the arguments' names"),
        ((step, MODEL), {"donated": [X]}, "what donated holds is of class Tensor: must be an argument's name"),
        ((step, MODEL), {"donated": ["y"]}, r"donated = \['y'\]: 'y' must be one of x$"),
    ],
)
def test_of_minimal_fx_tracer(args: tuple, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        minimal_fx_tracer(*args, **options)(X)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("capture", [minimal_fx_tracer, make_fx_capture, dynamo_capture])
@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, r"the traced function, step\(x: .*, can't be called so: missing a required argument: 'x'"),
        ((X, X), {}, "can't be called so: too many positional arguments"),
        ((X,), {"y": X}, "can't be called so: got an unexpected keyword argument 'y'"),
        ((OPTIMIZER,), {}, "x is an optimizer: pass it as optimizer="),
    ],
)
def test_of_the_traced_function(capture: Any, args: tuple, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        capture(step, module=MODEL)(*args, **kwargs)


@pytest.mark.parametrize("capture", [make_fx_capture, dynamo_capture])
def test_of_another_capture(capture: Any) -> None:
    words = rf"{capture.__name__}: too many positional arguments; write {capture.__name__}\(fn, module=model\)"
    with pytest.raises(UserError, match=words):
        capture(step, MODEL, (X,))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: signature_of(t), r"a TracedResult has no signature: .* signature_of\(traced.gm\)"),
        (lambda t: signature_of(torch.fx.symbolic_trace(MODEL)), "a Linear has no signature"),
        (lambda t: call_hierarchy(t.gm), "is not a node of a graph: write it for node in traced.gm.graph.nodes"),
        (lambda t: fwd_call_hierarchy(t), "a TracedResult is not a node of a graph"),
        (lambda t: origin(t.gm.graph), "a Graph is not a node of a graph"),
        (
            lambda t: shown(next(iter(t.gm.graph.nodes))),
            r"a Node is not a place: write shown\(call_hierarchy\(node\)\)",
        ),
        (lambda t: compare_captures(step, MODEL, (X,)), r"write compare_captures\(fn, module=model\)\(\*arguments\)"),
        (lambda t: dynamo_capture(InParts(step))(X), r"InParts has no forward: write InParts\(whole, forward\)"),
    ],
)
def test_of_what_reads_a_graph(call: Callable[[Any], Any], words: str, traced: Any) -> None:
    with pytest.raises(UserError, match=words):
        call(traced)


def test_a_function_that_is_called_through_a_decorator_keeps_its_own_way() -> None:
    """Negative control: what `functools.wraps` says of its parameters need not be so."""
    import functools

    def scaled(x: Tensor, factor: float) -> Tensor:
        return x * factor

    @functools.wraps(scaled)
    def by_three(x: Tensor) -> Tensor:
        return scaled(x, 3.0)

    assert torch.equal(run_traced(minimal_fx_tracer(by_three)(X))(X), 3 * X)


@dataclasses.dataclass
class Batch:
    x: Tensor


class Pair:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Rate:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rate) and self.value == other.value

    def __hash__(self) -> int:
        return self.value


def test_what_a_refusal_of_a_class_says_works() -> None:
    """The call that the message has is made as it stands there."""
    with pytest.raises(UserError, match=r"register its class: (torch\.export\.register_dataclass\(Batch\))$") as error:
        minimal_fx_tracer(lambda batch: batch.x + 1)(Batch(X))
    eval(str(error.value).rpartition("register its class: ")[2], globals())
    double = minimal_fx_tracer(lambda batch: Batch(2 * batch.x))(Batch(X))
    assert double.names == ("batch.x",) and torch.equal(run_traced(double)(Batch(X)).x, 2 * X)

    with pytest.raises(UserError, match=r"result is a Pair; .* flatten, unflatten\) if it holds tensors"):
        minimal_fx_tracer(Pair)(X)
    pytree.register_pytree_node(
        Pair,
        lambda pair: ([pair.x], None),
        lambda found, _: Pair(*found),
        flatten_with_keys_fn=lambda pair: ([(pytree.GetAttrKey("x"), pair.x)], None),
    )
    assert torch.equal(run_traced(minimal_fx_tracer(Pair)(X))(X).x, X)

    with pytest.raises(UserError, match=r"(torch\.utils\._pytree\.register_constant\(Rate\)) if it holds none and has"):
        minimal_fx_tracer(lambda x, rate: x * rate.value)(X, Rate(3))
    pytree.register_constant(Rate)
    assert torch.equal(run_traced(minimal_fx_tracer(lambda x, rate: x * rate.value)(X, Rate(3)))(X, Rate(3)), 3 * X)


def test_what_a_class_without_names_holds_is_numbered() -> None:
    class Plain(Pair):
        pass

    pytree.register_pytree_node(Plain, lambda pair: ([pair.x], None), lambda found, _: Plain(*found))
    traced = minimal_fx_tracer(lambda pairs: Plain({"twice": 2 * pairs[0].x["x"]}))([Plain({"x": X})])
    assert traced.names == ("pairs[0][0]['x']",)


def test_a_class_without_names_goes_in_and_comes_out() -> None:
    class Plain(Pair):
        pass

    pytree.register_pytree_node(Plain, lambda pair: ([pair.x], None), lambda found, _: Plain(*found))
    run = run_traced(minimal_fx_tracer(lambda pair: Plain(2 * pair.x))(Plain(X)))
    assert torch.equal(run(Plain(X)).x, 2 * X)
    with pytest.raises(UserError, match=r"pair\[0\] has shape"):
        run(Plain(torch.ones(3)))


@pytest.mark.parametrize("value", [torch.float32, {1}, torch.sin, 1j])
def test_a_value_of_a_class_that_is_not_the_user_s_is_for_the_closure(value: Any) -> None:
    with pytest.raises(UserError, match=r"capture it in the function's closure$"):
        minimal_fx_tracer(lambda x, value: x)(X, value)


def test_a_branch_that_writes_to_what_it_is_given_is_refused_in_a_line() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.add_(1).sin(), lambda x: x.cos(), (x * 1,))

    def refused() -> None:
        said = r"given to torch.cond .* \(test_wrong_calls.py:\d+: .*: it writes in place"
        with pytest.raises(UserError, match=said) as found:
            minimal_fx_tracer(fn)(torch.ones(3))
        assert "\n" not in str(found.value)

    # In a process of its own: after it Python's calls hold their arguments (docs/log/runs.md), which other tests count.
    process = multiprocessing.get_context("fork").Process(target=refused)
    process.start()
    process.join()
    assert process.exitcode == 0


# what ends in an error of torch's is told in words of the function's author


def formatted(x: Tensor) -> Tensor:
    loss = step(x)
    assert f"{loss.item():.3f}"
    return loss


def scaled(x: Tensor) -> None:
    OPTIMIZER.zero_grad()
    SCALER.scale(step(x)).backward()
    SCALER.step(OPTIMIZER)


SCALER = torch.amp.GradScaler("cpu")
SCALER.scale(torch.ones(1))  # makes what it holds
LSTM = nn.LSTM(2, 2)


@pytest.mark.parametrize(
    ("fn", "module", "optimizer", "words"),
    [
        (formatted, MODEL, None, r"formats a number that only a run knows \(test_wrong_calls.py:\d+: .*outside"),
        (lambda x: f"{step(x):.3f}", MODEL, None, "formats a number that only a run knows"),
        (scaled, MODEL, OPTIMIZER, r"steps by a GradScaler \(test_wrong_calls.py:\d+: .*: train in bfloat16"),
        (lambda x: LSTM(x)[0], LSTM, None, r"an LSTM by oneDNN's kernel.*mkldnn.flags\(enabled=False\)"),
    ],
)
def test_what_torch_would_say_raw(fn: Any, module: Any, optimizer: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        minimal_fx_tracer(fn, module, optimizer)(X)
    assert "\n" not in str(error.value)


def test_a_gradient_under_no_grad_says_so() -> None:
    def gradient(x: Tensor) -> Any:
        return torch.autograd.grad(step(x), list(MODEL.parameters()))

    with torch.no_grad(), pytest.raises(UserError, match=r"torch.no_grad\(\) is around the trace: leave it"):
        minimal_fx_tracer(gradient, MODEL)(X)
    with pytest.raises(UserError, match=r"that takes gradients \(.*\): set requires_grad_\(\) before the trace"):
        minimal_fx_tracer(lambda x: torch.autograd.grad(x.sum(), x))(X)


def test_a_scaler_is_as_it_was() -> None:
    before = dict(SCALER._per_optimizer_states)
    with pytest.raises(UserError, match="steps by a GradScaler"):
        minimal_fx_tracer(scaled, MODEL, OPTIMIZER)(X)
    assert dict(SCALER._per_optimizer_states) == before


def test_a_module_that_was_cast_in_place_is_refused_by_name_until_it_is_back() -> None:
    model = nn.Linear(2, 2)
    run = run_traced(minimal_fx_tracer(lambda x: model(x), model)(X), model)
    model.double()
    with pytest.raises(UserError, match=r"weight has shape \[2, 2\] and torch.float64, traced with .* torch.float32"):
        run(X)
    assert torch.equal(run_traced(minimal_fx_tracer(lambda x: model(x), model.float())(X), model)(X), run(X))
