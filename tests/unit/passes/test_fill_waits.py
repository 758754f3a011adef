"""fill_waits: weights' gradients and shared experts are made while activations travel; only the order changes."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from toy import WAIT, aten, c10d, calls, place, text

from torchtitan_graph.analysis.cost import Costs, Link, estimate
from torchtitan_graph.analysis.liveness import held_memory, in_one_part, peak_memory, peaks, size_of
from torchtitan_graph.check.matrix import BF16, FP32
from torchtitan_graph.device import Target
from torchtitan_graph.graph import meta
from torchtitan_graph.models import deepseek_v3, llama3, llama4
from torchtitan_graph.models.spec import tiny_config
from torchtitan_graph.parallel.layout import Layout
from torchtitan_graph.parallel.storage import Precision
from torchtitan_graph.passes.fill_waits import fill_waits
from torchtitan_graph.rates import RATES
from torchtitan_graph.runtime.partition import Once, part_of
from torchtitan_graph.steps import Assembly, StepOptions, build_graphs
from torchtitan_graph.torch_private.fake import FakeTensorMode

EXCHANGE = torch.ops.torchtitan_graph.exchange.default
SUM = c10d.reduce_scatter_tensor.default


def graph_on(
    layout: Layout,
    family: ModuleType,
    flavor: str,
    disabled: tuple[str, ...] = (),
    precision: Precision = FP32,
) -> GraphModule:
    with torch.device("meta"):
        model = family.Model(tiny_config(family.FLAVORS[flavor]))
    rates = RATES["CPU"]._replace(near=1e8)  # slow enough for products, not only for what is as short as a launch
    target = Target(torch.device("cpu"), rates, is_gpu=False)
    options = StepOptions(target, rows=(1, 16), disabled=disabled, precision=precision)
    return build_graphs(Assembly(model, family, layout, options)).train.gm


def beside(gm: GraphModule, phase: str, start: object) -> list[list[Node]]:
    """Give what stands between each start of a kind, for activations, and its wait."""
    order, nodes = place(gm), list(gm.graph.nodes)
    chosen = [n for n in calls(gm, WAIT) if n.args[0].target is start and meta.role(n) is None]  # type: ignore[union-attr]
    return [nodes[order[n.args[0]] : order[n]] for n in chosen if meta.phase(n) == phase]  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize("dp_shard", [1, 2])
def test_under_tensor_parallelism_weights_gradients_are_made_while_activations_are_summed(
    layout_of: Callable, dp_shard: int
) -> None:
    """In bf16: a weight's gradient that no shards are packed for is cast right after it is made."""
    layout = layout_of(dp_shard=dp_shard, tp=2)
    before, after = (graph_on(layout, llama3, "debugmodel", disabled, BF16) for disabled in (("fill_waits",), ()))
    sums = [nodes for nodes in beside(after, "backward", SUM) if meta.module(nodes[0]).startswith("layers.")]
    assert len(sums) == 6, "of three blocks, after attention and after the feed-forward"
    for nodes in sums:
        assert any(n.target is aten.mm.default for n in nodes)
    called = [[(n.target, str(n.meta.get("val"))) for n in gm.graph.nodes] for gm in (before, after)]
    assert Counter(called[0]) == Counter(called[1]) and called[0] != called[1], "the same in another order"
    assert peak_memory(after).num_bytes == peak_memory(before).num_bytes
    costs = Costs(RATES["CPU"], layout.links(8))
    assert estimate(after, costs).exposed["tp"] < estimate(before, costs).exposed["tp"]


@pytest.mark.parametrize("family", [pytest.param(deepseek_v3, marks=pytest.mark.slow), llama4])
def test_rows_travel_to_experts_and_back_beside_shared_ones(layout_of: Callable, family: ModuleType) -> None:
    """Forward: to experts beside as much of the shared ones as it takes; backward: gradients come beside these."""
    gm = graph_on(layout_of(dp_shard=4, ep=2), family, "debugmodel")
    forward, backward = (beside(gm, phase, EXCHANGE) for phase in ("forward", "backward"))
    assert len(forward) == len(backward) > 0
    counts = beside(gm, "forward", c10d.all_to_all_single.default)  # how many rows; they leave right after
    for number, rows in zip(counts, forward[::3], strict=True):
        assert any("shared_experts" in meta.module(n) and n.target is aten.mm.default for n in number + rows)
    for coming in backward[::3]:
        assert any("shared_experts" in meta.module(n) and n.target is aten.mm.default for n in coming)


