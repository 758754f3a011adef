"""A traced step as data: what is refused when it is stored, and when it is read."""

import ast
import copy
import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.capture.traced import TracedResult, run_traced
from torchtitan_graph.errors import UserError
from torchtitan_graph.formats.as_data import traced_from_data, traced_to_data
from torchtitan_graph.formats.malformed import Malformed
from torchtitan_graph.formats.show import readable
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.hierarchy import call_hierarchy, fwd_call_hierarchy

CPU = torch.device("cpu")
X = torch.arange(8.0).reshape(2, 4)


def traced(module: nn.Module) -> TracedResult:
    bias = torch.tensor([0.5, -0.0])

    def step(x: torch.Tensor, scale: float) -> Any:
        y = module(x).tanh() * scale + bias
        loss = torch.cat((y.square(), y.neg()), dim=1).sum(1, keepdim=True).mean(dtype=torch.float64)
        return {"loss": loss, "none": None, "grads": torch.autograd.grad(loss, list(module.parameters()))}

    return minimal_fx_tracer(step, module=module, call_hierarchy=True)(X, 2.0)


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def stored(step: TracedResult) -> Any:
    return json.loads(json.dumps(traced_to_data(step, {}, CPU, {})))


def read(data: Any) -> TracedResult:
    return traced_from_data(data, (X, 2.0), {}, {}, CPU, {})


def test_what_is_read_runs_as_what_was_stored() -> None:
    model = module()
    step = traced(model)
    again = read(stored(step))
    mine, theirs = (run_traced(each, module=model)(X, 2.0) for each in (step, again))
    assert mine["none"] is theirs["none"] is None and torch.equal(mine["loss"], theirs["loss"])
    assert all(torch.equal(a, b) for a, b in zip(mine["grads"], theirs["grads"], strict=True))
    assert stored(again) == stored(step)
    for mine, theirs in zip(step.gm.graph.nodes, again.gm.graph.nodes, strict=True):
        said = [(call_hierarchy(each), fwd_call_hierarchy(each), meta.origin(each)) for each in (mine, theirs)]
        assert said[0] == said[1]
    assert any(map(fwd_call_hierarchy, again.gm.graph.nodes))
    with pytest.raises(UserError, match="scale is 3.0, traced with 2.0"):
        run_traced(again, module=model)(X, 3.0)


def call_of(data: Any, operator: str) -> list[Any]:
    number = next(i for i, text in enumerate(data["targets"]) if operator in text)
    return next(node for node in data["graph"]["nodes"] if node[0] == "call_function" and node[2] == number)


