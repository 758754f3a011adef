"""What a function changes of Python's state while it is traced is refused by name, and put back."""

import collections
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.errors import UserError

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
SEEN: list[Any] = []
NUM_CALLS = 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.n, self.h, self.last_shape = 0, [0], (0, 0)
        self.unset: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Counting(torch.optim.SGD):
    """Counts its steps in Python."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.k, self.param_groups[0]["n"] = 0, 0
        self.count = lambda: None

    def step(self, closure: Any = None) -> None:
        super().step()
        self.count()


class Holder:
    total = 0

    def __init__(self) -> None:
        self.m, self.total_of_mine, self.rng = Net(), 0, np.random.default_rng(0)

    @functools.cached_property
    def scale(self) -> float:
        return 2.0


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


def adding_to_global() -> Any:
    global NUM_CALLS
    NUM_CALLS += 1


def nonlocal_counter() -> Callable:
    n = 0

    def step(x: Tensor) -> Tensor:
        nonlocal n
        n += 1
        return x * 2

    return step


def calling(deed: Callable[..., Any], *held: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that changes a value in its closure."""

    def step(x: Tensor) -> Tensor:
        deed(x, *held)
        return x * 2

    return step


def with_default(x: Tensor, keep: list = []) -> Tensor:  # noqa: B006
    keep.append(1)
    return x * 2


def with_attribute(x: Tensor) -> Tensor:
    with_attribute.n = getattr(with_attribute, "n", 0) + 1  # type: ignore[attr-defined]
    return x * 2


def ema(x: Tensor, S: dict) -> None:
    S["ema"] = S["ema"] * 0.9 + x.detach() * 0.1


def adds(held: Any, name: str) -> None:
    setattr(held, name, getattr(held, name) + 1)