@pytest.mark.slow
def test_nothing_sent_nothing_changed(layout_of: Callable) -> None:
    layout = layout_of(dp_shard=2)
    without, found = (text(graph_on(layout, llama3, "debugmodel", disabled)) for disabled in (("fill_waits",), ()))
    assert found == without


# --- a block's backward by hand: the gradient of a weight, one that is sent, and something beside it -----------------

N = 64


@pytest.mark.parametrize(
    ("width", "early", "part_of", "is_put_off"),
    [
        (N, 5, in_one_part, True),
        (N, 4, in_one_part, False),
        (8 * N, 5, in_one_part, False),
        (N, 5, partial(part_of, once=Once()), False),
    ],
    ids=["", "beside what is sent", "wide", "in a part of its own"],
)
def test_what_would_raise_the_peak_is_not_put_off(
    width: int, early: int, part_of: Callable[[Node], str], is_put_off: bool
) -> None:
    """What the gradient reads is held longer then: beside something wide, that is too much, or beside what is sent,
    which is kept until the wait. So it is beside the rest of backward, where a pipeline's stage does not hold forward's
    peak at the same time."""

    def backward(x: Tensor, dy: Tensor, w: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        peak = torch.cat([x] * early).sum()  # unless what follows is wide
        made = x.cos()
        dw = made.t() @ dy
        sent = c10d.reduce_scatter_tensor(dy @ w, "sum", 2, "g")
        wide = other.sin().sum()
        return peak, dw, wide, c10d.wait_tensor(sent).sin()

    with FakeTensorMode():
        gm = make_fx(backward)(*(torch.empty(N, N) for _ in range(3)), torch.empty(N, width))
    for node in gm.graph.nodes:
        meta.write(node, phase="backward", module="layers.0.feed_forward")
    for node in (*calls(gm, aten.cat.default), calls(gm, aten.sum.default)[0]):
        meta.write(node, phase="forward")
    before = peaks(held_memory(gm, size_of, part_of), part_of)
    gm = fill_waits(gm, ["layers.0"], Costs(RATES["CPU"], {"g": Link("tp", 2, 1)}), part_of)
    gm.graph.lint()
    order = place(gm)
    (_, wide), products = calls(gm, aten.sum.default), calls(gm, aten.mm.default)
    own = next(n for n in products if n.args[0].target is aten.t.default)  # type: ignore[union-attr]
    assert (order[own] > order[wide]) == is_put_off
    assert peaks(held_memory(gm, size_of, part_of), part_of) == before


def test_only_waits_before_which_there_is_room_are_filled_in_forward() -> None:
    """A product that needs nothing sent is made before the second block's wait; in the first its result would lie
    there through the peak."""

    def forward(x: Tensor, w: Tensor) -> Tensor:
        for repeats in (8, 2):
            got = c10d.wait_tensor(c10d.all_reduce(x, "sum", "g"))
            x = torch.stack([got] * repeats).sum(0) + w @ w
        return x

    with FakeTensorMode():
        gm = make_fx(forward)(torch.empty(N, N), torch.empty(N, N))
    number = 0
    for node in gm.graph.nodes:
        meta.write(node, phase="forward", module=f"layers.{number}.moe")
        number += node.target is aten.add.Tensor
    before = peak_memory(gm).num_bytes
    gm = fill_waits(gm, ["layers.0", "layers.1"], Costs(RATES["CPU"], {"g": Link("ep", 2, 1)}))
    order, products = place(gm), calls(gm, aten.mm.default)
    assert [order[a] < order[b] for a, b in zip(products, calls(gm, WAIT), strict=True)] == [False, True]
    assert peak_memory(gm).num_bytes == before
