"""tag_offload, offload_activations: what backward needs waits in the host's memory; bitwise, and holding less."""

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node
from toy import aten, bitwise, blocks, calls, place, run_toy, text, toy, trace_toy

from torchtitan_graph.analysis import keeping
from torchtitan_graph.analysis.liveness import host_memory, owners, peak_memory
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.graph.edit import call
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.parallel.storage import Precision, plan_storage
from torchtitan_graph.passes import offload_activations as module
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.compile_regions import tag_regions
from torchtitan_graph.passes.offload_activations import offload_activations
from torchtitan_graph.passes.rematerialize import rematerialize
from torchtitan_graph.passes.shard_params import shard_params
from torchtitan_graph.passes.tag_offload import tag_offload
from torchtitan_graph.passes.tag_recomputation import tag_recomputation
from torchtitan_graph.steps.choices import plan_offload

OPS = torch.ops.torchtitan_graph
OFFLOAD, RELOAD, ARRIVED = OPS.offload.default, OPS.reload.default, OPS.arrived.default
NONE, FULL, BY_OP = Recompute(), Recompute(every=1), Recompute(by_op=True)
BLOCKS = blocks(4)


@pytest.fixture(autouse=True)
def nothing_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "SMALLEST", 0)


def tagged(recompute: Recompute = NONE, modules: list[str] = BLOCKS) -> GraphModule:
    gm = tag_recomputation(cleanup(trace_toy(toy(4))), BLOCKS, recompute)
    return rematerialize(tag_offload(gm, modules))


def moved(recompute: Recompute = NONE, modules: list[str] = BLOCKS) -> GraphModule:
    return offload_activations(tagged(recompute, modules), BLOCKS)


def sent(gm: GraphModule) -> list[Node]:
    return [copy.all_input_nodes[0] for copy in calls(gm, OFFLOAD)]


def span(gm: GraphModule, block: str, phase: str) -> tuple[int, int]:
    """Give the places of the first and the last node that were traced in a block."""
    traced = [n for n in gm.graph.nodes if n.op == "call_function" and n.target not in (OFFLOAD, RELOAD, ARRIVED)]
    order = place(gm)
    places = [order[n] for n in traced if block_of(n, BLOCKS) == block and meta.phase(n) == phase]
    return min(places), max(places)


# --- the mechanism --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [NONE, FULL, BY_OP])
def test_the_numbers_stay_bit_for_bit_and_no_more_is_held(recompute: Recompute) -> None:
    gm = tagged(recompute)
    expected, before = run_toy(gm), peak_memory(gm).num_bytes
    gm = offload_activations(gm, BLOCKS)
    gm.graph.lint()
    assert bitwise(run_toy(gm), expected)
    assert host_memory(gm) == sum(node.meta["val"].nbytes for node in sent(gm)) > 0
    assert peak_memory(gm).num_bytes <= before - (recompute == NONE)


def test_a_copy_of_another_value_would_be_seen() -> None:
    gm = moved()
    expected = run_toy(gm)
    first, second = (copy for copy in calls(gm, RELOAD) if meta.module(copy) in ("layers.0.down", "layers.1.down"))
    first.args, second.args = second.args, first.args
    gm.recompile()
    assert not bitwise(run_toy(gm), expected)


def test_backward_reads_only_the_copy_of_what_is_sent_and_views_of_it() -> None:
    gm = cleanup(trace_toy(toy(4)))
    root = calls(gm, aten.rsqrt.default)[0]
    reader = next(user for user in root.users if user.target == aten.pow.Tensor_Scalar)
    with gm.graph.inserting_after(root):
        view = call(gm.graph, root, aten.view.default, root, [2, 3, 1])
    reader.replace_input_with(root, view)
    gm.recompile()
    expected = run_toy(gm)
    gm = offload_activations(rematerialize(tag_offload(gm, BLOCKS)), BLOCKS)
    assert bitwise(run_toy(gm), expected)
    owner = owners(gm)
    roots = {owner[node] for node in sent(gm)}
    backward = [n for n in gm.graph.nodes if n.op == "call_function" and meta.phase(n) == "backward"]
    assert root in roots and not [n for n in backward if roots & {owner[source] for source in n.all_input_nodes}]


def test_a_copy_starts_behind_its_block_and_is_waited_for_behind_the_next() -> None:
    gm = moved()
    order = place(gm)
    for copy in calls(gm, OFFLOAD):
        block, (wait,) = block_of(copy, BLOCKS), copy.users
        after = BLOCKS[BLOCKS.index(block or "") + 1]
        assert span(gm, block or "", "forward")[1] < order[copy] < span(gm, after, "forward")[0]
        assert span(gm, after, "forward")[1] < order[wait]
        assert wait.args == (copy, copy.args[0]), "what is copied is held until then"


