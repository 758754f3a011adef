"""What a comparison of both captures says of functions in which they differ, and of one in which they don't."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from torchtitan_graph.capture.trace import make_fx_capture
from torchtitan_graph.check.captures import compare_captures, differing
from torchtitan_graph.passes.cleanup import cleanup

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo captures steps from torch 2.13 on")
X = torch.arange(6.0).view(2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.doubles, self.calls, self.limit = False, 0, 3

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def plain(model: Net, x: Tensor) -> Tensor:
    return model(x).sum()


def flagged(model: Net, x: Tensor) -> Tensor:
    return 2 * plain(model, x) if model.doubles else plain(model, x)


def counted(model: Net, x: Tensor) -> Tensor:
    model.calls += 1
    y = plain(model, x)
    model.calls -= 1  # else neither takes it
    return y


def branching(model: Net, x: Tensor) -> Tensor:
    return plain(model, x) if model.limit > 2 else plain(model, 2 * x)


def compiled_otherwise(model: Net, x: Tensor) -> Tensor:
    """Do another thing where Dynamo reads than where the tracer runs."""
    y = model(x)
    if torch.compiler.is_dynamo_compiling():
        return (y.clone() * 3).sin().sum()
    return (y * 2).cos().sum()


@pytest.mark.parametrize(
    ("fn", "is_same", "words"),
    [
        (plain, True, r"^the same, \d+ nodes \(make_fx [\d.]+ s, dynamo [\d.]+ s\)$"),
        (
            flagged,
            True,
            r"1 values of Python .* checked by dynamo's alone\n"
            r"model.doubles == False \(.*model.doubles .*test_captures_compared.py:\d+ in flagged\)$",
        ),
        (branching, True, r"\nmodel.limit == 3 \(.*model.limit > 2.*test_captures_compared.py:\d+ in branching\)$"),
        (
            counted,
            False,
            r"^dynamo does not take it: .* changes model.calls \(test_captures_compared.py:\d+ in counted\)",
        ),
        (
            compiled_otherwise,
            False,
            r"(?s)^they differ in 3 places .*extra copy\n +make_fx  nothing\n +dynamo   clone = "
            r".*other constant\n +make_fx  .*\(tanh, 2\).*\n +dynamo   .*\(clone, 3\).* at capture/test_captures_"
            r".*other operator\n +make_fx  cos.*\n +dynamo   sin",
        ),
    ],
)
def test_what_it_says(fn: Callable[[Net, Tensor], Any], is_same: bool, words: str) -> None:

    model = Net()
    found = compare_captures(lambda x: fn(model, x), model)(X)
    said = "\n".join([*found.lines(), *found.values])
    assert found.is_same == is_same
    assert re.search(words, said), said


def graph_of(fn: Callable[[Tensor], Tensor], x: Tensor = X) -> GraphModule:
    return cleanup(make_fx_capture(fn)(x).gm)


ONE, TWO = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 4.0])


def double(x: Tensor) -> Tensor:
    return x + x


def both(fn: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def made(x: Tensor) -> Tensor:
        a, b = x.sin(), x.cos()
        return fn(a, b)

    return made


@pytest.mark.parametrize(
    ("ours", "theirs", "kind"),
    [
        (lambda: graph_of(both(lambda a, b: a - b)), lambda: graph_of(both(lambda a, b: b - a)), "other arguments"),
        (
            lambda: graph_of(lambda x: x + 1),
            lambda: graph_of(lambda x: x + 1, X.double()),
            "other shape, dtype or strides",
        ),
        (lambda: graph_of(lambda x: x + ONE), lambda: graph_of(lambda x: x + TWO), "other constant"),
    ],
    ids=["arguments", "dtype", "constant"],
)
def test_nodes_that_are_alike_but_for_one_thing_differ(
    ours: Callable[[], GraphModule], theirs: Callable[[], GraphModule], kind: str
) -> None:
    assert {each.kind for each in differing(ours(), theirs())} == {kind}
    assert list(differing(ours(), ours())) == []
