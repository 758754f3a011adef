"""Small functions of every kind: what a graph gives is what the function gives, or it is refused by name."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.errors import UserError


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Registered:
    left: Any
    right: Any


pytree.register_dataclass(Registered)


@dataclasses.dataclass
class Unknown:
    left: Any
    right: Any


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return randn(*shape, seed=seed).requires_grad_()


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 5  # not its derivative: nobody else's is taken


class Net(nn.Module):
    """Two layers, one of which nobody calls, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.unused = (nn.Linear(3, 3) for _ in range(3))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.second(self.first(x)))


def without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 2
    return torch.autograd.grad((x * y).sum(), x)[0]


def in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x * 2


def in_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.t()
    return torch.autograd.grad(y.float().softmax(-1).square().sum(), x)[0]


def own_value_in_place(x: Tensor) -> Tensor:
    y = x * 1
    y[0] = 5
    y.add_(1)
    y[:, 0].zero_()
    return y


def tries(x: Tensor) -> Tensor:
    try:
        return x.view(3, 3)
    except RuntimeError:
        return x * 2


def twice_differentiated(x: Tensor) -> Tensor:
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)[0]


TABLE = randn(4, 3)
SAME, ONES = leaf(3), torch.ones(2)
EQUAL: dict[str, tuple[Callable[..., Any], tuple, tuple | None]] = {  # function, traced with, called with
    "default": (lambda x, factor=2.0: x * factor, (randn(2),), None),
    "default that is a tensor": (lambda x, shift=ONES: x + shift, (randn(2),), None),
    "nested": (
        lambda d: {"o": [d["a"][0] + d["b"], (d["a"][1],)]},
        ({"a": [randn(2), randn(2)], "b": randn(2)},),
        None,
    ),
    "NamedTuple": (lambda p: Pair(p.left + 1, {"k": p.right}), (Pair(randn(2), randn(2)),), None),
    "dataclass": (lambda d: Registered(d.left + 1, d.right), (Registered(randn(2), None),), None),
    "result is the argument": (lambda x: x, (randn(2),), None),
    "result is a view of it": (lambda x: (x.t(), x[0]), (randn(2, 3),), None),
    "one result twice": (lambda x: (lambda y: (y, y))(x + 1), (randn(2),), None),
    "one argument twice": (lambda x, y: x * y, (TABLE, TABLE), (randn(4, 3), randn(4, 3, seed=1))),
    "one leaf twice": (
        lambda x, y: torch.autograd.grad((x * y).sum(), [x, y]),
        (SAME, SAME),
        (leaf(3), leaf(3, seed=1)),
    ),
    "views of one tensor": (lambda x, y: x + y, (TABLE[:2], TABLE[2:]), (TABLE[1:3], TABLE[:2])),
    "other indices": (lambda i, x: x[i], (torch.tensor([0, 1]), TABLE), (torch.tensor([3, 3]), TABLE)),
    "no dimension": (lambda x: x * 2, (torch.tensor(3.0),), (torch.tensor(4.0),)),
    "no element": (lambda x: x.sum() + x.numel(), (torch.zeros(0, 3),), None),
    "None": (lambda x, y: x if y is None else x + y, (randn(2), None), None),
    "constants that are not finite": (lambda x, n, m: x + m, (randn(2), float("nan"), float("inf")), None),
    "complex": (lambda x: x * 1j, (randn(2),), None),
    "no_grad inside": (without_grad, (leaf(3),), None),
    "inference mode inside": (in_inference_mode, (randn(2),), None),
    "autocast inside": (in_autocast, (leaf(3, 3),), (leaf(3, 3, seed=1),)),
    "own value in place": (own_value_in_place, (randn(2, 3),), None),
    "an operator that fails": (tries, (randn(2, 3),), None),
    "differentiated twice": (twice_differentiated, (leaf(3),), None),
    "autograd function": (lambda x: torch.autograd.grad(Cubed.apply(x).sum(), x)[0], (leaf(3),), None),
    "not a leaf": (lambda x: torch.autograd.grad((x * x).sum(), x)[0], (leaf(3) * 2,), None),
    "not contiguous": (lambda x: x * 2, (randn(3, 2).t(),), (randn(3, 2, seed=1).t(),)),
    "vmap": (lambda x: torch.vmap(lambda row: row * 2)(x), (randn(2, 3),), None),
    "functional gradient": (lambda x: torch.func.grad(lambda z: (z**2).sum())(x), (randn(3),), None),
    "a builtin": (torch.sin, (randn(2),), None),
    "a partial": (functools.partial(torch.add, alpha=2), (randn(2), randn(2)), None),
    "a parameter": (lambda p: p * 2, (nn.Parameter(randn(2)),), None),
}


