"""Dimensions that differ from call to call, in every capture: one graph, bit for bit as eager, or one refusal."""

from collections.abc import Callable

import pytest
import torch
from sized import CAPTURES, branching, captured, double, marked, rows
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.decorators import mark_unbacked
from torch.export import Dim

from torchtitan_graph.capture.trace import InParts, capture_step
from torchtitan_graph.capture.traced import run_traced
from torchtitan_graph.errors import UserError


@pytest.mark.parametrize(
    "shapes",
    [
        None,
        {"x": {0: "n"}, "y": {0: 2 * Dim("n")}},
        {"x": {0: Dim("n", min=3, max=9)}, "y": {0: Dim.AUTO}},
        {"x": (Dim.DYNAMIC, None), "y": {0: Dim.DYNAMIC, 1: Dim.STATIC}},
    ],
)
def test_one_graph_serves_several_sizes(shapes: dict | None) -> None:
    first = (rows(6), rows(12)) if shapes else (marked(rows(6)), marked(rows(12)))
    for run in captured(double, *first, shapes=shapes):
        for n in (6, 3, 9):
            assert torch.equal(run(rows(n), rows(2 * n)), double(rows(n), rows(2 * n))), n


def test_a_step_with_gradients_serves_several_lengths() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(16, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True))

    def forward(tokens: Tensor) -> Tensor:
        return net(tokens).square().mean() * tokens.shape[1]

    def step(forward: Callable, tokens: Tensor, num_tokens: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(tokens) / num_tokens, list(net.parameters()))

    def inputs(length: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(16, (2, length), generator=torch.Generator().manual_seed(length))
        return tokens, torch.tensor(2 * length)

    for run in captured(InParts(step, forward), *inputs(6), shapes={"tokens": {1: "length"}}, module=net):
        for length in (6, 4, 11):
            assert all(map(torch.equal, run(*inputs(length)), step(forward, *inputs(length)))), length


def test_a_size_may_be_a_result_and_what_may_be_dynamic_fixed() -> None:
    for run in captured(lambda x: {"sum": x.sum(), "twice": [2 * x.shape[0], "rows"]}, marked(rows(6))):
        assert run(rows(9))["twice"] == [18, "rows"]
    for run in captured(lambda x: x.view(3, 2, 4), marked(rows(6), maybe_mark_dynamic)):
        assert run(rows(6)).shape == (3, 2, 4)
        with pytest.raises(UserError, match=r"x.shape.0. is 8: the trace holds where 4\*x.shape.0. == 24 \(test_"):
            run(rows(8))


# --- what a call has to keep; what Dynamo decided by leaves no operator in the graph ----------------------------------


def multiple_of_3(x: Tensor) -> Tensor:
    torch._check(x.shape[0] % 3 == 0)
    return x.view(-1, 3, 4).sum(0)


@pytest.mark.parametrize(
    ("fn", "first", "then", "message"),
    [
        (
            branching,
            (6,),
            (4,),
            r"x.shape.0. is 4: the trace holds where x.shape.0. > 5 \(sized.py:\d+: ret",
        ),
        (double, (6, 12), (5, 11), r"x.shape.0. is 5, y.shape.0. is 11: the trace holds where 2\*x.shape.0. == y"),
        (multiple_of_3, (6,), (8,), r"x.shape.0. is 8: the trace holds where Mod\(x.shape.0., 3\) == 0 \(test_"),
        (lambda x: x + 1, (6,), (1,), r"x.shape.0. is 1: the trace holds for 2 and more"),
    ],
)
def test_a_call_of_other_sizes_is_refused(fn: Callable, first: tuple, then: tuple, message: str) -> None:
    for run in captured(fn, *(marked(rows(n)) for n in first)):
        with pytest.raises(UserError, match=message):
            run(*map(rows, then))


def looping(x: Tensor) -> Tensor:
    for i in range(x.shape[0]):
        x = x + i
    return x


def with_a_table(x: Tensor) -> Tensor:
    return x + {6: 1.0}[int(x.shape[0])]


@pytest.mark.parametrize(
    ("fn", "first", "shapes", "message"),
    [
        (looping, (6,), {"x": {0: "n"}}, r"x.shape.0. is to be dynamic, but .* takes it for 6 \(test_.*: for i in ra"),
        (with_a_table, (6,), {"x": {0: "n"}}, r"x.shape.0. is to be dynamic, but .* takes it for 6 \(test_.*: return"),
        (
            branching,
            (6,),
            {"x": {0: Dim("n", min=3)}},
            r"x.shape.0. may be 3, as declared, but .* holds only where x.*> 5 \(sized.py:\d+: return x",
        ),
        (
            double,
            (6, 12),
            {"x": {0: "n"}, "y": {0: "m"}},
            r"needs y.shape.0. == 2\*x.shape.0. \(sized.py:.*: give m that name",
        ),
        (double, (6, 12), {"x": {0: "n"}, "y": {0: "n"}}, r"x.shape.0. is 6, but y.shape.0. is 12: both are n"),
    ],
)
def test_what_can_not_be_dynamic_is_refused_by_name(fn: Callable, first: tuple, shapes: dict, message: str) -> None:
    for capture in CAPTURES.values():
        with pytest.raises(UserError, match=message):
            capture(fn, dynamic_shapes=shapes)(*map(rows, first))


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_size_that_only_a_call_knows_is_traced_and_refused_in_a_training_step(capture: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return x + 1

    x = marked(rows(6), mark_unbacked)
    run = run_traced(CAPTURES[capture](fn)(x))
    assert torch.equal(run(rows(3)), fn(rows(3)))
    with pytest.raises(UserError, match=r"x.shape.0. is unbacked: a training step's passes need known sizes"):
        capture_step(CAPTURES[capture], fn, None, device=None)(x)


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_number_that_is_read_is_traced(capture: str) -> None:
    run = run_traced(CAPTURES[capture](lambda x: x * x.sum().item())(rows(6)))
    assert torch.equal(run(rows(6) + 1), (rows(6) + 1) * (rows(6) + 1).sum().item())
