"""Each node knows the calls of modules and functions that it was made in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

from torchtitan_graph.capture.dynamo import dynamo_capture
from torchtitan_graph.capture.stamp import described
from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.compiler import Inspection, Pass, run_passes
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import call
from torchtitan_graph.graph.hierarchy import call_hierarchy, fwd_call_hierarchy, shown
from torchtitan_graph.passes.cleanup import cleanup

aten = torch.ops.aten


def rotate_half(x: Tensor) -> Tensor:
    return x.flip(-1)


def rotary(x: Tensor) -> Tensor:
    return x + rotate_half(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return rotary(self.q(x)) * rotary(x)


class Model(nn.Module):
    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x


def step_of(model: nn.Module) -> Callable[..., Any]:
    def step(x: Tensor) -> Any:
        loss = model(x).sum()
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    return step


def traced(fn: Callable[..., Any], module: nn.Module | None = None, **options: Any) -> GraphModule:
    return minimal_fx_tracer(fn, module, call_hierarchy=True, **options)(torch.ones(2, 4)).gm


def nodes(gm: GraphModule, target: Any = None) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function" and target in (None, node.target)]


def places(fn: Callable[..., Any], target: Any, module: nn.Module | None = None) -> list[str]:
    return [shown(place) for node in nodes(traced(fn, module), target) for place in call_hierarchy(node)]


def test_modules_and_functions_stand_outermost_first() -> None:
    model = Model()
    inner = "step() > :Model > {}:Attention > {} > rotate_half()"
    assert places(step_of(model), aten.flip.default, model)[:4] == [
        inner.format(layer, call) for layer in (0, 1) for call in ("rotary()", "rotary()#1")
    ]
    (place,) = call_hierarchy(nodes(traced(step_of(model), model), aten.flip.default)[1])
    _, _, layer, function, _ = place
    assert layer == ("module", "0", f"{__name__}.Attention", "layers.0", 0)
    assert function[:3] == ("function", "rotary", f"{__name__}.rotary") and function.count == 1
    assert function.path == f"{__file__}:{rotary.__code__.co_firstlineno}"


def doubled(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    @functools.wraps(fn)
    def call_twice(*args: Any, **kwargs: Any) -> Tensor:
        return fn(*args, **kwargs) + fn(*args, **kwargs)

    return call_twice


@doubled
def decorated(x: Tensor) -> Tensor:
    return x.sin()


def pieces(x: Tensor) -> Iterator[Tensor]:
    yield x.sin()
    yield x.sin()


def looks_only(x: Tensor) -> int:
    return x.shape[0]


def either(x: Tensor, makes: bool) -> Any:
    return x.sin() if makes else looks_only(x)


def in_a_loop(x: Tensor) -> Tensor:
    for _ in range(3):
        x = either(x, makes=True)
    return x


def without_a_node(x: Tensor) -> Tensor:
    either(x, makes=False)
    return either(x, makes=True)


def under_two_parents(x: Tensor) -> Tensor:
    return in_a_loop(either(x, makes=True))


def by_a_generator(x: Tensor) -> Tensor:
    return sum(pieces(x), sum([piece.cos() for piece in pieces(x)]))


def first(them: Iterator[Tensor]) -> Tensor:
    return next(them)


def second(them: Iterator[Tensor]) -> Tensor:
    return next(them)


def by_several_callers(x: Tensor) -> Tensor:
    them = pieces(x)
    return first(them) + second(them)


def by_a_decorator(x: Tensor) -> Tensor:
    return decorated(x)


def by_itself(x: Tensor, depth: int = 2) -> Tensor:
    return by_itself(x.sin(), depth - 1) if depth else x.sin()


LOOP = [f"in_a_loop() > either(){n}" for n in ("", "#1", "#2")]


@pytest.mark.parametrize(
    ("fn", "counted"),
    [
        (in_a_loop, LOOP),
        (without_a_node, ["without_a_node() > either()"]),
        (under_two_parents, [f"under_two_parents() > {x}" for x in ("either()", *LOOP)]),
        (by_a_generator, [f"by_a_generator() > pieces(){n}" for n in ("", "", "#1", "#1")]),
        (by_several_callers, [f"by_several_callers() > {caller}() > pieces()" for caller in ("first", "second")]),
        (by_a_decorator, ["by_a_decorator() > decorated()", "by_a_decorator() > decorated()#1"]),
        (by_itself, [" > ".join(["by_itself()"] * n) for n in (1, 2, 3)]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_call_is_counted_under_its_parent(fn: Callable[..., Any], counted: list[str]) -> None:
    assert places(fn, aten.sin.default) == counted
    assert places(fn, aten.sin.default) == counted  # another trace begins anew


def test_a_module_that_is_called_again_is_counted() -> None:
    shared = nn.Linear(4, 4, bias=False)
    found = places(lambda x: shared(shared(x)), aten.mm.default, nn.ModuleDict({"shared": shared}))
    assert found == ["<lambda>() > shared:Linear", "<lambda>() > shared:Linear#1"]


class Decorated(nn.Module):
    @doubled
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def test_a_decorated_forward_is_its_module() -> None:
    model = nn.ModuleDict({"one": Decorated()})
    assert places(lambda x: model["one"](x), aten.sin.default, model) == ["<lambda>() > one:Decorated"] * 2


def test_modules_of_the_moment_are_not_taken_for_each_other() -> None:
    assert places(lambda x: Decorated()(Decorated()(x)), aten.sin.default) == ["<lambda>() > :Decorated"] * 4


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.neg()


def test_backward_has_a_forward_origin() -> None:
    model = Model()
    gm = traced(step_of(model), model)
    backward = [node for node in nodes(gm) if meta.phase(node) == "backward"]
    assert {meta.origin(node) for node in backward} == {"backward"} and all(map(call_hierarchy, backward))
    flips = [shown(fwd_call_hierarchy(node)[0]) for node in backward if node.target is aten.flip.default]
    calls = ("1:Attention > rotary()#1", "1:Attention > rotary()", "0:Attention > rotary()")  # the input needs none
    assert flips == [f"step() > :Model > {each} > rotate_half()" for each in calls]
    assert not any(fwd_call_hierarchy(node) for node in nodes(gm) if node not in backward)


def test_what_a_backward_of_ones_own_calls_stands_below_its_origin() -> None:
    model = nn.Linear(4, 4)
    gm = traced(lambda x: torch.autograd.grad(Twice.apply(model(x)).sum(), list(model.parameters())), model)
    (node,) = nodes(gm, aten.neg.default)
    assert shown(call_hierarchy(node)[0]) == "<lambda>() > forward() > backward()"
    assert shown(fwd_call_hierarchy(node)[0]) == shown(fwd_call_hierarchy(node)) == "<lambda>() > forward()"
    assert shown(fwd_call_hierarchy(node) * 2) == "<lambda>() > forward(); <lambda>() > forward()"


def test_what_is_computed_again_stands_where_it_stood() -> None:
    model = Model(recomputes=True)
    gm = traced(step_of(model), model)
    forward = [call_hierarchy(node) for node in nodes(gm, aten.flip.default) if meta.phase(node) == "forward"]
    again = [node for node in nodes(gm, aten.flip.default) if meta.origin(node) == meta.RECOMPUTED]
    assert sorted(map(call_hierarchy, again)) == sorted(forward) and len(forward) == 4
    assert all(fwd_call_hierarchy(node) == call_hierarchy(node) for node in again)


class Reader(Attention):
    """Reads what it is given twice, once by a module of its own making."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x * Decorated()(x)


