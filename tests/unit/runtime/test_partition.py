"""The parts that a stage's graph is cut into: together they are the graph, and none keeps what it could make again."""

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import is_view
from torchtitan_graph.graph.signature import Signature, Slot, layout_of
from torchtitan_graph.runtime.partition import NONE, Once, Parts, partition
from torchtitan_graph.torch_private.fake import FakeTensorMode

INPUTS = {"shard": "param", "x": "input", "dy": "input"}
OUTPUTS = {"y": "output", "dx": "output", "shard": "grad", "amax": "state"}


def stage(shard: Tensor, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """Gather a weight, multiply by a view of it, and go back through operators that no autograd marked; one of them
    gives a tuple, of which the gradient of the input needs the first half alone. The state is the largest magnitude
    of the incoming gradient, as a layer with delayed scaling returns it."""
    weight = shard * 2
    turned = weight.t()
    y = (x @ turned).relu()
    low, high = dy.aminmax(dim=0, keepdim=True)
    dx = (dy - low) @ turned.t()
    gradient = (dy + high).t() @ (x + 1) * 3
    return y, dx, gradient * 4, dy.abs().amax()


def traced() -> GraphModule:
    with FakeTensorMode():
        gm = make_fx(stage)(torch.empty(5, 3), torch.empty(4, 3), torch.empty(4, 5))
    nodes = {node.name: node for node in gm.graph.nodes}
    meta.write(nodes["mul"], role=meta.GATHER, param="shard")
    meta.write(nodes["mul_2"], role=meta.REDUCE, param="shard")
    inputs, (outputs,) = gm.graph.find_nodes(op="placeholder"), gm.graph.output_node().args
    named = [
        tuple(Slot(name, kind, layout_of(node.meta["val"])) for (name, kind), node in zip(kinds, found, strict=True))
        for kinds, found in ((INPUTS.items(), inputs), (OUTPUTS.items(), outputs))
    ]
    gm.meta["signature"] = Signature(*named)
    return gm


def run(parts: Parts, given: list[Tensor]) -> dict[str, Tensor]:
    """Run the parts one after the other, on nothing but the inputs and what the earlier ones gave."""
    values = dict(zip(("shard_1", "x_1", "dy_1"), given, strict=True))
    for part in parts.by_name.values():
        values |= zip(part.gives, part.gm(*(values[name] for name in part.reads)), strict=True)
    return values


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("gather_once", [False, True])
def test_parts_are_the_graph(gather_once: bool, split_backward: bool) -> None:
    gm, given = traced(), [torch.randn(5, 3), torch.randn(4, 3), torch.randn(4, 5)]
    once = Once() if gather_once else Once(gather=NONE)
    parts = partition(gm, once=once, split_backward=split_backward)
    values = run(parts, given)
    names = [parts.outputs[kind][name] for name, kind in OUTPUTS.items()]
    assert all(torch.equal(values[name], x) for name, x in zip(names, gm(*given), strict=True))
    assert parts.sums == ("mul_1",)
    assert bool(parts.by_name["gather"].gives) == gather_once
    backward = {"input", "weight"} if split_backward else {"backward"}
    assert parts.by_name.keys() == {"gather", "forward", "reduce"} | backward


def test_forward_knows_nothing_of_the_gradient_that_comes_later_and_the_input_s_nothing_of_the_weights() -> None:
    parts = partition(traced(), once=Once(), split_backward=True).by_name
    assert "dy_1" not in parts["forward"].reads
    products = {name: len(part.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default))
                for name, part in parts.items()}  # fmt: skip
    assert products == {"gather": 0, "forward": 1, "input": 1, "weight": 1, "reduce": 0}


def test_a_view_of_a_weight_is_made_again_where_it_is_read() -> None:
    """Kept from forward to backward it would hold the whole weight."""
    gm = traced()
    views = {node.name for node in gm.graph.nodes if is_view(node)}
    parts = partition(gm, once=Once(), split_backward=False).by_name
    assert views and all(views.isdisjoint((*part.reads, *part.gives)) for part in parts.values())


def test_what_is_written_on_a_part_is_on_it_alone() -> None:
    gm = traced()
    parts = partition(gm, once=Once(), split_backward=True).by_name
    for part in parts.values():
        for node in part.gm.graph.nodes:
            node.meta.setdefault("custom", {})["mine"] = 1
    assert not any("mine" in node.meta.get("custom", {}) for node in gm.graph.nodes)


def test_what_is_not_done_once_is_in_forward_and_backward_and_then_summed() -> None:
    gm, given = traced(), [torch.randn(5, 3), torch.randn(4, 3), torch.randn(4, 5)]
    parts = partition(gm, once=Once(NONE, NONE), split_backward=False)
    for name in ("gather", "reduce"):
        assert {node.op for node in parts.by_name[name].gm.graph.nodes} <= {"placeholder", "output"}, "nothing"
    assert parts.sums == ("mul_2",) and parts.reduced == {"mul_2"}, "each microbatch's, reduced"
    assert torch.equal(run(parts, given)["mul_2"], gm(*given)[2])
