"""Costs by scope: nothing is lost and nothing counts twice, to the last byte, operation and nanosecond."""

import dataclasses
import functools
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.fx import GraphModule

from torchtitan_graph.analysis import scopes
from torchtitan_graph.analysis.cost import Costs, Estimate, estimate
from torchtitan_graph.analysis.flops import Flops, attention_flops, matmul_flops
from torchtitan_graph.analysis.liveness import held_memory, lifetimes, peak_memory, scratch_of, size_of
from torchtitan_graph.analysis.scopes import PARTS, Charge, Cost, Scope, charges, in_a_row, total, tree
from torchtitan_graph.analysis.traffic import traffic
from torchtitan_graph.capture.trace import make_fx_capture
from torchtitan_graph.check.matrix import Cell, build_model
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.hierarchy import call_hierarchy, shown
from torchtitan_graph.models.spec import load_family
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.steps import Assembly, build_graphs
from torchtitan_graph.torch_private.distributed import init_fake_process_group

FULL = Recompute.from_option("full", "op")
CELLS = {
    "sharded twice, computed again": Cell(ParallelDims(dp_shard=2, tp=2), recompute=FULL),
    "blocks as one call": Cell(ParallelDims(dp_replicate=4), dedupe=True),
    "experts": Cell(ParallelDims(dp_shard=4, ep=2), family="qwen3", flavor="debugmodel_moe"),
}


@pytest.fixture(autouse=True, scope="module")
def nothing_is_sent() -> Iterator[None]:
    init_fake_process_group(4)
    yield
    dist.destroy_process_group()
    built.cache_clear()


@functools.cache
def built(name: str) -> tuple[GraphModule, Costs, Flops]:
    cell = CELLS[name]
    layout, options = cell.dims.layout("cpu"), cell.options("graph")
    capture = functools.partial(make_fx_capture, call_hierarchy=True)
    assembly = Assembly(build_model(cell), load_family(cell.family), layout, options, capture)
    graphs = build_graphs(assembly)
    return graphs.train.gm, assembly.costs, graphs.flops


def told_by_others(gm: GraphModule, costs: Costs, seconds: dict[str, float]) -> Cost:
    """The graph's totals, from those who know nothing of scopes."""
    time: Estimate = estimate(gm, costs)
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    return Cost(
        calls=len(calls),
        flops=sum(round(meta.operations(n) or matmul_flops(n) or attention_flops(n) / 2) for n in calls),
        moved=total(each.cost for each in charges(gm, costs)).moved,  # nobody else adds it up
        held=peak_memory(gm).num_bytes,
        received=sum(each.num_bytes for each in traffic(gm, costs.links).values()),
        sending=round(sum(time.sent.values()) * 1e9),
        exposed=round(sum(time.exposed.values()) * 1e9),
        time=round(time.seconds * 1e9),
        measured=sum(round(each * 1e9) for each in seconds.values()),
    )


def differing(root: Scope, expected: Cost) -> list[str]:
    own = total(each.cost for scope in root.walk() for each in scope.charges)
    found = {"own": own, "root": root.cost, **{part: root.parts.get(part, Cost()) for part in PARTS}}
    wrong = [name for name in ("own", "root") if found[name] != expected]
    return wrong + ["parts"] * (total(found[part] for part in PARTS) != expected)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "experts")) for name in CELLS])
def test_all_scopes_together_are_the_graph(name: str) -> None:
    gm, costs, _ = built(name)
    seconds = {node.name: i * 1e-7 for i, node in enumerate(gm.graph.nodes) if node.op == "call_function"}
    root, expected = tree(charges(gm, costs, measured=seconds)), told_by_others(gm, costs, seconds)
    assert not differing(root, expected)
    assert min(expected._replace(exposed=1)) > 0
    assert all(each.cost == total(c.cost for below in each.walk() for c in below.charges) for each in root.walk())
    # Controls: a scope that is lost, and one that counts twice.
    kept = root.children.pop()
    assert "own" in differing(root, expected)
    root.children += [kept, kept]
    assert "own" in differing(root, expected)


def test_what_stands_for_several_is_charged_to_the_scope_around_them() -> None:
    gm, costs, _ = built("sharded twice, computed again")
    charged = charges(gm, costs)
    bucket = next(c for c in charged if len(call_hierarchy(c.node)) > 3 and c.cost.received)
    assert shown(bucket.place) in (":Model", *(f":Model > {i}:Block" for i in range(3)))
    assert {place[: len(bucket.place)] for place in call_hierarchy(bucket.node)} == {bucket.place}
    assert len({place[: len(bucket.place) + 1] for place in call_hierarchy(bucket.node)}) > 1
    assert bucket.part in (scopes.PASSES_FORWARD, scopes.PASSES_BACKWARD)
    parts = {shown(each.place): each.parts for each in tree(charged).walk()}
    block = parts[":Model > 0:Block"]
    assert block["recomputed"].flops and block["backward"].flops == 2 * block["forward"].flops


def test_regions_are_of_their_phase() -> None:
    gm, costs, _ = built("blocks as one call")
    regions = [each for each in charges(gm, costs) if meta.operations(each.node)]
    assert {each.part for each in regions} == {"forward", "backward"}
    assert {shown(each.place) for each in regions} == {f":Model > {i}:Block" for i in range(3)}


def test_collectives_stand_on_their_own_stream_before_their_waits() -> None:
    gm, costs, _ = built("sharded twice, computed again")
    charged = {each.node: each for each in charges(gm, costs)}
    sent: list[Charge] = [each for each in charged.values() if each.cost.sending]
    assert len(sent) > 4
    for each in sent:
        (wait,) = each.node.users
        assert 0 <= each.end - each.begin == each.cost.sending
        assert each.end <= charged[wait].end


@pytest.mark.slow
def test_masks_say_what_attention_computes() -> None:
    gm, costs, flops = built("experts")
    blocks = ("layers.0", "layers.1", "layers.2")
    for visible in ({"layers.0": 0.25, "layers.1": 0.5, "layers.2": 0.0}, dict.fromkeys(blocks, 1.0)):
        parts = tree(charges(gm, dataclasses.replace(costs, visible=visible))).parts
        assert parts["forward"].flops + parts["backward"].flops == flops.of(visible)  # counted before any pass
    causal = dataclasses.replace(costs, visible=dict.fromkeys(blocks, 0.5))
    assert tree(charges(gm, costs)).parts == tree(charges(gm, causal)).parts


def test_what_is_held_is_the_memories_that_a_node_lies_in() -> None:
    gm, *_ = built("experts")
    held, lives = held_memory(gm, size_of), lifetimes(gm)
    for i, node in enumerate(gm.graph.nodes):
        there = sum(each.num_bytes for each in lives if each.begin <= i <= each.end)
        assert there + scratch_of(node) == held[node]


def test_a_profile_of_another_graph_is_refused() -> None:
    gm, costs, _ = built("experts")
    with pytest.raises(UserError, match=r"measured 2 nodes that are not in this graph, such as mm_ \(there is mm\w*\)"):
        charges(gm, costs, measured={"mm": 1.0, "mm_": 2.0, "nothing": 1.0})


def test_graphs_that_run_in_a_row_are_one() -> None:
    small, large = (charges(*built(name)[:2]) for name in ("experts", "sharded twice, computed again"))
    both, costs = in_a_row([small, large]), [total(each.cost for each in charged) for charged in (small, large)]
    assert total(each.cost for each in both)._replace(held=0) == total(costs)._replace(held=0)
    assert total(each.cost for each in both).held == max(cost.held for cost in costs)
    assert both[len(small)].begin == max(each.end for each in small) + large[0].begin
