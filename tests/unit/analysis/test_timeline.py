"""Timeline: what starts early is held from there on, and no peak rises."""

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from torchtitan_graph.analysis.liveness import peak_memory, size_of
from torchtitan_graph.analysis.timeline import Timeline
from torchtitan_graph.torch_private.fake import FakeTensorMode

aten = torch.ops.aten


def started_early(num_bytes: int | None = None, partway: bool = True) -> tuple[list[str], int]:
    """Start two late vectors early; return the names of the nodes, in order, and the change of the peak."""

    def step(x):
        product = ((x + 1) * 2) * (x + 1).neg()  # the peak, three vectors
        return product.sum().exp(), x.cos(), x.sin()

    with FakeTensorMode():
        gm: GraphModule = make_fx(step)(torch.empty(256))
    peak, timeline = peak_memory(gm).num_bytes, Timeline(gm)
    for target in (aten.cos.default, aten.sin.default):
        (node,) = gm.graph.find_nodes(op="call_function", target=target)
        size = size_of(node) if num_bytes is None else num_bytes
        timeline.start_earlier([node], timeline.place[node], timeline.first, size, partway=partway)
    gm.graph.lint()
    return [node.name for node in gm.graph.nodes], peak_memory(gm).num_bytes - peak


def test_each_starts_as_early_as_those_before_it_leave_room() -> None:
    names, more = started_early()
    assert more == 0 and names.index("mul_1") < names.index("cos") < names.index("sum_1") < names.index("sin")


def test_a_start_whose_memory_is_not_counted_raises_the_peak() -> None:
    assert started_early(num_bytes=0)[1] > 0


def test_all_the_way_or_not_at_all() -> None:
    names, _ = started_early(partway=False)
    assert names.index("exp") < names.index("cos") < names.index("sin")
