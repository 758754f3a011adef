"""overlap_collectives: gathers start early, reductions are waited for late; bitwise, since only the order changes."""

from collections import Counter
from collections.abc import Callable

from test_bucket_collectives import bucketed
from torch.fx import GraphModule, Node
from toy import GATHER, REDUCE_SCATTER, WAIT, aten, calls, place, text

from torchtitan_graph.graph import meta
from torchtitan_graph.passes.overlap_collectives import overlap_collectives


def overlapped(mesh_of: Callable, **options: object) -> GraphModule:
    gm, _ = bucketed(mesh_of, **options)
    gm = overlap_collectives(gm)
    gm.graph.lint()
    return gm


def waits(gm: GraphModule, start: object) -> list[Node]:
    return [node for node in calls(gm, WAIT) if node.args[0].target is start]  # type: ignore[union-attr]


def test_the_same_nodes_stand_in_another_order(mesh_of: Callable) -> None:
    gm, _ = bucketed(mesh_of, dp_shard=4)
    before = text(gm)
    after = text(overlap_collectives(gm))
    gm.graph.lint()
    assert after != before
    assert Counter(after) == Counter(before)


def test_a_gather_starts_before_the_one_before_it_is_waited_for(mesh_of: Callable) -> None:
    gm = overlapped(mesh_of, dp_shard=4)
    order, gathers = place(gm), waits(gm, GATHER)
    assert len(gathers) == 5
    for before, after in zip(gathers, gathers[1:], strict=False):
        if meta.phase(before) == meta.phase(after):
            assert order[after.args[0]] < order[before] < order[after]  # type: ignore[index]


def test_the_first_gather_of_backward_does_not_start_in_forward(mesh_of: Callable) -> None:
    gm = overlapped(mesh_of, dp_shard=4)
    order = place(gm)
    last_of_forward = max(order[n] for n in calls(gm, aten.mm.default) if meta.phase(n) == "forward")
    assert all(order[n] > last_of_forward for n in calls(gm, GATHER) if meta.phase(n) == "backward")


def test_at_most_one_gather_runs_ahead(mesh_of: Callable) -> None:
    gm = overlapped(mesh_of, dp_shard=4)
    started, most = 0, 0
    for node in gm.graph.nodes:
        started += node.target is GATHER
        started -= node in waits(gm, GATHER)
        most = max(most, started)
    assert most == 2, "the one that is waited for and the next"


def test_a_reduction_is_waited_for_when_the_next_one_starts(mesh_of: Callable) -> None:
    gm = overlapped(mesh_of, dp_shard=4)
    order, reductions = place(gm), waits(gm, REDUCE_SCATTER)
    for wait, after in zip(reductions, reductions[1:], strict=False):
        start = wait.args[0]
        assert any(
            order[start] < order[n] < order[wait]  # type: ignore[index]
            for n in gm.graph.nodes
            if meta.role(n) is None and n.op == "call_function"
        ), "arithmetic runs beside it"
        assert order[wait] < order[after.args[0]]  # type: ignore[index]


def test_nothing_sent_nothing_changed(mesh_of: Callable) -> None:
    gm, _ = bucketed(mesh_of, dp_shard=1)
    before = text(gm)
    assert text(overlap_collectives(gm)) == before


def test_a_reduction_over_both_axes_waits_for_the_first_before_it_starts_the_second(mesh_of: Callable) -> None:
    gm = overlapped(mesh_of, dp_replicate=2, dp_shard=2)
    order = place(gm)
    for wait in waits(gm, REDUCE_SCATTER):
        (all_reduce,) = wait.users
        assert order[wait] < order[all_reduce]
