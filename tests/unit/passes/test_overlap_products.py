"""overlap_products: gathers and sums of tensor parallelism go part by part, beside products, where that is faster."""

from collections.abc import Callable
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
from torch.fx import GraphModule, Node
from toy import GATHER, REDUCE_SCATTER, WAIT, calls, place, text

from torchtitan_graph.analysis.cost import Costs, estimate
from torchtitan_graph.analysis.liveness import peak_memory
from torchtitan_graph.analysis.traffic import is_permutation
from torchtitan_graph.check.matrix import SLOW
from torchtitan_graph.device import Target
from torchtitan_graph.graph import meta
from torchtitan_graph.models import deepseek_v3, llama3
from torchtitan_graph.models.spec import tiny_config
from torchtitan_graph.parallel.layout import Layout
from torchtitan_graph.passes import overlap_products
from torchtitan_graph.rates import RATES, Rates
from torchtitan_graph.steps import Assembly, StepOptions, build_graphs

FAST = RATES["CPU"]._replace(near=1e15)


def graph_on(
    layout: Layout, async_tp: bool = True, rows: int = 2, rates: Rates = SLOW, family: ModuleType = llama3
) -> GraphModule:
    with torch.device("meta"):
        model = family.Model(tiny_config(family.FLAVORS["debugmodel"], num_heads=4, num_kv_heads=4))
    target = Target(torch.device("cpu"), rates, is_gpu=False)
    options = StepOptions(target, rows=(rows, 16), async_tp=async_tp)
    return build_graphs(Assembly(model, family, layout, options)).train.gm


def num_whole(gm: GraphModule) -> int:
    """Count the gathers and sums of blocks' activations that go whole."""
    return sum(meta.role(n) is None and meta.module(n).startswith("layers.") for n in calls(gm, GATHER, REDUCE_SCATTER))


@pytest.mark.parametrize(
    ("tp", "rows"), [(4, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1), (2, 2), (4, 2)))]
)
def test_products_stand_between_a_start_and_its_wait(layout_of: Callable, tp: int, rows: int) -> None:
    layout = layout_of(tp=tp)
    before, after = (graph_on(layout, is_on, rows) for is_on in (False, True))
    assert num_whole(before) == 24 and num_whole(after) == 0, "three blocks, two modules, forward and backward"
    order, nodes = place(after), list(after.graph.nodes)
    for wait in (n for n in calls(after, WAIT) if is_permutation(n.args[0])):  # type: ignore[arg-type]
        beside = nodes[order[wait.args[0]] : order[wait]]  # type: ignore[index]
        assert any(n.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) for n in beside)
    costs = Costs(SLOW, layout.links(8))
    assert estimate(after, costs).seconds < estimate(before, costs).seconds
    assert peak_memory(after).num_bytes <= peak_memory(before).num_bytes


@pytest.mark.slow
def test_latent_attention_and_dense_layers_are_cut_too(layout_of: Callable) -> None:
    layout = layout_of(tp=2)
    before, after = (num_whole(graph_on(layout, is_on, family=deepseek_v3)) for is_on in (False, True))
    assert 0 < after < before, "what is sent between experts is not a sum of products of the sequence's rows"


@pytest.mark.slow
def test_nothing_changes_where_it_would_take_longer(layout_of: Callable) -> None:
    layout = layout_of(tp=2)
    without, found = (text(graph_on(layout, is_on, rates=FAST)) for is_on in (False, True))
    assert found == without


def test_gathers_stay_whole_where_their_parts_would_raise_the_peak(layout_of: Callable) -> None:
    def full_everywhere(gm: GraphModule, size: object) -> dict[Node, int]:
        return dict.fromkeys(gm.graph.nodes, 1)

    with patch.object(overlap_products, "held_memory", full_everywhere):
        gm = graph_on(layout_of(tp=2))
    assert num_whole(gm) == 12 == len([n for n in calls(gm, GATHER) if meta.module(n).startswith("layers.")])
    assert sum(map(is_permutation, gm.graph.nodes)) == 13, "the blocks' sums, and the output's"
