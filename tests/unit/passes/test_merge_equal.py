"""merge_equal: what a graph computes twice it computes once, where that holds nothing longer; bitwise."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from toy import aten, bitwise, calls, run_toy, text, toy, trace_toy

from torchtitan_graph.analysis.liveness import peak_memory
from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.merge_equal import merge_equal


def merged(fn: Callable, *inputs: Tensor) -> tuple[GraphModule, list[Tensor], list[Tensor]]:
    """Give the graph after the pass, and what it gives before and after."""
    gm = cleanup(minimal_fx_tracer(fn)(*inputs).gm)
    expected, peak = gm(*inputs), peak_memory(gm).num_bytes
    gm = merge_equal(gm)
    gm.graph.lint()
    assert peak_memory(gm).num_bytes <= peak
    return gm, gm(*inputs), expected


X = torch.arange(6.0)


def twice_at_once(x: Tensor) -> Tensor:
    mask, other = (torch.zeros(6).masked_fill(x > 3, -1.0) for _ in range(2))  # their zeros die at once
    return (x + mask) * (x - other) * mask


@pytest.mark.parametrize(
    ("fn", "op", "before", "after"),
    [
        (twice_at_once, aten.masked_fill.Scalar, 2, 1),
        (lambda x: x.exp() * x.exp().neg(), aten.exp.default, 2, 1),
        (lambda x: x.view(2, 3).t() @ x.view(2, 3), aten.view.default, 2, 1),  # of an input, which stays
        (lambda x: x.exp() * (x * 2).exp(), aten.exp.default, 2, 2),  # another argument
        (lambda x: x.sum(0, keepdim=True) * x.sum(0), aten.sum.dim_IntList, 2, 2),  # another option
        (lambda x: x.add(1) * x.add(1.0), aten.add.Tensor, 2, 2),  # an int is another constant
        (lambda x: ((x.exp() * 2).sum() * x).exp().sum() * x.exp(), aten.exp.default, 3, 3),  # would be held
        (lambda x: (x.exp(), x.exp()), aten.exp.default, 2, 2),  # both are given, and may be written to
    ],
)
def test_small_graphs(fn: Callable, op: torch._ops.OpOverload, before: int, after: int) -> None:
    assert len(calls(cleanup(minimal_fx_tracer(fn)(X).gm), op)) == before
    gm, found, expected = merged(fn, X)
    assert len(calls(gm, op)) == after
    assert bitwise(found, expected)


def test_a_step_keeps_its_numbers() -> None:
    gm = cleanup(trace_toy(toy()))
    expected = run_toy(gm)
    gm = merge_equal(gm)
    assert bitwise(run_toy(gm), expected)
    once = text(gm)
    assert text(merge_equal(gm)) == once


def test_random_numbers_are_drawn_twice() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    draws = [graph.call_function(aten.rand_like.default, (x,)) for _ in range(2)]
    graph.output([graph.call_function(aten.add.Tensor, tuple(draws))])
    assert len(calls(merge_equal(GraphModule({}, graph)), aten.rand_like.default)) == 2