def same(found: Any, expected: Any) -> bool:
    (found, structure), (expected, other) = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    return structure == other and all(
        (a.dtype, a.stride()) == (b.dtype, b.stride()) and torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("name", EQUAL)
def test_the_graph_gives_what_the_function_gives(name: str) -> None:
    fn, traced_with, called_with = EQUAL[name]
    run = run_traced(minimal_fx_tracer(fn)(*traced_with))
    called_with = called_with or traced_with
    assert same(run(*called_with), fn(*called_with))


def gradients(net: nn.Module, x: Tensor) -> Any:
    return torch.autograd.grad(net(x).sum(), [p for p in net.parameters() if p.requires_grad], allow_unused=True)


def checkpointed(net: nn.Module, x: Tensor) -> Any:
    net.zero_grad()
    checkpoint(net, x, use_reentrant=False).sum().backward()
    return [p.grad for p in net.parameters()]


def tie(net: Any) -> None:
    net.second.weight = net.first.weight


def hook(net: Any) -> None:
    net.first.register_forward_hook(lambda module, args, out: out * 2)
    net.second.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    net.second.register_full_backward_hook(lambda module, given, got: tuple(g if g is None else g * 3 for g in given))


@pytest.mark.parametrize("prepare", [lambda net: None, lambda net: net.first.requires_grad_(False), tie, hook])
@pytest.mark.parametrize("step", [gradients, checkpointed])
def test_a_module_that_is_frozen_tied_hooked_or_partly_unused(step: Callable, prepare: Callable) -> None:
    net = Net().eval()
    prepare(net)
    run = run_traced(minimal_fx_tracer(functools.partial(step, net), module=net)(randn(2, 3)), module=net)
    assert same(run(randn(2, 3, seed=1)), step(net, randn(2, 3, seed=1)))


REFUSED: dict[str, tuple[Callable[..., Any], tuple, str]] = {  # function, traced with, message
    "an unknown result": (
        lambda x: [Unknown(x + 1, x)],
        (randn(2),),
        r"the result\[0\] is a Unknown; .*register_dataclass",
    ),
    "a result that is read once": (lambda x: (y for y in [x]), (randn(2),), "the result is a generator"),
    "an unknown argument": (lambda d: d.left, (Unknown(randn(2), 1),), "d is a Unknown"),
    "a sparse argument": (lambda x: x.to_dense(), (torch.eye(2).to_sparse(),), "x is a sparse_coo tensor"),
    "a sparse result": (
        lambda x: x.to_sparse(),
        (torch.eye(2),),
        "the result is a sparse_coo tensor|depends on values",
    ),
    "a mask of rows": (lambda x: x[x > 0], (randn(3),), "a tensor whose shape depends on values.*torch.where"),
    "nonzero": (lambda x: x.nonzero(), (randn(3),), "a tensor whose shape depends on values"),
    "a branch on a value": (lambda x: x if x.sum() > 0 else -x, (randn(3),), "reads a tensor's value"),
    "assigned data": (lambda x: setattr(x, "data", x * 2) or x + 0, (randn(3),), "assigns the data of x"),
    "random": (lambda x: x[torch.randperm(3)], (randn(3),), "draws random numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_hold_is_refused_by_name(name: str) -> None:
    fn, traced_with, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        minimal_fx_tracer(fn)(*traced_with)


def test_data_assigned_to_a_parameter_is_refused_by_name() -> None:
    net = Net().eval()

    def step(x: Tensor) -> Tensor:
        net.first.weight.data = net.first.weight * 2
        return net(x)

    with pytest.raises(UserError, match=r"assigns the data of first.weight"):
        minimal_fx_tracer(step, module=net)(randn(2, 3))


def count(parameter: Tensor) -> None:
    pass


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_gradient_is_refused_by_name(register: str) -> None:
    net = Net().eval()
    getattr(net.first.weight, register)(count)
    with pytest.raises(UserError, match=r"first.weight has a hook on its gradient"):
        minimal_fx_tracer(functools.partial(gradients, net), module=net)(randn(2, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda net: net.train(), "training is True, traced with False"),
        (lambda net: net.dropout.train(), "dropout.training is True, traced with False"),
        (lambda net: net.first.requires_grad_(False), "first.weight.requires_grad is False, traced with True"),
        (lambda net: setattr(net.second, "weight", net.first.weight), "missing param second.weight"),
    ],
)
def test_a_module_that_changes_after_the_trace_is_refused_by_name(change: Callable, message: str) -> None:
    net = Net().eval()
    run = run_traced(minimal_fx_tracer(functools.partial(gradients, net), module=net)(randn(2, 3)), module=net)
    run(randn(2, 3))
    change(net)
    for _ in range(2):  # an error leaves nothing that the next call takes for what was traced
        with pytest.raises(UserError, match=message):
            run(randn(2, 3))


def as_another(net: Net) -> None:
    net.first = nn.Linear(*net.first.weight.shape[::-1], bias=net.first.bias is not None)
    net.first.eval().__class__ = Doubled


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def hooked(net: Net) -> None:
    net.first = copy.deepcopy(net.first)
    net.first.register_forward_hook(lambda module, args, result: result * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (as_another, r"first is a test_trace_cases.Doubled, traced as a torch.nn.modules.linear.Linear: what"),
        (hooked, r"first is a .*Linear with 1 hook, traced as a torch.nn.modules.linear.Linear: what"),
        (lambda net: delattr(net, "dropout"), "dropout is missing, traced as a torch.nn.modules.dropout.Dropout: what"),
    ],
)
def test_a_module_of_another_class_or_with_a_hook_is_refused_by_name(change: Callable, message: str) -> None:
    net = Net().eval()
    run = run_traced(minimal_fx_tracer(functools.partial(gradients, net), module=net)(randn(2, 3)), module=net)
    change(net)
    for _ in range(2):
        with pytest.raises(UserError, match=message):
            run(randn(2, 3))


def test_a_module_more_is_refused_by_name() -> None:
    net = Net().eval()
    traced = minimal_fx_tracer(functools.partial(gradients, net), module=net)(randn(2, 3))
    net.more = nn.Tanh().eval()
    with pytest.raises(UserError, match=r"more is a torch.nn.*Tanh, traced as missing: what a module computes"):
        run_traced(traced, module=net)


@pytest.mark.parametrize("traced_in", [False, True])
def test_autocast_around_a_call_is_that_around_the_trace_or_refused(traced_in: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.autograd.grad((x @ x.t()).softmax(-1).square().sum(), x)[0]

    def around(on: bool) -> contextlib.AbstractContextManager:
        return torch.autocast("cpu", dtype=torch.bfloat16) if on else contextlib.nullcontext()

    with around(traced_in):
        run = run_traced(minimal_fx_tracer(fn)(leaf(3, 3)))
        assert same(run(leaf(3, 3)), fn(leaf(3, 3)))
    with around(not traced_in), pytest.raises(UserError, match="torch.autocast is .*, traced with"):
        run(leaf(3, 3))


def test_an_argument_on_another_device_is_refused_by_name() -> None:
    run = run_traced(minimal_fx_tracer(lambda x: x + torch.ones(2))(randn(2)))
    with pytest.raises(UserError, match="x is on meta, traced on cpu"):
        run(torch.ones(2, device="meta"))


def test_a_graph_that_strides_break_says_which() -> None:
    run = run_traced(minimal_fx_tracer(lambda x, y: x.view(-1) + y)(randn(2, 3), randn(6)))
    with pytest.raises(UserError, match=r"x has strides \(1, 2\), traced with \(3, 1\)"):
        run(randn(3, 2).t(), randn(6))


def test_unused_operators_on_tensors_that_nothing_was_written_to_are_left_out() -> None:
    """DTensor's rules make them in torch 2.11."""

    def fn(x: Tensor) -> Tensor:
        made_up = torch.empty_strided((4, 4), (4, 1))
        (made_up @ made_up).relu()
        written = torch.empty_strided((4,), (1,))
        written[:2].fill_(3.0)
        written[2:].fill_(4.0)
        return written * x

    traced, x = minimal_fx_tracer(fn)(randn(4)), randn(4, seed=1)
    assert not traced.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert torch.equal(run_traced(traced)(x), fn(x))
