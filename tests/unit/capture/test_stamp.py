"""Blocks that are alike are traced once, and the graph is the one that tracing every block gives."""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchtitan_graph.capture import stamp
from torchtitan_graph.capture.alike import description
from torchtitan_graph.capture.stamp import described
from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.errors import UserError
from torchtitan_graph.passes.cleanup import cleanup

IN_FULL = "every block is traced, not every kind: "


class Block(nn.Module):
    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.scale = scale
        self.inner = nn.Linear(4, 4)
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        return x + self.scale * self.inner(x).sin() + self.bias  # type: ignore[operator]


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.layers:
            x = block(x)
        return x


def traced(model: nn.Module, stamps: bool = True) -> list[tuple]:
    def step(x: Tensor) -> Any:
        loss = model(x).square().sum()
        return loss, torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)

    blocks = {f"layers.{i}": block for i, block in enumerate(model.layers)}  # type: ignore[arg-type]
    return described(cleanup(minimal_fx_tracer(step, model, blocks=blocks if stamps else {})(torch.ones(2, 4)).gm))


def check(model: nn.Module, log: pytest.LogCaptureFixture, says: str) -> None:
    with log.at_level(logging.INFO, logger="torchtitan_graph"):
        assert traced(model) == traced(model, stamps=False)
    assert [message for message in log.messages if "block" in message] == [says]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("torchtitan_graph"), "propagate", True)
    return caplog


def test_the_graph_is_that_of_every_block(log: pytest.LogCaptureFixture) -> None:
    check(Model(*(Block() for _ in range(4))), log, "traced 1 kind of block for 4 blocks")


def test_a_block_that_differs_in_a_constant_is_its_own_kind(log: pytest.LogCaptureFixture) -> None:
    scales = (2.0, 2.0, 3.0, 2.0)
    check(Model(*map(Block, scales)), log, "traced 2 kinds of block for 4 blocks")
    assert traced(Model(*map(Block, scales))) != traced(Model(*map(Block, sorted(scales))))


def test_a_frozen_parameter_and_another_dtype_make_kinds(log: pytest.LogCaptureFixture) -> None:
    model = Model(*(Block() for _ in range(6)))
    model.layers[1].inner.requires_grad_(False)
    model.layers[4].bias = model.layers[4].bias.double()
    model.layers[5] = nn.Sequential(nn.Linear(4, 4).double())
    check(model, log, "traced 4 kinds of block for 6 blocks")


class Constant(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)[:, torch.tensor([3, 2, 1, 0])]


def test_blocks_may_hold_a_constant_tensor(log: pytest.LogCaptureFixture) -> None:
    check(Model(*(Constant() for _ in range(3))), log, "traced 1 kind of block for 3 blocks")


class Ignored(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.cos()


class Pairs(Model):
    def forward(self, x: Tensor) -> Tensor:
        x, others = self.first(x), []
        for block in self.layers:
            x, other = block(x)
            others.append(other)
        return x + others[0] * others[1]


def test_a_result_without_a_gradient_has_no_backward(log: pytest.LogCaptureFixture) -> None:
    check(Pairs(*(Ignored() for _ in range(4))), log, "traced 1 kind of block for 4 blocks")


# --- what does not fit is traced in full ------------------------------------------------------------------------------


class Remembering(Block):
    """Reads what the block before it left."""

    def __init__(self, memory: dict[str, Tensor]) -> None:
        super().__init__()
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        before, self.memory["x"] = self.memory.get("x"), x.detach()
        return super().forward(x if before is None else x + before)


REMEMBERED: dict[str, Tensor] = {}


class RememberingElsewhere(Block):
    def forward(self, x: Tensor) -> Tensor:
        before, REMEMBERED["x"] = REMEMBERED.get("x"), x.detach()
        return super().forward(x if before is None else x + before)


class Twice(Model):
    """Reads what its first block takes again: autograd adds three gradients one by one."""

    def forward(self, x: Tensor) -> Tensor:
        taken = self.first(x)
        x = taken
        for block in self.layers:
            x = block(x)
        return x * taken


class Passing(Model):
    """Hands a dictionary from block to block, or lets them share one."""

    def forward(self, x: Tensor) -> Tensor:
        memory: dict[str, Tensor] = getattr(self.layers[0], "memory", {})
        x = self.first(x)
        for block in self.layers:
            x = block(x) if hasattr(block, "memory") else block(x, memory)
        memory.clear()
        return x


class Adding(Block):
    def forward(self, x: Tensor, memory: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        before, memory["x"] = memory.get("x", x), x
        return super().forward(x + before)


def passing() -> nn.Module:
    memory: dict[str, Tensor] = {}
    return Passing(*(Remembering(memory) for _ in range(3)))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (passing, "layers.0 changes what it holds"),
        (lambda: Passing(*(Adding() for _ in range(3))), "layers.0 changes its arguments"),
        (lambda: Twice(*(Block() for _ in range(3))), "layers.0 reads a tensor more than once that others read too"),
    ],
)
def test_blocks_that_do_not_stand_alone_are_all_traced(
    make: Callable[[], nn.Module], why: str, log: pytest.LogCaptureFixture
) -> None:
    check(make(), log, IN_FULL + why)


