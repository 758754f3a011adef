"""overlap_collectives: gathers start early, reductions are waited for late; bitwise, since only the order changes."""

from collections import Counter
from collections.abc import Callable

import torch
from test_bucket_collectives import bucketed
from torch.fx import GraphModule, Node
from toy import ALL_REDUCE, GATHER, REDUCE_SCATTER, WAIT, aten, calls, phase_of, place, text

from torchtitan_graph.analysis.cost import Costs
from torchtitan_graph.analysis.liveness import peak_memory
from torchtitan_graph.device import Target
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import call
from torchtitan_graph.models import llama3
from torchtitan_graph.models.spec import tiny_config
from torchtitan_graph.parallel.layout import Layout
from torchtitan_graph.passes.overlap_collectives import overlap_collectives
from torchtitan_graph.rates import RATES
from torchtitan_graph.steps import Assembly, StepOptions, build_graphs


def overlapped(layout_of: Callable, **options: object) -> GraphModule:
    gm, _ = bucketed(layout_of, **options)
    gm = overlap_collectives(gm, Costs())
    gm.graph.lint()
    return gm


def waits(gm: GraphModule, start: object) -> list[Node]:
    return [node for node in calls(gm, WAIT) if node.args[0].target is start]  # type: ignore[union-attr]


def test_the_same_nodes_stand_in_another_order(layout_of: Callable) -> None:
    gm, _ = bucketed(layout_of, dp_shard=4)
    before = text(gm)
    after = text(overlap_collectives(gm, Costs()))
    gm.graph.lint()
    assert after != before
    assert Counter(after) == Counter(before)


def test_a_gather_starts_before_the_one_before_it_is_waited_for(layout_of: Callable) -> None:
    gm = overlapped(layout_of, dp_shard=4)
    order, gathers = place(gm), waits(gm, GATHER)
    assert len(gathers) == 5
    for before, after in zip(gathers, gathers[1:], strict=False):
        if meta.phase(before) == meta.phase(after):
            assert order[after.args[0]] < order[before] < order[after]  # type: ignore[index]


def test_the_first_gather_of_backward_does_not_start_in_forward(layout_of: Callable) -> None:
    gm = overlapped(layout_of, dp_shard=4)
    order = place(gm)
    last_of_forward = max(order[n] for n in calls(gm, aten.mm.default) if meta.phase(n) == "forward")
    assert all(order[n] > last_of_forward for n in calls(gm, GATHER) if meta.phase(n) == "backward")


def test_at_most_one_gather_runs_ahead(layout_of: Callable) -> None:
    gm = overlapped(layout_of, dp_shard=4)
    started, most = 0, 0
    for node in gm.graph.nodes:
        started += node.target is GATHER
        started -= node in waits(gm, GATHER)
        most = max(most, started)
    assert most == 2, "the one that is waited for and the next"


def test_a_reduction_is_waited_for_when_the_next_one_starts(layout_of: Callable) -> None:
    gm = overlapped(layout_of, dp_shard=4)
    order, reductions = place(gm), waits(gm, REDUCE_SCATTER)
    for wait, after in zip(reductions, reductions[1:], strict=False):
        start = wait.args[0]
        assert any(
            order[start] < order[n] < order[wait]  # type: ignore[index]
            for n in gm.graph.nodes
            if meta.role(n) is None and n.op == "call_function"
        ), "arithmetic runs beside it"
        assert order[wait] < order[after.args[0]]  # type: ignore[index]


# --- earlier than one ahead, by the estimate ------------------------------------------------------------------------


def starts_and_waits(gm: GraphModule) -> list[tuple[int, int]]:
    order = place(gm)
    return [(order[wait.args[0]], order[wait]) for wait in waits(gm, GATHER)]  # type: ignore[index]


def test_slow_gathers_start_earlier_within_the_peak_and_fast_ones_do_not(layout_of: Callable) -> None:
    layout, found = layout_of(dp_shard=4), {}
    for speed in (1e4, 1e12):
        gm, _ = bucketed(lambda **_: layout)
        rates = RATES["H100"]._replace(near=speed)
        found[speed] = overlap_collectives(gm, Costs(rates, layout.links(8)))
        found[speed].graph.lint()
    gm, _ = bucketed(lambda **_: layout)
    one_ahead = overlap_collectives(gm, Costs())
    assert text(found[1e12]) == text(one_ahead)
    slow, before = starts_and_waits(found[1e4]), starts_and_waits(one_ahead)
    assert slow[2][0] < slow[0][1] < before[2][0], "the second block's starts before the root's is waited for"
    assert slow == sorted(slow), "they keep their order"
    assert [meta.phase(wait) for wait in waits(found[1e4], GATHER)] == ["forward"] * 3 + ["backward"] * 2
    assert peak_memory(found[1e4]).num_bytes == peak_memory(one_ahead).num_bytes
    assert Counter(text(found[1e4])) == Counter(text(one_ahead))


