"""The example of an operator of one's own: its numbers, and what its declaration makes of it in a graph."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchtitan_graph.analysis import keeping
from torchtitan_graph.analysis.cost import OTHER, works_of
from torchtitan_graph.analysis.flops import matmul_flops
from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.graph import meta
from torchtitan_graph.ops import operator
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.compile_regions import WHOLE, tag_regions
from torchtitan_graph.passes.tag_elementwise import tag_elementwise
from torchtitan_graph.runtime.pieces import cut_into_pieces

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def own() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        from own_operator import squared_relu

        yield squared_relu


def graph(own: Any) -> GraphModule:
    model = nn.ModuleDict({"layers": nn.ModuleList(own.FeedForward(4, 8) for _ in range(2))})

    def step(x: Tensor) -> list[Tensor]:
        for layer in model["layers"]:
            x = layer(x)
        return list(torch.autograd.grad(x.sum(), list(model.parameters())))

    return cleanup(minimal_fx_tracer(step, model)(torch.ones(2, 4)).gm)


def nodes_of(gm: GraphModule, op: Any) -> list[Node]:
    return list(gm.graph.find_nodes(op="call_function", target=op))


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 0), (torch.float32, 0), (torch.bfloat16, 4e-3)], ids=str)
def test_its_numbers(own: Any, dtype: torch.dtype, close: float) -> None:
    x = torch.linspace(-3, 4, 30, dtype=torch.float64).view(5, 6).t().to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    weights = torch.linspace(-1, 2, 30, dtype=torch.float64).view(6, 5).to(dtype)
    result, expected = own.squared_relu(x), F.relu(exact.to(x.dtype if not close else exact.dtype)).square()
    assert result.dtype == dtype and result.is_contiguous()
    torch.testing.assert_close(result, expected.to(dtype), rtol=close, atol=0)
    (found,) = torch.autograd.grad(result, x, weights)
    torch.testing.assert_close(found, (2 * exact.detach().relu() * weights).to(dtype), rtol=max(close, 1e-6), atol=0)


def test_torch_can_trace_and_differentiate_it(own: Any) -> None:
    x = torch.linspace(-3, 4, 30, dtype=torch.float64).view(5, 6).t()
    torch.library.opcheck(own.squared_relu, (x.clone().requires_grad_(),))
    torch.library.opcheck(own.squared_relu_backward, (x, x))
    torch.autograd.gradcheck(own.squared_relu, x.clone().requires_grad_())


def test_what_is_declared_is_what_is_read_of_it(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "START", 0)
    gm = tag_elementwise(graph(own), ("layers.0", "layers.1"))
    tag_regions(gm, [WHOLE])
    forward, backward = nodes_of(gm, own.squared_relu), nodes_of(gm, own.squared_relu_backward)
    assert len(forward) == len(backward) == 2
    for node, num_tensors in (*((x, 2) for x in forward), *((x, 3) for x in backward)):
        (work,) = works_of(node)
        assert (work.kind, work.operations, work.num_bytes) == (OTHER, 0, num_tensors * 2 * 8 * 4)
        assert matmul_flops(node) == 0
        assert meta.region(node) == WHOLE
    assert {meta.tag(node) for node in forward} == {meta.RECOMPUTE}
    assert all(piece.is_recorded for piece in cut_into_pieces(graph(own)))


def test_without_its_declaration_it_is_saved_and_not_recorded(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(keeping, "START", 0)
    monkeypatch.delitem(operator._DECLARED, id(own.squared_relu))
    gm = tag_elementwise(graph(own), ("layers.0", "layers.1"))
    assert {meta.tag(node) for node in nodes_of(gm, own.squared_relu)} == {None}
    assert not all(piece.is_recorded for piece in cut_into_pieces(graph(own)))