def test_blocks_that_look_alike_and_are_not_are_all_traced(log: pytest.LogCaptureFixture) -> None:
    """What one left for the next outside the model is taken back, and refused."""
    refused = pytest.raises(UserError, match=r"keeps a tensor in REMEMBERED\['x'\]")
    with log.at_level(logging.INFO, logger="torchtitan_graph"), refused:
        traced(Model(*(RememberingElsewhere() for _ in range(3))))
    assert f"{IN_FULL}layers.1 takes a tensor that is neither its own nor an argument" in log.messages
    assert not REMEMBERED


class Drawing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x))


class Rebinding(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.bias = self.bias + 1
        return super().forward(x)


class Reading(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


class Writing(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.bias.add_(1)
        return super().forward(x)


@pytest.mark.parametrize("kind", [Drawing, Rebinding, Reading, Writing])
def test_an_error_inside_a_block_is_told_as_ever(kind: type[Block]) -> None:
    words = []
    for stamps in (True, False):
        with pytest.raises(UserError) as error:
            traced(Model(*(kind() for _ in range(3))), stamps)
        assert not stamp._calls  # nothing of the model is held
        words.append(str(error.value))
    assert words[0] == words[1]


# --- descriptions -----------------------------------------------------------------------------------------------------


class Config:
    def __init__(self, width: object) -> None:
        self.width = width


class Table(dict):
    """A dictionary with an attribute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width


def carrying(width: int) -> Callable[[], int]:
    def function() -> int:
        return function.width  # type: ignore[attr-defined]

    function.width = width  # type: ignore[attr-defined]
    return function


def deep() -> list:
    return functools.reduce(lambda inner, _: [inner], range(5000), [])


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (deep(), deep(), False),
        ([1, {"a": 2.0}], [1, {"a": 2.0}], True),
        (1, 1.0, False),
        (0.0, -0.0, False),
        ((1, 2), [1, 2], False),
        (Config([3]), Config([3]), True),
        (Config([3]), Config([4]), False),
        (Table(3), Table(3), True),
        (Table(3), Table(4), False),
        (carrying(3), carrying(3), True),
        (carrying(3), carrying(4), False),
        (collections.defaultdict(int), collections.defaultdict(float), False),
        (torch.ones(1), torch.ones(1), False),
        (torch.Generator(), torch.Generator(), False),
    ],
)
def test_attributes_count(one: object, other: object, alike: bool) -> None:
    blocks = [Block(), Block()]
    blocks[0].extra, blocks[1].extra = one, other  # type: ignore[assignment]
    first, second = (description(block, block.forward, ()) for block in blocks)
    assert (first == second) is alike
    if alike:
        assert hash(first) == hash(second)


def test_hooks_and_what_wraps_forward_count() -> None:
    plain, hooked, wrapped = Block(), Block(), Block()
    hooked.inner.register_forward_hook(lambda module, args, result: result * 2)
    inner = wrapped.forward
    wrapped.forward = lambda x: inner(x) * 2  # type: ignore[method-assign]
    assert len({description(block, block.forward, ()) for block in (plain, Block(), hooked, wrapped)}) == 3


class Checkpointed(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.layers:
            x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
        return x


def test_blocks_that_are_computed_again_in_backward_are_traced_in_full(log: pytest.LogCaptureFixture) -> None:
    check(Checkpointed(Block(), Block()), log, IN_FULL + "layers.0 is called in a checkpointed region")