class Readers(Model):
    """Its last block's result is read once more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Reader() for _ in range(3))
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(super().forward(x))


@pytest.mark.parametrize("kind", [Model, Readers])
def test_blocks_that_are_copied_have_their_own_paths(kind: type[Model]) -> None:
    model = kind()
    blocks = {f"layers.{i}": block for i, block in enumerate(model.layers)}
    found = [nodes(cleanup(traced(step_of(model), model, blocks=each))) for each in ({}, blocks)]
    assert [*map(call_hierarchy, found[0])] == [*map(call_hierarchy, found[1])]
    assert [*map(fwd_call_hierarchy, found[0])] == [*map(fwd_call_hierarchy, found[1])]


def test_without_it_the_graph_is_the_same_and_says_nothing() -> None:
    model = Model()
    plain = minimal_fx_tracer(step_of(model), model)(torch.ones(2, 4)).gm
    assert described(plain) == described(traced(step_of(model), model))
    assert not any("call_hierarchy" in node.meta or "is_grad" in node.meta for node in plain.graph.nodes)


def negates(gm: GraphModule) -> GraphModule:
    """Put -(-x) behind each sine, by FX's own means and by the project's."""
    for node in nodes(gm, aten.sin.default):
        (reader,) = node.users
        with gm.graph.inserting_after(node):
            first = gm.graph.call_function(aten.neg.default, (node,))
            first.meta["val"] = node.meta["val"]
        with gm.graph.inserting_after(first):
            reader.replace_input_with(node, call(gm.graph, node, aten.neg.default, first))
    gm.recompile()
    return gm


def test_what_a_pass_makes_names_it_and_has_a_place() -> None:
    gm = traced(in_a_loop)
    run_passes(gm, [Pass("negates", negates)], (), torch.device("cpu"), Inspection())
    made = nodes(gm, aten.neg.default)
    assert {meta.origin(node) for node in made} == {"negates"} and len(made) == 6
    assert [shown(call_hierarchy(node)[0]) for node in made][::2] == places(in_a_loop, aten.sin.default)


def test_dynamo_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"call_hierarchy=True\): not with compile.capture = 'dynamo', .* \(minimal_fx_tracer"
    ):
        dynamo_capture(rotary, call_hierarchy=True)(torch.ones(2))


def test_a_hook_on_a_tensor_belongs_to_the_operator_that_made_the_tensor() -> None:
    class Hooked(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x)
            q.register_hook(scale)
            return q.cos()

    def scale(grad: Tensor) -> Tensor:
        return grad * 3

    model = nn.Sequential(Hooked(), Hooked())
    made = [node for node in nodes(traced(step_of(model), model), aten.mul.Tensor) if 3 in node.args]
    owners = [f"step() > :Sequential > {name}:Hooked > q:Linear" for name in "10"]
    assert [[shown(place) for place in fwd_call_hierarchy(node)] for node in made] == [[owner] for owner in owners]
    assert [shown(place) for node in made for place in call_hierarchy(node)] == [
        f"{owner} > scale()" for owner in owners
    ]
    assert [meta.module(node) for node in made] == ["1.q", "0.q"]


class CallsItself(nn.Module):
    """Has a `__call__` of its own, instead of its base's or around it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


