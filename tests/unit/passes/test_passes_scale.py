"""Every pass is one sweep: its work grows as the graph does."""

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.fx import GraphModule
from toy import blocks, toy, trace_toy

from torchtitan_graph import compiler
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.parallel.storage import Precision, buckets, plan_storage


def count_calls(fn: Callable[[GraphModule], GraphModule], gm: GraphModule) -> tuple[GraphModule, int]:
    """Count the calls, of Python's functions and C's, that a pass makes: its time without the machine's noise."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        return fn(gm), count
    finally:
        sys.setprofile(None)


def work(layout: Any, num_layers: int) -> dict[str, int]:
    model = toy(num_layers)
    gm = trace_toy(model)
    storages = plan_storage(model, layout, Precision())
    counts = {}
    names = blocks(num_layers)
    plan = compiler.PassPlan(storages, set(names), buckets(model, names), Recompute(every=1))
    for each in compiler.passes(plan):
        begin = time.perf_counter()
        gm, counts[each.name] = count_calls(each.run, gm)
        seconds = time.perf_counter() - begin
        print(f"{num_layers:3} layers: {each.name:20} {seconds:.3f} s, {len(gm.graph.nodes)} nodes")
    return counts


@pytest.mark.slow
def test_twice_the_layers_are_twice_the_work(layout_of: Callable) -> None:
    layout = layout_of(dp_shard=2)
    small, large = work(layout, 16), work(layout, 32)
    assert {name: round(large[name] / small[name], 2) for name in small if large[name] > 2.2 * small[name]} == {}


def test_a_pass_that_looks_through_the_graph_for_every_node_would_be_seen() -> None:
    def quadratic(gm: GraphModule) -> GraphModule:
        for node in gm.graph.nodes:
            sum(len(n.name) for n in gm.graph.nodes if len(node.name) > 0)
        return gm

    small, large = (count_calls(quadratic, trace_toy(toy(n)))[1] for n in (2, 4))
    assert large > 2.2 * small