def test_a_sum_that_nothing_reads_stays_where_it_is(layout_of: Callable) -> None:
    gm, _ = bucketed(layout_of, dp_shard=4)
    x = next(n for n in calls(gm, aten.mm.default))
    with gm.graph.inserting_after(x):
        start = call(gm.graph, x, ALL_REDUCE, x, "sum", calls(gm, GATHER)[0].args[-1])
    with gm.graph.inserting_after(start):
        wait = call(gm.graph, x, WAIT, start)
    gm = overlap_collectives(gm, Costs())
    assert wait in calls(gm, WAIT) and not wait.users


def test_nothing_sent_nothing_changed(layout_of: Callable) -> None:
    gm, _ = bucketed(layout_of, dp_shard=1)
    before = text(gm)
    assert text(overlap_collectives(gm, Costs())) == before


def test_a_reduction_over_both_axes_waits_for_the_first_before_it_starts_the_second(layout_of: Callable) -> None:
    gm = overlapped(layout_of, dp_replicate=2, dp_shard=2)
    order = place(gm)
    for wait in waits(gm, REDUCE_SCATTER):
        (all_reduce,) = wait.users
        assert order[wait] < order[all_reduce]


def test_copies_sums_are_bucketed_and_waited_for_when_the_next_one_starts(layout_of: Callable) -> None:
    """DDP: one all-reduce a block, beside the block before it."""
    gm = overlapped(layout_of, dp_replicate=4)
    order, sums = place(gm), waits(gm, ALL_REDUCE)
    assert len(sums) == 3 and not waits(gm, GATHER)
    for wait, after in zip(sums, sums[1:], strict=False):
        between = list(gm.graph.nodes)[order[wait.args[0]] + 1 : order[wait]]  # type: ignore[index]
        assert any(meta.role(n) is None and n.op == "call_function" for n in between), "arithmetic runs beside it"
        assert order[wait] < order[after.args[0]]  # type: ignore[index]


def test_over_both_axes_each_stage_waits_until_the_next_bucket_starts(layout_of: Callable) -> None:
    gm = overlapped(layout_of, dp_replicate=2, dp_shard=2)
    order = place(gm)
    over_shards, over_copies = waits(gm, REDUCE_SCATTER), waits(gm, ALL_REDUCE)
    starts = [wait.args[0] for wait in over_shards]
    assert len(starts) == len(over_copies) == 3
    for number, start in enumerate(starts[:-1]):
        following = starts[number + 1]
        assert order[start] < order[over_shards[number]] < order[following]  # type: ignore[index]
        between = list(gm.graph.nodes)[order[start] + 1 : order[over_shards[number]]]  # type: ignore[index]
        assert any(meta.role(n) is None and n.op == "call_function" for n in between), "arithmetic runs beside it"
        after = order[starts[number + 2]] if number + 2 < len(starts) else len(order)  # type: ignore[index]
        assert order[following] < order[over_copies[number]] < after  # type: ignore[index]


def llama_on(layout: Layout, disabled: tuple[str, ...] = ()) -> GraphModule:
    with torch.device("meta"):
        model = llama3.Model(tiny_config(llama3.FLAVORS["debugmodel"]))
    options = StepOptions(target=Target.here(), rows=(1, 8), disabled=disabled)
    return build_graphs(Assembly(model, llama3, layout, options)).train.gm


def test_under_tensor_parallelism_a_blocks_gradients_leave_before_the_next_blocks_are_made(layout_of: Callable) -> None:
    """The norms' gradients are summed over its ranks, which is traced after all of backward."""
    gm = llama_on(layout_of(dp_shard=2, tp=2))
    order = place(gm)
    made = {
        block: [order[n] for n in calls(gm, aten.mm.default) if phase_of("backward")(n) and module_of(block)(n)]
        for block in (0, 1, 2)
    }
    leave = [order[n] for n in calls(gm, REDUCE_SCATTER) if meta.role(n) == meta.REDUCE]
    assert len(leave) == 4
    for start, of_block, before in zip(leave, (2, 1, 0), (1, 0), strict=False):
        assert max(made[of_block]) < start < min(made[before])


def module_of(block: int) -> Callable[[Node], bool]:
    return lambda node: meta.module(node).startswith(f"layers.{block}.")


def test_waits_for_other_collectives_stand_before_their_first_use(layout_of: Callable) -> None:
    gm = llama_on(layout_of(tp=2), disabled=("fill_waits",))
    others = [wait for wait in calls(gm, WAIT) if meta.role(wait) is None]
    assert others
    for wait in others:
        assert wait.next in wait.users or wait.next in others
