"""Access to a tensor's memory without an operator is refused by name and line: a trace has no memory."""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from sized import CAPTURES
from torch import Tensor, nn

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.errors import UserError

X = torch.arange(1.0, 4.0)


def assigned(x: Tensor) -> Tensor:
    y = x * 1
    y.data = x * 3
    return y * 2


def assigned_by_name(x: Tensor) -> Tensor:
    y = x * 1
    setattr(y, "data", x * 3)  # noqa: B010
    return y * 2


def assigned_by_dunder(x: Tensor) -> Tensor:
    y = x * 1
    y.__setattr__("data", x * 3)
    return y * 2


def assigned_to_a_parameter(x: Tensor) -> Tensor:
    y = nn.Parameter(x * 1)
    y.data = x * 3
    return y * 2


def assigned_and_set_back(x: Tensor) -> Tensor:
    before, x.data = x.data, x * 3
    y = x * 2
    x.data = before
    return y


def stepped(x: Tensor) -> Tensor:
    """A straight-through rounding."""
    y = x * 0.7
    y.data = y.round()
    return y.square()


def swapped(x: Tensor) -> Tensor:
    y, z = x * 1, x * 3
    torch.utils.swap_tensors(y, z)
    return y * 2


def branching(x: Tensor) -> Tensor:
    return x * 2 if x.data_ptr() % 16 else x * 3


def copied(x: Tensor) -> Tensor:
    y = torch.empty(3)
    ctypes.memmove(y.data_ptr(), (x * 1).data_ptr(), 12)
    return y


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "assigned": (assigned, r"assigns the data of a tensor \(.*y.data = x \* 3\).*torch.autograd.Function"),
    "assigned by name": (assigned_by_name, r"assigns the data of a tensor \("),
    "assigned by dunder": (assigned_by_dunder, r"assigns the data of a tensor \("),
    "assigned to a parameter": (assigned_to_a_parameter, r"assigns the data of a tensor \("),
    "assigned and set back": (assigned_and_set_back, r"assigns the data of x \(|writes in place to x \("),
    "straight through": (stepped, r"assigns the data of a tensor \("),
    "swapped": (swapped, r"swaps tensors in place \(.*swap_tensors\(y, z\)"),
    "set to a storage": (lambda x: (x * 1).set_((x * 3).untyped_storage()), r"reads or writes a tensor's storage \("),
    "a storage filled": (lambda x: (x * 1).untyped_storage().fill_(0), r"reads or writes a tensor's storage \("),
    "a storage copied": (
        lambda x: (x * 1).untyped_storage().copy_(x.untyped_storage()),
        r"reads or writes a tensor's storage \(",
    ),
    "a storage read": (lambda x: x * x.untyped_storage()[0], r"reads or writes a tensor's storage \("),
    "a branch on an address": (branching, r"takes the address of a tensor \(.*custom_op"),
    "a copy by ctypes": (copied, r"takes the address of a tensor \("),
    "a storage's address": (lambda x: x * bool(x.untyped_storage().data_ptr()), r"takes the address of a tensor \("),
    "dlpack": (lambda x: torch.from_dlpack(x * 1), r"takes the address of a tensor \("),
}


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_done_with_memory_is_refused_by_name_and_line(name: str, capture: str) -> None:
    fn, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        CAPTURES[capture](fn)(X.clone())


def test_a_constant_address_is_refused() -> None:
    """Dynamo gives no number for it; eager and the tracer do."""
    with pytest.raises(UserError, match=r"takes the address of a tensor \("):
        CAPTURES["make_fx"](lambda x: x * bool(x.const_data_ptr()))(X)


def test_an_array_of_numpy_is_refused_or_traced() -> None:
    """Dynamo traces NumPy's functions."""
    with pytest.raises(UserError, match=r"makes a NumPy array of a tensor \("):
        CAPTURES["make_fx"](lambda x: torch.from_numpy(numpy.asarray(x * 1)) * 2)(X)


class Rounded(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.data = y.round()
        return y


@pytest.mark.parametrize("capture", CAPTURES)
def test_blocks_that_assign_data_are_refused(capture: str) -> None:
    """As a trainer traces them: one of each kind, alone."""
    model = nn.Sequential(*(Rounded(3, 3) for _ in range(3)))

    def step(x: Tensor) -> Any:
        loss = model(x).sum()
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    with pytest.raises(UserError, match=r"assigns the data of a tensor \(.*y.data = y.round\(\)"):
        CAPTURES[capture](step, model, blocks=dict(model.named_children()))(X)


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x * 1).set_(x * 3) * 2,
        lambda x: (y := x * 1, y.data.add_(5), y * 2)[-1],
        lambda x: (y := x * 1, y.detach().add_(5), y * 2)[-1],
        lambda x: (y := x * 1, y.data.copy_(x * 3), y * 2)[-1],
        lambda x: (y := (x * 1).requires_grad_(), setattr(y, "grad", x * 3), y.grad * 2)[-1],
    ],
)
def test_writes_by_operators_are_traced(fn: Callable[[Tensor], Tensor], capture: str) -> None:
    assert torch.equal(run_traced(CAPTURES[capture](fn)(X))(X + 1), fn(X + 1))


def test_a_function_is_traced_where_another_thread_assigns_data() -> None:
    """Such as one that loads data; and afterwards data is assigned as before."""

    def elsewhere(x: Tensor) -> Tensor:
        worker = threading.Thread(target=lambda: setattr(held, "data", torch.ones(2)))
        worker.start()
        worker.join()
        return x * 2

    held = torch.zeros(2)
    run_traced(CAPTURES["make_fx"](elsewhere)(X))
    assert held.tolist() == [1, 1]
    held.data = torch.zeros(2)
    assert held.tolist() == [0, 0] and "data" not in vars(Tensor)


def turned(x: Tensor) -> Tensor:
    x.t_()
    return x * 1


def resized(x: Tensor) -> Tensor:
    x.resize_(1)
    return x * 1


def moved(x: Tensor) -> Tensor:
    x.set_(x * 2)
    return x * 1


@pytest.mark.parametrize("fn", [turned, resized, moved])
def test_an_argument_that_gets_another_shape_or_memory_in_place_is_refused(fn: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UserError, match="changes the shape, the strides or the memory of x in place"):
        minimal_fx_tracer(fn, donated=["x"])(torch.ones(2, 3))


def test_a_shape_that_is_put_back_is_traced() -> None:
    def twice(x: Tensor) -> Tensor:
        return x.t_().mul_(2).t_() + 1

    given = torch.ones(2, 3)
    result = run_traced(minimal_fx_tracer(twice, donated=["x"])(torch.ones(2, 3)))(given)
    assert given.tolist() == [[2.0] * 3] * 2 and result.tolist() == [[3.0] * 3] * 2


def test_a_tensor_that_takes_gradients_is_given_once() -> None:
    def gradients(x: Tensor, y: Tensor) -> Any:
        return torch.autograd.grad((x * y).sum(), (x, y))

    one, other = X.clone().requires_grad_(), (X + 1).requires_grad_()
    run = run_traced(minimal_fx_tracer(gradients)(one, one))  # the example of both
    assert all(torch.equal(a, b) for a, b in zip(run(one, other), gradients(one, other), strict=True))
    with pytest.raises(UserError, match="x and y are one tensor that takes gradients, which are two inputs of the"):
        run(one, one)
