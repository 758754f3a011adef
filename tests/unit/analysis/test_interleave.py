"""Streams of nodes side by side: one computes while the other communicates, and nothing runs before what it reads."""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from torchtitan_graph.analysis.cost import Costs, Link
from torchtitan_graph.analysis.interleave import Room, Stream, interleaved, seconds_of, stream_of
from torchtitan_graph.graph import meta
from torchtitan_graph.rates import RATES
from torchtitan_graph.torch_private.fake import FakeTensorMode

c10d = torch.ops._c10d_functional
# A product takes about as long as a message.
COSTS = Costs(RATES["CPU"]._replace(full=1e9, near=3e7), {"g": Link("ep", 2, 2)})
N = 64


def chain(x: Tensor) -> Tensor:
    """Send a value, wait, multiply: three times, each on what came before."""
    for _ in range(3):
        x = c10d.wait_tensor(c10d.all_to_all_single(x, [N // 2] * 2, [N // 2] * 2, "g"))
        x = (x @ x).sin()
    return x


def graph(function, *tensors: Tensor) -> GraphModule:
    with FakeTensorMode():
        return make_fx(function)(*(torch.empty(N, N) for _ in tensors))


def test_one_multiplies_while_the_other_waits() -> None:
    gm = graph(lambda a, b: (chain(a), chain(b)), *torch.empty(2))
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    streams = nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :]
    order = interleaved([Stream(each) for each in streams], COSTS)
    assert sorted(order, key=nodes.index) == nodes
    for stream in streams:
        assert [node for node in order if node in stream] == list(stream), "each in its own order"
    assert seconds_of(gm, order, COSTS) < 0.9 * seconds_of(gm, nodes, COSTS)


def backward(x: Tensor, dy: Tensor) -> Tensor:
    """Compute a layer again, go back through it with a message, and so for the layer below."""
    again = (x @ x).sin()
    dy = c10d.wait_tensor(c10d.all_to_all_single(dy @ again, [N // 2] * 2, [N // 2] * 2, "g"))
    again = (x @ x.t()).cos()
    return c10d.wait_tensor(c10d.all_to_all_single(dy @ again, [N // 2] * 2, [N // 2] * 2, "g"))


def marked() -> tuple[GraphModule, list[Node], Stream]:
    """Return that graph, its nodes, and them as a stream; `again` are the nodes that don't depend on dy."""
    gm = graph(backward, *torch.empty(2))
    nodes, layer = [node for node in gm.graph.nodes if node.op == "call_function"], 1
    after_dy = {gm.graph.find_nodes(op="placeholder")[1]}
    for node in nodes:
        meta.write(node, phase="backward", module=f"layers.{layer}")
        if not after_dy.isdisjoint(node.all_input_nodes):
            after_dy.add(node)
        else:
            node.meta["origin"] = meta.RECOMPUTED
        layer -= node.target is c10d.wait_tensor.default
    return gm, nodes, stream_of(nodes)


def test_what_is_computed_again_runs_while_backward_waits() -> None:
    gm, nodes, stream = marked()
    assert len(stream.early) >= 4 and stream.due[-1] > 0
    order = interleaved([stream], COSTS)
    assert [node for node in order if node in stream.nodes] == list(stream.nodes)
    wait = next(node for node in nodes if node.target is c10d.wait_tensor.default)
    product = [node for node in stream.early if node.target is torch.ops.aten.mm.default][-1]  # of the layer below
    assert nodes.index(wait) < nodes.index(product) and order.index(product) < order.index(wait)
    assert seconds_of(gm, order, COSTS) < seconds_of(gm, nodes, COSTS)


def test_what_does_not_fit_is_not_early() -> None:
    _, nodes, stream = marked()
    size = 4 * N * N
    for spare, is_early in ((4 * size, True), (size // 2, False)):
        room = Room(stream, dict.fromkeys(nodes, 0), dict.fromkeys(nodes, spare), dict.fromkeys(nodes, size))
        order = interleaved([stream], COSTS, room=room)
        assert (order != nodes) == is_early
