"""What a traced function takes and gives: the calling convention of `minimal_fx_tracer` and `run_traced`."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.errors import UserError


def traced(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    return run_traced(minimal_fx_tracer(fn)(*args, **kwargs))


ONE = torch.ones(1)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@pytest.mark.parametrize(
    "call",
    [
        lambda fn, x, y: fn(x, y),
        lambda fn, x, y: fn(x, y=y),
        lambda fn, x, y: fn(x=x, y=y),
        lambda fn, x, y: fn(Pair(x, y), [y, {"z": x}]),
        lambda fn, x, y: fn({"a": (x, None), "b": [y, [x]]}, y=()),
        lambda fn, x, y: fn(x, y, 2, 0.5, True, "word", None),
    ],
)
def test_arguments_are_those_of_the_function(call: Callable) -> None:
    def fn(*args: Any, **kwargs: Any) -> Any:
        leaves = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        return sum((i + 1) * t for i, t in enumerate(leaves))

    run = call(lambda *args, **kwargs: traced(fn, *args, **kwargs), torch.zeros(3), torch.zeros(3))
    x, y = torch.randn(3), torch.randn(3)
    assert torch.equal(call(run, x, y), call(fn, x, y))


def test_keywords_may_come_in_another_order() -> None:
    run = traced(lambda *, a, b: a - b, a=torch.zeros(2), b=torch.zeros(2))
    assert torch.equal(run(b=torch.ones(2), a=torch.zeros(2)), -torch.ones(2))


def test_the_result_keeps_its_structure_and_what_is_no_tensor() -> None:
    def fn(x: Tensor) -> Any:
        return {"pair": Pair(x + 1, x + 2), "size": x.shape[0], "words": ["a", None], "flag": True, "same": x}

    x = torch.randn(3)
    result, expected = traced(fn, torch.zeros(3))(x), fn(x)
    assert list(result) == list(expected)
    assert isinstance(result["pair"], Pair)
    assert {k: v for k, v in result.items() if k not in ("pair", "same")} == {
        "size": 3,
        "words": ["a", None],
        "flag": True,
    }
    assert torch.equal(result["pair"].right, x + 2)
    assert torch.equal(result["same"], x)


def test_a_constant_takes_part_in_the_trace() -> None:
    run = traced(lambda x, factor, negate: -x * factor if negate else x * factor, torch.zeros(1), 3, True)
    assert run(torch.ones(1), 3, True).item() == -3


@pytest.mark.parametrize(("factor", "negate"), [(4, True), (3, False), (3.0, True), (None, True), (3, 1)])
def test_another_constant_is_refused(factor: Any, negate: Any) -> None:
    run = traced(lambda x, factor, negate: x * factor, torch.zeros(1), 3, True)
    with pytest.raises(UserError, match="(factor|negate) is .* constant of the trace; pass it as a tensor, or trace"):
        run(torch.ones(1), factor, negate)


def two(x: Any, y: Any = None) -> Any:
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves((x, y)) if isinstance(leaf, Tensor)]
    return sum((i + 1) * leaf for i, leaf in enumerate(leaves))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((ONE,), {}, "y is missing"),
        ((ONE, [ONE]), {"extra": ONE}, "extra was not traced"),
        ((ONE,), {"yy": [ONE]}, r"y is missing; yy was not traced \(did you mean y\?\)"),
        ((ONE, [ONE, ONE]), {}, r"y\[1\] was not traced"),
        ((ONE, []), {}, r"y\[0\] is missing"),
        ((ONE, (ONE,)), {}, "y has another structure"),
        ((ONE, {"a": ONE}), {}, r"y\[0\] is missing; y\['a'\] was not traced"),
        ((ONE, [ONE], ONE), {}, r"args\[2\] was not traced"),
    ],
)
def test_another_structure_is_refused_by_name(args: tuple, kwargs: dict, message: str) -> None:
    run = traced(two, ONE, [ONE])
    with pytest.raises(UserError, match=f"arguments are not those traced: {message}") as caught:
        run(*args, **kwargs)
    assert "TreeSpec" not in str(caught.value) and len(str(caught.value)) < 200


def test_an_argument_may_come_by_keyword_or_by_position() -> None:
    x, y = torch.randn(1), [torch.randn(1)]
    by_position, by_keyword = traced(two, ONE, [ONE]), traced(two, y=[ONE], x=ONE)
    for run in (by_position, by_keyword):
        for found in (run(x, y), run(x, y=y), run(y=y, x=x)):
            assert torch.equal(found, two(x, y))


@pytest.mark.parametrize("batch", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), 1.0])
def test_an_argument_of_another_shape_dtype_or_kind_is_refused_by_name(batch: Any) -> None:
    run = traced(lambda batch: batch["tokens"] + 1, {"tokens": torch.zeros(2, 3)})
    with pytest.raises(UserError, match=r"batch\['tokens'\]"):
        run({"tokens": batch})


def test_a_leaf_that_a_graph_cannot_hold_is_refused_with_what_to_do() -> None:
    class Setting:
        pass

    with pytest.raises(UserError, match=r"setting is a Setting; .* closure.*register_pytree_node.*register_constant"):
        minimal_fx_tracer(lambda x, setting: x)(torch.zeros(1), Setting())
    setting = Setting()
    setting.factor = 2  # type: ignore[attr-defined]
    assert traced(lambda x: x * setting.factor, torch.ones(1))(torch.ones(1)) == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo looks
def test_branches_may_close_over_different_numbers() -> None:
    """The second call has its number as a symbol, for a fake mode of our own: torch's rules are for torch's."""

    def branch(x: Tensor, factor: float) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * factor, torch.sin, (x,))

    def step(x: Tensor) -> Tensor:
        return torch.autograd.grad(branch(branch(x, 2.0), 3.0).sum(), x)[0]

    run = traced(step, torch.ones(2, requires_grad=True))
    for x in (torch.ones(2, requires_grad=True), -torch.ones(2, requires_grad=True)):
        assert torch.equal(run(x), step(x))


def test_a_registered_constant_is_accepted() -> None:
    class Word(str):
        __slots__ = ()

    torch.utils._pytree.register_constant(Word)
    run = traced(lambda x, word: x * len(word), torch.zeros(1), Word("ab"))
    assert run(torch.ones(1), Word("ab")) == 2
    with pytest.raises(UserError, match="structure"):
        run(torch.ones(1), Word("abc"))


def test_a_module_among_the_arguments_is_refused() -> None:
    with pytest.raises(UserError, match="model is an nn.Module: pass it as module="):
        minimal_fx_tracer(lambda model, x: model(x))(nn.Linear(2, 2), torch.zeros(1, 2))


def test_what_else_the_function_closes_over_is_a_constant_of_the_trace() -> None:
    scale = [2.0]
    run = traced(lambda x: x * scale[0], torch.zeros(1))
    scale[0] = 3.0
    assert run(torch.ones(1)) == 2


def test_the_graph_runs_without_autograd() -> None:
    x = torch.ones(2, requires_grad=True)
    run = traced(lambda x: x * 2, x)
    assert torch.is_grad_enabled()
    assert not run(x).requires_grad
    assert torch.is_grad_enabled()


def test_an_argument_that_requires_grad_can_be_differentiated() -> None:
    run = traced(lambda x: torch.autograd.grad((x**3).sum(), x)[0], torch.ones(2, requires_grad=True))
    assert torch.equal(run(torch.tensor([1.0, 2.0])), torch.tensor([3.0, 12.0]))


# --- in-place writes and random numbers ------------------------------------------------------------------------------


def write_out(x: Tensor) -> Tensor:
    torch.add(x, 1, out=x)
    return x * 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.add_(1),
        lambda x: x.view(-1).mul_(2).sum(),
        lambda x: x[0].zero_(),
        lambda x: x.chunk(2)[1].add_(1) + 1,
        lambda x: x.detach().t().fill_(0),
        lambda x: torch._foreach_add_([x, x + 1], 1) or x + 1,
        write_out,
    ],
)
def test_an_in_place_write_to_an_input_is_refused_by_name(fn: Callable) -> None:
    with pytest.raises(UserError, match=r"writes in place to (x|args\[0\]) \("):
        minimal_fx_tracer(fn)(torch.ones(2, 2))


def test_a_write_to_a_tensor_of_the_closure_is_refused() -> None:
    counter = torch.zeros(1)
    with pytest.raises(UserError, match="writes in place to a tensor that it closes over"):
        minimal_fx_tracer(lambda x: counter.add_(1) + x)(torch.ones(1))


def test_a_write_to_the_functions_own_values_is_fine() -> None:
    run = traced(lambda x: (x + 1).mul_(2), torch.zeros(2))
    assert torch.equal(run(torch.ones(2)), torch.full((2,), 4.0))


@pytest.mark.parametrize(
    ("fn", "operator"),
    [
        (lambda x: x + torch.rand(2), "rand"),
        (lambda x: nn.functional.dropout(x, 0.5), "dropout|bernoulli|rand"),
        (lambda x: torch.empty(2).normal_() + x, "normal"),
        (lambda x: torch.bernoulli(x), "bernoulli"),
        (lambda x: nn.functional.scaled_dot_product_attention(*3 * [x.view(1, 1, 1, 2)], dropout_p=0.5), "."),
    ],
)
def test_random_numbers_are_refused_by_name(fn: Callable, operator: str) -> None:
    with pytest.raises(UserError, match=rf"draws random numbers \(aten\.\w*({operator})"):
        minimal_fx_tracer(fn)(torch.full((2,), 0.5))


def test_attention_without_dropout_is_no_random_operation() -> None:
    q = torch.randn(1, 1, 4, 8)
    run = traced(lambda q: nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.0), q)
    assert torch.equal(run(q), nn.functional.scaled_dot_product_attention(q, q, q))


# --- the life of inputs ----------------------------------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """Notes at each operator whether the tensor's memory is still there."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: StorageWeakRef | None = None
        self.seen: dict[str, bool] = {}

    def watch(self, tensor: Tensor) -> Tensor:
        self.memory = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.memory is not None:
            self.seen[func._schema.name] = not self.memory.expired()
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before Python 3.11 the caller's stack holds every argument")
def test_an_input_that_nobody_holds_is_freed_after_its_last_use() -> None:
    run = traced(lambda x: (x * 2).sin().cos(), torch.zeros(4))
    with Alive() as alive:
        run(alive.watch(torch.ones(4) + 1))
    assert [alive.seen[f"aten::{op}"] for op in ("mul", "sin", "cos")] == [True, False, False]


def test_an_input_that_the_caller_holds_is_not_freed() -> None:
    run = traced(lambda x: (x * 2).sin().cos(), torch.zeros(4))
    with Alive() as alive:
        x = alive.watch(torch.ones(4) + 1)
        run(x)
    assert all(alive.seen.values())


# --- a trace leaves nothing behind -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_a_trace_leaves_torch_as_it_was(fails: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        if fails:
            raise RuntimeError("no")
        return torch.autograd.grad((x * 2).sum(), x)[0]

    def patched() -> list:
        return [nn.Module.__call__, torch.autograd._engine_run_backward, torch.autograd.is_multithreading_enabled()]

    before = patched()
    with pytest.raises(RuntimeError, match="no") if fails else contextlib.nullcontext():
        minimal_fx_tracer(fn, module=nn.Linear(1, 1))(torch.ones(2, requires_grad=True))
    assert patched() == before
    assert torch._guards.TracingContext.try_get() is None
    assert type(torch.ones(1)) is Tensor
