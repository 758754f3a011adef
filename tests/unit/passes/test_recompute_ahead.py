"""recompute_ahead: a layer is computed again while the one above it waits; only the order changes, within the peak."""

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule

from torchtitan_graph.analysis.cost import Costs, estimate
from torchtitan_graph.analysis.liveness import peak_memory
from torchtitan_graph.device import Target
from torchtitan_graph.graph import meta
from torchtitan_graph.models import qwen3
from torchtitan_graph.models.spec import tiny_config
from torchtitan_graph.parallel.layout import Layout
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.rates import RATES
from torchtitan_graph.steps import Assembly, StepOptions, build_graphs

SLOW = RATES["CPU"]._replace(near=3e8)  # messages take as long as products


def graph_on(layout: Layout, disabled: tuple[str, ...]) -> GraphModule:
    with torch.device("meta"):
        model = qwen3.Model(tiny_config(qwen3.FLAVORS["debugmodel_moe"]))
    options = StepOptions(
        Target(torch.device("cpu"), SLOW, is_gpu=False), rows=(1, 32), disabled=disabled, recompute=Recompute(every=1)
    )
    return build_graphs(Assembly(model, qwen3, layout, options)).train.gm  # type: ignore[union-attr]


def described(gm: GraphModule) -> list[str]:
    return [f"{node.name} {node.target} {node.args}" for node in gm.graph.nodes]


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp_shard": 2, "ep": 2},
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({"tp": 2}, {"dp_shard": 4, "ep": 2})),
    ],
)
def test_a_layer_is_computed_again_beside_the_one_above_it(degrees: dict[str, int], layout_of: Callable) -> None:
    layout = layout_of(**degrees)
    before, after = (graph_on(layout, disabled) for disabled in (("recompute_ahead",), ()))
    assert sorted(described(before)) == sorted(described(after)) and described(before) != described(after)
    assert peak_memory(after).num_bytes <= peak_memory(before).num_bytes
    costs = Costs(SLOW, layout.links(8))
    assert estimate(after, costs).seconds < estimate(before, costs).seconds
    layer = 99  # of the backward that has run last
    for node in after.graph.nodes:
        name, *rest = meta.module(node).split(".")
        if name == "layers" and meta.phase(node) == "backward" and not meta.role(node):
            if meta.origin(node) == meta.RECOMPUTED:
                assert layer == 99 or int(rest[0]) >= layer - 1, "at most one layer ahead"
            else:
                layer = int(rest[0])


@pytest.mark.slow
def test_nothing_is_moved_where_nothing_is_sent(layout_of: Callable) -> None:
    layout = layout_of()
    before, after = (described(graph_on(layout, disabled)) for disabled in (("recompute_ahead",), ()))
    assert before == after
