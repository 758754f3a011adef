"""What passes make of a dispatch to experts: the host reads once a layer, results travel beside the shared experts, and
no region is compiled for the number of rows that the trace shows."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from toy import WAIT, aten, calls, place

from torchtitan_graph.device import Target
from torchtitan_graph.graph import meta
from torchtitan_graph.models import deepseek_v3
from torchtitan_graph.models.spec import tiny_config
from torchtitan_graph.parallel.layout import Layout
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.passes.compile_regions import tag_regions
from torchtitan_graph.steps import Assembly, Graphs, StepOptions, build_graphs

ours = torch.ops.torchtitan_graph
EXCHANGE, COUNTS = ours.exchange.default, torch.ops._c10d_functional.all_to_all_single.default
NUM_LAYERS = 2  # of them one is dense


def graphs(layout: Layout, **options: Any) -> Graphs:
    with torch.device("meta"):
        model = deepseek_v3.Model(tiny_config(deepseek_v3.FLAVORS["debugmodel"], num_layers=NUM_LAYERS))
    return build_graphs(Assembly(model, deepseek_v3, layout, StepOptions(Target.here(), rows=(2, 32), **options)))


def at_home(layout: Layout) -> Layout:
    """Give the same ranks without expert parallelism."""
    return dataclasses.replace(layout, dims=dataclasses.replace(layout.dims, ep=1), experts=None)


@pytest.mark.parametrize(
    "recompute", [Recompute(every=1), pytest.param(Recompute(by_op=True), marks=pytest.mark.slow)], ids=["full", "op"]
)
def test_the_host_reads_once_a_layer_whatever_is_recomputed(layout_of: Callable, recompute: Recompute) -> None:
    layout = layout_of(dp_shard=4, ep=2)
    kept, again = graphs(layout).train.gm, graphs(layout, recompute=recompute).train.gm
    for gm in (kept, again):
        assert len(calls(gm, COUNTS)) == len(calls(gm, ours.row_splits.default)) == NUM_LAYERS - 1
    assert len(calls(again, ours.turned_order.default)) > len(calls(kept, ours.turned_order.default))


def test_the_host_waits_for_how_many_rows_while_they_are_put_in_order(layout_of: Callable) -> None:
    """Told after the rows are in order, it would wait while the device has nothing to do."""
    gm = graphs(layout_of(dp_shard=4, ep=2)).train.gm
    order, between = place(gm), []
    for told in calls(gm, ours.row_splits.default):
        first = min((node for node in told.users if node.target is EXCHANGE), key=order.__getitem__)
        rows = first.all_input_nodes[0]
        assert rows.target is aten.index_select.default
        between.append(order[told] < order[rows] < order[first])
    assert between == [True] * (NUM_LAYERS - 1)


def test_shared_experts_run_while_results_travel(layout_of: Callable) -> None:
    """In backward, while their gradients do; where `fill_waits` does not move weights' gradients to other waits."""
    gm = graphs(layout_of(dp_shard=2, tp=2, ep=2), disabled=["fill_waits"]).train.gm
    order, beside = place(gm), set()
    products = {node for node in calls(gm, aten.mm.default) if "shared_experts" in meta.module(node)}
    for start in calls(gm, EXCHANGE):
        (wait,) = start.users
        assert wait.target is WAIT
        beside |= {node for node in products if order[start] < order[node] < order[wait]}
    assert products and beside == products


def test_no_region_is_compiled_for_rows_of_which_there_is_any_number(layout_of: Callable) -> None:
    layout = layout_of(dp_shard=2, ep=2)
    gm, without = (graphs(each).train.gm for each in (layout, at_home(layout)))
    for each in (gm, without):
        tag_regions(each, ["layers.*"])
    away = calls(gm, EXCHANGE, ours.turned_order.default, ours.grouped_mm.default, ours.grouped_outer.default)
    assert away and all(meta.region(node) is None for node in away)
    at_home_still = calls(gm, aten.topk.default) + calls(without, ours.grouped_mm.default)
    assert all(meta.region(node) is not None for node in at_home_still)


@pytest.mark.slow
def test_the_trace_shows_the_mean_over_ranks_so_operations_are_those_without_a_dispatch(layout_of: Callable) -> None:
    layout = layout_of(dp_shard=2, ep=2)
    assert graphs(layout).flops == graphs(at_home(layout)).flops
