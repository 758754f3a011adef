"""Every pass is one sweep: its work grows as the graph does."""

import sys
import time
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule
from toy import toy, trace_toy

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


def work(mesh: Any, num_layers: int) -> dict[str, int]:
    model = toy(num_layers)
    gm = trace_toy(model)
    storages = plan_storage(model, mesh, Precision())
    counts = {}
    for each in compiler.passes(storages, buckets(model), Recompute(every=1), reshard=True):
        begin = time.perf_counter()
        gm, counts[compiler._name(each)] = count_calls(each, gm)
        seconds = time.perf_counter() - begin
        print(f"{num_layers:3} layers: {compiler._name(each):20} {seconds:.3f} s, {len(gm.graph.nodes)} nodes")
    return counts


def test_twice_the_layers_are_twice_the_work(mesh_of: Callable) -> None:
    mesh = mesh_of(dp_shard=2)
    small, large = work(mesh, 16), work(mesh, 32)
    assert {name: round(large[name] / small[name], 2) for name in small if large[name] > 2.2 * small[name]} == {}


def test_a_pass_that_looks_through_the_graph_for_every_node_would_be_seen() -> None:
    def quadratic(gm: GraphModule) -> GraphModule:
        for node in gm.graph.nodes:
            sum(len(n.name) for n in gm.graph.nodes if len(node.name) > 0)
        return gm

    small, large = (count_calls(quadratic, trace_toy(toy(n)))[1] for n in (2, 4))
    assert large > 2.2 * small