class Instead(CallsItself):
    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()


class Around(CallsItself):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x).cos()


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.instead, self.around, self.directly = Instead(), Around(), CallsItself()

    def forward(self, x: Tensor) -> Tensor:
        return self.directly.forward(self.around(self.instead(x)).tanh())


def test_a_call_of_ones_own_and_a_forward_that_is_called_directly_are_the_module() -> None:
    model, before = Calls(), (Instead.__call__, CallsItself.forward, nn.Module.__call__)
    gm = traced(step_of(model), model)
    found = {
        aten.sin.default: ("instead", "instead:Instead"),
        aten.cos.default: ("around", "around:Around"),
        aten.tanh.default: ("", ""),
        aten.relu.default: ("directly", "directly:CallsItself"),
    }
    for target, (name, place) in found.items():
        node = [n for n in nodes(gm, target) if meta.phase(n) == "forward"][-1]
        assert meta.module(node) == name
        assert shown(call_hierarchy(node)[0]) == " > ".join(filter(None, ("step()", ":Calls", place)))
    products = [shown(call_hierarchy(node)[0]) for node in nodes(gm, aten.addmm.default)]
    assert products == [f"step() > :Calls > {each} > linear:Linear" for each in [p for _, p in found.values() if p]]
    assert (Instead.__call__, CallsItself.forward, nn.Module.__call__) == before


def test_functions_that_are_made_of_text_are_told() -> None:
    made: dict = {}
    exec("def turned(x):\n    return x.flip(-1)", made)
    (node,) = nodes(traced(lambda x: made["turned"](x)), aten.flip.default)
    assert shown(call_hierarchy(node)[0]) == "<lambda>() > turned()"
