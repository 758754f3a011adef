"""Where a graph is cut that a device records: at what waits for the host, and at what nobody knows."""

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.graph.edit import call
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.runtime.pieces import cut_into_pieces


@torch.library.custom_op("test_pieces::own", mutates_args=())
def own(x: Tensor) -> Tensor:
    return x.clone()


@own.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def counts(x: Tensor) -> Tensor:
    return torch.ops.torchtitan_graph.grouped_sum(x, torch.tensor([2, 4]))


def halves(x: Tensor) -> Tensor:
    first, second = (x + 1).split(2)
    return own(first) + second


def filled(x: Tensor, number: float | Tensor) -> Tensor:
    x[x > 1] = number
    return x


def graph(fn) -> GraphModule:
    return cleanup(minimal_fx_tracer(fn)(torch.ones(4, 3)).gm)


@pytest.mark.parametrize(
    ("fn", "recorded"),
    [
        (lambda x: (x + 1) * 2, [True]),
        (lambda x: own(x + 1) * 2, [True, False, True]),  # a user's operator
        (lambda x: counts(x + 1) * 2, [True, False, True]),  # reads sizes on the host of a CPU
        (lambda x: (x + 1).to("meta") * 2, [True, False, True]),  # to another device
        (halves, [True, False, True]),  # a tuple stays in its piece
        (lambda x: own(x), [False]),
        (lambda x: filled(x + 1, 0.0) * 2, [True]),  # a number is filled in
        (lambda x: filled(x + 1, x[0, 0]) * 2, [True, False, True]),  # the mask is read
    ],
)
def test_a_graph_is_cut_at_what_can_not_be_recorded(fn, recorded: list[bool]) -> None:
    pieces = cut_into_pieces(graph(fn))
    assert [piece.is_recorded for piece in pieces] == recorded
    assert not any(isinstance(node.meta["val"], (tuple, list)) for piece in pieces for node in piece.gives)


@pytest.mark.parametrize(("between", "is_cut"), [(own, True), (torch.neg, False)])
def test_a_collective_under_way_at_a_cut_is_not_recorded(between, is_cut: bool) -> None:
    """A recording must end what it begins: neither start nor wait is in one if a cut lies between them."""
    gm = graph(lambda x: (x + 1) * 2)
    add, mul = (node for node in gm.graph.nodes if node.op == "call_function")
    c10d = torch.ops._c10d_functional
    op = {own: torch.ops.test_pieces.own.default, torch.neg: torch.ops.aten.neg.default}[between]
    with gm.graph.inserting_before(mul):
        start = call(gm.graph, add, c10d.all_reduce.default, add, "sum", "0")
        other = call(gm.graph, add, op, add)
        wait = call(gm.graph, add, c10d.wait_tensor.default, start)
        total = call(gm.graph, add, torch.ops.aten.add.Tensor, wait, other)
    mul.replace_input_with(add, total)
    pieces = cut_into_pieces(gm)
    loose = [node for piece in pieces if not piece.is_recorded for node in piece.gives]
    assert [piece.is_recorded for piece in pieces] == ([True, False, True] if is_cut else [True])
    assert (wait in loose) == is_cut


def test_what_is_under_way_where_another_wait_is_not_recorded_is_not_either() -> None:
    gm = graph(lambda x: (x + 1) * 2)
    add, mul = (node for node in gm.graph.nodes if node.op == "call_function")
    c10d = torch.ops._c10d_functional
    with gm.graph.inserting_before(mul):
        first = call(gm.graph, add, c10d.all_reduce.default, add, "sum", "0")
        other = call(gm.graph, add, torch.ops.test_pieces.own.default, add)
        second = call(gm.graph, add, c10d.all_reduce.default, other, "sum", "0")
        waits = [call(gm.graph, add, c10d.wait_tensor.default, start) for start in (first, second)]
        total = call(gm.graph, add, torch.ops.aten.add.Tensor, *waits)
    mul.replace_input_with(add, total)
    loose = [node for piece in cut_into_pieces(gm) if not piece.is_recorded for node in piece.gives]
    assert set(waits) <= set(loose)


def test_what_gives_as_much_as_the_numbers_say_is_not_recorded() -> None:
    gm = graph(lambda x: (x + 1) * 2)
    add, mul = (node for node in gm.graph.nodes if node.op == "call_function")
    with gm.graph.inserting_before(mul):
        found = gm.graph.call_function(torch.ops.aten.nonzero.default, (add,))
    found.meta["val"] = torch.empty(4, 2, dtype=torch.int64)  # where sizes may be unknown, a trace has it
    assert [piece.is_recorded for piece in cut_into_pieces(gm)] == [True, False, True]