FAULTS: dict[str, Callable[[Any, str], Any]] = {
    "a name": lambda data, code: call_of(data, "tanh").__setitem__(1, f"x = {code}; y"),
    "a keyword": lambda data, code: call_of(data, "tanh").__setitem__(4, {f"self={code}, x": 1}),
    "an input": lambda data, code: data["graph"]["nodes"][0].__setitem__(2, f"x={code}"),
    "a constant": lambda data, code: call_of(data, "tanh").__setitem__(3, [{"dict": [[f"{code}", 1]]}]),
    "a parameter": lambda data, code: data["parameters"].__setitem__(0, f"x={code}"),
    "an attribute": lambda data, code: data["graph"].__setitem__("held", {f"x={code}": [[], "int64", "cpu", [1]]}),
    "a module": lambda data, code: data["targets"].append("os::system"),
    "a function": lambda data, code: data["targets"].append("builtins.eval"),
    "the namespace": lambda data, code: data["targets"].append("aten::__class__.default"),
    "what is not an operator": lambda data, code: data["targets"].append("aten::name.default"),
    "a file": lambda data, code: call_of(data, "tanh")[3].append("/etc/passwd"),
    "a type": lambda data, code: call_of(data, "mean")[4].__setitem__("dtype", {"dtype": "load"}),
    "a keyword of Python": lambda data, code: call_of(data, "tanh").__setitem__(1, "lambda"),
    "memory that is not there": lambda data, code: data["tensors"][0].__setitem__(2, 100),
    "a name that is taken": lambda data, code: call_of(data, "tanh").__setitem__(1, "x"),
    "what comes later": lambda data, code: call_of(data, "tanh").__setitem__(3, [{"node": 99}]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_code_is_read(fault: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    data = stored(traced(module()))
    FAULTS[fault](data, f"open({str(mark)!r}, 'w')")
    with pytest.raises((Malformed, KeyError, IndexError)):
        read(data)
    assert not mark.exists()


PLACES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "code in a name": (lambda data: data["scopes"][0].__setitem__(2, "x\nimport os"), "the scope 'x.nimport os'"),
    "code in a file": (lambda data: data["scopes"][0].__setitem__(4, "x\rimport os"), "the scope 'step'"),
    "another type": (lambda data: data["scopes"][0].__setitem__(1, "class"), "the scope 'step'"),
    "a count below 0": (lambda data: data["scopes"][0].__setitem__(5, -1), "the size -1"),
    "a parent that is none": (lambda data: data["scopes"][0].__setitem__(0, True), "the size True"),
    "no end of scopes": (lambda data: data.update(scopes=[[i, *data["scopes"][0][1:]] for i in range(1001)]), "deep"),
    "a place that is none": (lambda data: data["origins"][0].__setitem__(-3, [-1]), "the size -1"),
    "code in a module": (lambda data: data["origins"][0].__setitem__(1, "x\nimport os"), "a node.s words"),
    "a text for a number": (lambda data: data["origins"][0].__setitem__(8, ""), "a node.s words"),
}


@pytest.mark.parametrize("fault", PLACES)
def test_a_malformed_place_is_named(fault: str) -> None:
    data = stored(traced(module()))
    break_it, words = PLACES[fault]
    break_it(data)
    with pytest.raises(Malformed, match=words):
        read(data)


WHOLE = stored(traced(module()))
ANYTHING = st.none() | st.booleans() | st.integers(-2, 2**70) | st.text(max_size=4) | st.lists(st.integers(-1, 9))


@settings(max_examples=150, deadline=None)
@given(table=st.sampled_from(["scopes", "origins"]), where=st.tuples(*[st.integers(0, 99)] * 2), junk=ANYTHING)
def test_what_is_read_of_places_is_one_or_an_error(table: str, where: tuple[int, int], junk: Any) -> None:
    """And in a dump it stays a comment."""
    data = copy.deepcopy(WHOLE)
    row = data[table][where[0] % len(data[table])]
    row[where[1] % len(row)] = junk
    try:
        gm = read(data).gm
    except (Malformed, TypeError, IndexError, ValueError):
        return
    for node in gm.graph.nodes:
        for entry in (entry for place in (*call_hierarchy(node), *fwd_call_hierarchy(node)) for entry in place):
            assert entry.type in ("module", "function") and "".join(entry[:4]).isprintable() and entry.count >= 0
    function = next(x for x in ast.parse(readable(gm)).body if isinstance(x, ast.FunctionDef))
    assert len(function.body) == 1 + sum(node.op == "call_function" for node in gm.graph.nodes)


def places(data: Any) -> list[tuple[Any, Any]]:
    """Give every (container, key) in a tree."""
    keys = list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else []
    return [place for key in keys for place in ((data, key), *places(data[key]))]


JUNK = [None, True, -1, 0, 2**70, 1e400, "", "os", "sum", [], {}, [[]], {"node": 0}, {"tuple": 1}, {"tensor": -1}]


@pytest.mark.slow
def test_any_field_may_be_anything() -> None:
    """What is read is a step, or an error; a step may have other numbers, but no other names."""
    whole = stored(traced(module()))
    refused = 0
    for i in range(0, len(places(whole)), 2):
        data = copy.deepcopy(whole)
        container, key = places(data)[i]
        container[key] = JUNK[i % len(JUNK)]
        try:
            read(data)
        except Exception:
            refused += 1
    assert refused > 100


def test_a_result_keeps_its_containers_or_is_refused() -> None:
    class Both(NamedTuple):
        a: torch.Tensor
        b: list[torch.Tensor]

    def result(make: Callable[..., Any]) -> Any:
        step = minimal_fx_tracer(lambda x, scale: make(x + 1, [x * scale, ()]))(X, 2.0)
        return run_traced(read(stored(step)))(X, 2.0)

    assert str(result(lambda a, b: {"a": a, "b": b})) == str({"a": X + 1, "b": [X * 2, ()]})
    for other in (Both, lambda a, b: OrderedDict(a=a, b=b)):
        with pytest.raises(UserError, match="a result in other containers than tuples, lists and dictionaries"):
            result(other)


@pytest.mark.parametrize("held", [torch.zeros(65), torch.zeros(2, dtype=torch.complex64)], ids=["large", "complex"])
def test_a_constant_that_can_not_be_stored_is_named(held: torch.Tensor) -> None:
    with pytest.raises(UserError, match="a Tensor that the model closes over, can't be stored"):
        stored(minimal_fx_tracer(lambda x: x.sum() + held.abs().sum())(X))


def test_an_operator_that_can_not_be_stored_is_named() -> None:
    gm = minimal_fx_tracer(lambda x: x.relu())(X)
    (call,) = gm.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    call.target = torch.relu
    with pytest.raises(UserError, match="relu, which calls .*legal are operators of aten"):
        stored(gm)