CASES: dict[str, tuple[Callable[[], Callable], str]] = {
    "an attribute of an object": (lambda: calling(lambda x, o: adds(o, "total_of_mine"), Holder()), "total_of_mine"),
    "of a class": (lambda: calling(lambda x, o: adds(Holder, "total"), Holder()), "Holder.total"),
    "a slot": (lambda: calling(lambda x, o: adds(o, "n"), Slotted()), "n, which"),
    "a global": (lambda: calling(lambda x: adding_to_global()), "NUM_CALLS"),
    "a variable around it": (nonlocal_counter, "changes n, which"),
    "a default": (lambda: with_default, r"changes keep\[0\]"),
    "of a function": (lambda: with_attribute, "changes n, which"),
    "a list of a module file": (lambda: calling(lambda x: SEEN.append(x.shape)), r"SEEN\[0\]"),
    "a tensor in a list": (lambda: calling(lambda x, keep: keep.append(x * 2), []), "keeps a tensor in "),
    "a tensor in a dictionary": (lambda: calling(ema, {"ema": torch.zeros(6, 4)}), r"keeps a tensor in .*\['ema'\]"),
    "a tensor in a set": (lambda: calling(lambda x, s: s.add(x), set()), r"changes held\[0\]"),
    "a deque": (lambda: calling(lambda x, d: d.append(1), collections.deque([0])), r"changes held\[0\]\[1\]"),
    "a counter": (lambda: calling(lambda x, c: c.update("ab"), collections.Counter()), r"held\[0\]\['a'\], held"),
    "Python's random numbers": (lambda: lambda x: x * random.random(), "draws random numbers"),
    "NumPy's": (lambda: lambda x: x + torch.from_numpy(np.random.randn(6, 4)).float(), "draws random numbers"),
    "a generator's": (lambda: calling(lambda x, o: o.rng.normal(), Holder()), "draws random numbers .*rng"),
    "an own generator's": (lambda: calling(lambda x, r: r.random(), random.Random(0)), "draws random numbers"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_function_changes_is_refused_by_name(name: str) -> None:
    make, words = CASES[name]
    fn = make()
    drawn = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    for _ in range(2):  # the second finds what the first put back
        with pytest.raises(UserError, match=words):
            minimal_fx_tracer(fn)(X)
    assert not SEEN and not NUM_CALLS and not Holder.total and not hasattr(with_attribute, "n")
    assert drawn == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index,union-attr]


MODULE_CASES: dict[str, tuple[Callable[[Net], Any], str]] = {
    "a counter": (lambda m: adds(m, "n"), r"changes (m\.)?n, which a graph would not do .*: return the new value"),
    "a list": (lambda m: m.h.append(1), r"changes (m\.)?h\[1\]"),
    "a child's attribute": (lambda m: setattr(m.first, "unset", 1), r"changes (m\.)?first.unset"),
    "eval": (lambda m: m.eval(), r"changes (m\.)?training, (m\.)?first.training.*: set it before the trace"),
    "a child's eval": (lambda m: m.norm.eval(), r"changes (m\.)?norm.training, which"),
    "frozen": (
        lambda m: m.last.weight.requires_grad_(False),
        r"requires_grad of last.weight|m.last.weight.requires_grad",
    ),
    "a hook": (lambda m: m.register_forward_hook(lambda *_: None), r"changes (m\.)?_forward_hooks"),
    "another class": (lambda m: setattr(m, "last", nn.Identity()), r"assigns new tensors to last|changes m.last"),
}


@pytest.mark.parametrize("is_passed", [True, False])
@pytest.mark.parametrize("name", MODULE_CASES)
def test_what_a_function_changes_of_a_module_is_refused_by_name(name: str, is_passed: bool) -> None:
    deed, words = MODULE_CASES[name]
    m = Net()
    last = m.last

    def step(x: Tensor) -> Tensor:
        deed(m)
        return m.first(x)

    for _ in range(2):
        with pytest.raises(UserError, match=words):
            minimal_fx_tracer(step, m if is_passed else None)(X)
    assert (m.n, m.h, m.training, m.norm.training, m.last) == (0, [0], True, True, last)
    assert not m._forward_hooks and not hasattr(m.first, "unset") and m.last.weight.requires_grad


def training(m: nn.Module, optimizer: torch.optim.Optimizer, deed: Callable[[], Any]) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = m(x).square().sum()
        loss.backward()
        optimizer.step()
        deed()
        return loss.detach()

    return step


def test_a_schedule_that_steps_inside_is_refused_and_put_back() -> None:
    m = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    training(m, optimizer, lambda: None)(X)
    with pytest.raises(UserError, match=r"changes optimizer.*'lr'\], .*last_epoch.*: step the schedule after the call"):
        minimal_fx_tracer(training(m, optimizer, schedule.step), m, optimizer)(X)
    assert schedule.last_epoch == 0 and optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("where", ["itself", "its group"])
def test_an_optimizer_that_counts_in_python_is_refused_and_put_back(where: str) -> None:
    m = Net()
    optimizer = Counting([*m.first.parameters(), *m.last.parameters()])
    group = optimizer.param_groups[0]
    optimizer.count = (lambda: adds(optimizer, "k")) if where == "itself" else (lambda: group.update(n=group["n"] + 1))
    name = "optimizer.k" if where == "itself" else r"optimizer.param_groups\[0\]\['n'\]"
    with pytest.raises(
        UserError, match=f"changes {name}, which .*: keep a counter as a tensor in the optimizer's state"
    ):
        minimal_fx_tracer(training(m, optimizer, lambda: None), m, optimizer)(X)
    assert optimizer.k == 0 and group["n"] == 0


def test_whatever_ends_a_trace_puts_it_back() -> None:
    m, keep = Net(), [1]

    def step(x: Tensor) -> Tensor:
        m.eval().n += 1
        keep.append(x * random.random())
        raise KeyboardInterrupt

    drawn = random.getstate()
    with pytest.raises(KeyboardInterrupt):
        minimal_fx_tracer(step, m)(X)
    assert m.training and m.n == 0 and keep == [1] and random.getstate() == drawn


# what is sound is not refused


def changed_and_back(m: Net) -> None:
    m.eval()
    m.train()
    m.n += 1
    m.n -= 1
    m.h.append(1)
    m.h.pop()


@pytest.mark.parametrize(
    "deed",
    [
        lambda m: None,
        changed_and_back,
        lambda m: setattr(m, "last_shape", (0, 0)),
        lambda m: HOLDER.scale,
        lambda m: m.register_forward_hook(lambda *_: None).remove(),
        lambda m: m.first.register_full_backward_hook(lambda *_: None).remove(),
        lambda m: [1].append(2),
    ],
)
def test_what_is_as_it_was_is_not_refused(deed: Callable[[Net], Any]) -> None:
    m = Net()

    def step(x: Tensor) -> Tensor:
        deed(m)
        return m(x)

    for module in (m, None):
        assert torch.equal(run_traced(minimal_fx_tracer(step, module)(X), module)(X), m(X))


HOLDER = Holder()


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, Counting])
def test_what_torch_notes_in_an_optimizer_is_not_refused(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    m = nn.Linear(4, 4)
    optimizer = make(m.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # tells the optimizer that it steps
    step = training(m, optimizer, lambda: None)
    step(X)
    minimal_fx_tracer(step, m, optimizer)(X)


def test_a_fused_step_may_be_told_to_be_none() -> None:
    m = nn.Linear(4, 4)
    optimizer: Any = torch.optim.AdamW(m.parameters(), fused=True)
    training(m, optimizer, lambda: None)(X)

    def step(x: Tensor) -> None:
        optimizer.found_inf = 1.0 - x.isfinite().all().float()
        training(m, optimizer, lambda: None)(x)

    minimal_fx_tracer(step, m, optimizer)(X)
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("make", [pytest.param(nn.GRU, marks=pytest.mark.slow), nn.RNN])
def test_a_recurrent_layer_that_reads_its_weights_again_is_that_of_eager(make: Callable[..., nn.RNNBase]) -> None:
    m = make(4, 8, 2, batch_first=True, bidirectional=True)

    def step(x: Tensor) -> Any:
        loss = m(x)[0].square().sum()
        return loss, torch.autograd.grad(loss, list(m.parameters()))

    run = run_traced(minimal_fx_tracer(step, m)(X[None]), m)
    assert all(x is p for x, p in zip(m._flat_weights, m.parameters(), strict=True))
    torch.testing.assert_close(run(X[None]), step(X[None]), rtol=0, atol=0)
