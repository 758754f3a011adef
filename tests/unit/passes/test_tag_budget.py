"""tag_budget: as little is computed again as lets the step hold what the budget says; bitwise."""

from itertools import pairwise

import pytest
import torch
from torch.fx import GraphModule
from toy import aten, batch, bitwise, blocks, calls, run_toy, text, toy, trace_toy

from torchtitan_graph.analysis import keeping
from torchtitan_graph.analysis.liveness import host_memory, peak_memory
from torchtitan_graph.capture.step import trace_eval_step
from torchtitan_graph.graph import meta
from torchtitan_graph.loss import cross_entropy
from torchtitan_graph.parallel.recompute import Budget, Recompute
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.offload_activations import offload_activations
from torchtitan_graph.passes.rematerialize import rematerialize
from torchtitan_graph.passes.tag_budget import Curve, tag_budget
from torchtitan_graph.passes.tag_elementwise import tag_elementwise
from torchtitan_graph.passes.tag_offload import tag_offload
from torchtitan_graph.passes.tag_recomputation import tag_recomputation

LAYERS, ROWS = 6, 64  # with fewer rows gradients would set the peak


@pytest.fixture(autouse=True)
def free_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy's tensors are smaller than what it costs to start an operator."""
    monkeypatch.setattr(keeping, "START", 0)


def tagged(budget: Budget | None, gm: GraphModule | None = None) -> GraphModule:
    names = blocks(LAYERS)
    gm = tag_recomputation(gm or cleanup(trace_toy(toy(LAYERS), rows=ROWS)), names, Recompute())
    return tag_elementwise(tag_budget(gm, names, budget, ()), names)


def tags(gm: GraphModule) -> dict[str, str | None]:
    return {node.name: meta.tag(node) for node in gm.graph.nodes}


def curve_of(gm: GraphModule) -> Curve:
    return gm.meta["curve"]


def test_it_only_writes_tags_and_all_of_it_is_as_without() -> None:
    assert text(tagged(Budget(0.0))) == text(tagged(None))
    assert tags(tagged(Budget(1.0))) == tags(tagged(None))


@pytest.mark.parametrize("fraction", [0.3, *(pytest.param(part, marks=pytest.mark.slow) for part in (0.0, 0.6, 1.0))])
def test_a_step_keeps_its_numbers_and_holds_what_was_rehearsed(fraction: float) -> None:
    expected = run_toy(cleanup(trace_toy(toy(LAYERS), rows=ROWS)), ROWS)
    gm = tagged(Budget(fraction))
    curve = curve_of(gm)
    most, least = curve.points[0].peak, min(point.peak for point in curve.points)
    gm = rematerialize(gm)
    assert bitwise(run_toy(gm, ROWS), expected)
    assert peak_memory(gm).num_bytes == curve.chosen.peak <= least + fraction * (most - least)


def test_less_memory_costs_more_products() -> None:
    found = [curve_of(tagged(Budget(fraction))).chosen for fraction in (1.0, 0.6, 0.3, 0.0)]
    assert all(a.peak >= b.peak and a.flops <= b.flops for a, b in pairwise(found))
    assert found[0].flops == 0 < found[-1].flops and found[-1].peak < found[0].peak


@pytest.mark.slow
def test_what_is_given_in_bytes_is_met_by_no_more_than_is_needed() -> None:
    points = curve_of(tagged(Budget(0.0))).points
    between = (points[0].peak + min(point.peak for point in points)) // 2
    chosen = curve_of(tagged(Budget(num_bytes=between))).chosen
    assert chosen.peak <= between
    assert curve_of(tagged(Budget(num_bytes=points[0].peak))).chosen == points[0]
    least = curve_of(tagged(Budget(num_bytes=1))).chosen.peak  # the lowest of all, perhaps between two points
    assert least <= min(point.peak for point in points)
    assert least <= min(curve_of(tagged(Budget(part / 8))).chosen.peak for part in range(9))


def test_some_blocks_pay_and_others_keep() -> None:
    gm = tagged(Budget(0.5))
    paying = {meta.module(n).split(".")[1] for n in calls(gm, aten.mm.default) if meta.tag(n) == meta.RECOMPUTE}
    assert paying and paying == set("012345"[: len(paying)]) and len(paying) < LAYERS, "the first ones, held longest"
    chosen = curve_of(gm).chosen
    assert curve_of(tagged(Budget(num_bytes=chosen.peak - 1))).chosen.flops > chosen.flops


def test_a_stage_counts_every_microbatch_in_flight() -> None:
    one, three = (curve_of(tagged(Budget(1.0, in_flight=n))).chosen for n in (1, 3))
    assert three.kept == one.kept and three.peak == one.peak + 2 * one.kept


@pytest.mark.parametrize("fraction", [0.5, *(pytest.param(part, marks=pytest.mark.slow) for part in (0.0, 1.0))])
def test_what_lies_in_the_hosts_memory_meanwhile_is_rehearsed(fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "SMALLEST", 0)
    expected, names = run_toy(cleanup(trace_toy(toy(LAYERS), rows=ROWS)), ROWS), blocks(LAYERS)
    gm = tag_recomputation(cleanup(trace_toy(toy(LAYERS), rows=ROWS)), names, Recompute())
    gm = tag_offload(tag_elementwise(tag_budget(gm, names, Budget(fraction), (), names), names), names)
    gm = offload_activations(rematerialize(gm), names)
    assert bitwise(run_toy(gm, ROWS), expected) and host_memory(gm) > 0
    assert peak_memory(gm).num_bytes == curve_of(gm).chosen.peak
    most, without = curve_of(gm).points[0], curve_of(tagged(Budget(fraction))).points[0]
    assert most.peak < without.peak and most.kept < without.kept


def test_where_gradients_set_the_peak_nothing_is_computed_again() -> None:
    gm = tagged(Budget(0.0), cleanup(trace_toy(toy(LAYERS))))
    assert curve_of(gm).chosen.flops == 0


def test_evaluation_has_no_budget() -> None:
    gm = trace_eval_step(toy(LAYERS), cross_entropy, batch(), None, torch.tensor(6.0), device="cpu").gm
    gm = tag_budget(cleanup(gm), blocks(LAYERS), Budget(num_bytes=1), ())
    assert "curve" not in gm.meta and not any(map(meta.tag, gm.graph.nodes))