def test_what_comes_back_starts_a_block_ahead_as_far_as_the_peak_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    def ahead(gm: GraphModule) -> dict[str, list[bool]]:
        """Tell of what each block's backward reads first whether it is fetched ahead of the block before it."""
        order, found = place(gm), {name: [] for name in BLOCKS}
        begins = {name: span(gm, name, "backward")[0] for name in BLOCKS}
        for start in calls(gm, RELOAD):
            (wait,) = start.users
            assert order[wait] == min(order[user] for user in wait.users) - 1
            reading = max((name for name in BLOCKS if begins[name] <= order[wait] + 1), key=begins.__getitem__)
            before = BLOCKS[BLOCKS.index(reading) + 1]
            assert order[start] < begins[reading], "not in the middle of what needs it"
            found[reading].append(order[start] < begins[before])
        return found

    gm = moved()
    first, *others = (places for _, places in sorted(ahead(gm).items(), reverse=True) if places)
    assert all(first) and not all(sum(others, [])), "in this graph the last gradients make the peak"
    monkeypatch.setattr(module, "_fetch_early", lambda *_: None)
    late = moved()
    assert not any(sum(ahead(late).values(), []))
    assert peak_memory(gm).num_bytes == peak_memory(late).num_bytes


def test_what_the_last_block_reads_in_backward_stays() -> None:
    assert {block_of(node, BLOCKS) for node in sent(moved())} == set(BLOCKS[:-1])
    assert not sent(moved(modules=BLOCKS[-1:]))


def test_a_graph_without_backward_or_tags_is_left_as_it_is() -> None:
    gm = tagged(modules=[])
    before = text(gm)
    assert text(offload_activations(gm, BLOCKS)) == before


def test_copies_are_in_no_region_that_is_compiled() -> None:
    gm = moved()
    tag_regions(gm, ["layers.*"])
    copies = calls(gm, OFFLOAD, RELOAD, ARRIVED)
    assert copies and not [node for node in copies if meta.region(node)]


# --- the policy -----------------------------------------------------------------------------------------------------


def test_only_large_activations_of_the_modules_named_are_tagged(monkeypatch: pytest.MonkeyPatch) -> None:
    in_feed_forward = sent(moved(modules=["layers.0.down", "layers.1"]))
    assert {meta.module(n).removeprefix("layers.") for n in in_feed_forward} >= {
        "0.down",
        "1.norm",
        "1.up",
        "1.down",
        "1",
    }
    assert not [n for n in in_feed_forward if meta.module(n) in ("layers.0", "layers.0.up")]
    monkeypatch.setattr(keeping, "SMALLEST", 6 * 7 * 4)
    assert {n.meta["val"].nbytes for n in sent(moved())} == {6 * 7 * 4}


def test_weights_stay_however_they_are_gathered(layout_of: Callable) -> None:
    model = toy(4)
    gm = shard_params(cleanup(trace_toy(model)), plan_storage(model, layout_of(dp_shard=2), Precision()))
    away = [n for n in tag_offload(gm, BLOCKS).graph.nodes if meta.tag(n) == meta.OFFLOAD]
    assert away and not [n for n in away if meta.role(n) or n.target == aten.t.default]


@pytest.mark.parametrize("recompute", [FULL, BY_OP])
def test_what_is_computed_again_is_not_moved(recompute: Recompute) -> None:
    again = {
        n.name
        for n in tag_recomputation(cleanup(trace_toy(toy(4))), BLOCKS, recompute).graph.nodes
        if meta.tag(n) == meta.RECOMPUTE
    }
    away = sent(moved(recompute))
    assert away and not again & {n.name for n in away}


def test_what_is_written_in_place_stays() -> None:
    gm = cleanup(trace_toy(toy(4)))
    silu = calls(gm, aten.silu.default)[0]
    with gm.graph.inserting_after(silu):
        call(gm.graph, silu, aten.mul_.Tensor, silu, 1.0)
    tag_offload(gm, BLOCKS)
    mine = [n for n in gm.graph.nodes if owners(gm)[n] is silu]
    assert len(mine) == 3 and not [n for n in mine if meta.tag(n)]


# --- the option -----------------------------------------------------------------------------------------------------


def test_patterns_name_modules_of_blocks_but_not_the_last() -> None:
    model = toy(4)
    assert plan_offload(["layers.*"], model, BLOCKS, {"layers.3"}) == tuple(BLOCKS[:3])
    assert plan_offload(["layers.*.up", "layers.2"], model, BLOCKS, {"layers.1", "layers.3"}) == (
        "layers.0.up",
        "layers.2.up",
        "layers.2",
    )


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layer.*", "matches no module of a block; legal are names such as layers.0, layers.0.norm, "),
        ("output", "matches no module of a block"),
        ("layers.3.up", "matches only in layers.3, behind which no other block runs"),
    ],
)
def test_what_would_move_nothing_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(UserError, match=f"activation_checkpoint.offload = {pattern!r}: {message}".replace("*", r"\*")):
        plan_offload(["layers.0", pattern], toy(4), BLOCKS, {"layers.3"})
