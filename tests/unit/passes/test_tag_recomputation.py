"""tag_recomputation: it writes tags and nothing else."""

from collections.abc import Callable

import pytest
from torch.fx import GraphModule
from toy import GATHER, WAIT, aten, blocks, calls, text, toy, trace_toy

from torchtitan_graph.graph import meta
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.parallel.storage import Precision, plan_storage
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.shard_params import shard_params
from torchtitan_graph.passes.tag_recomputation import tag_recomputation

FULL, EVERY_SECOND, BY_OP, NONE = Recompute(every=1), Recompute(every=2), Recompute(by_op=True), Recompute()


def tagged(recompute: Recompute, num_layers: int = 2) -> GraphModule:
    return tag_recomputation(cleanup(trace_toy(toy(num_layers))), blocks(num_layers), recompute)


def tags(gm: GraphModule, block: int) -> set[str | None]:
    prefix = f"layers.{block}"
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and meta.phase(n) == "forward"]
    return {meta.tag(n) for n in nodes if (meta.module(n) + ".").startswith(prefix + ".")}


def test_the_graph_itself_stays_as_it_is() -> None:
    gm = cleanup(trace_toy(toy()))
    before = text(gm)
    assert text(tag_recomputation(gm, blocks(), FULL)) == before


def test_none_recomputes_nothing() -> None:
    assert meta.RECOMPUTE not in {meta.tag(node) for node in tagged(NONE).graph.nodes}


def test_full_recomputes_each_block_but_its_result() -> None:
    gm = tagged(FULL)
    assert tags(gm, 0) == tags(gm, 1) == {meta.RECOMPUTE, meta.SAVE}
    saved = [n for n in gm.graph.nodes if meta.tag(n) == meta.SAVE]
    assert [meta.module(n) for n in saved] == ["layers.0", "layers.1"]
    assert {n.target for n in saved} == {aten.add.Tensor}


def test_every_second_block_is_recomputed_whole() -> None:
    gm = tagged(EVERY_SECOND, num_layers=4)
    assert [meta.RECOMPUTE in tags(gm, block) for block in range(4)] == [False, True, False, True]


def test_by_operator_every_second_product_is_kept() -> None:
    gm = tagged(BY_OP)
    products = [n for n in calls(gm, aten.mm.default) if meta.phase(n) == "forward" and "layers" in meta.module(n)]
    assert [meta.tag(n) for n in products] == 2 * [meta.SAVE, meta.RECOMPUTE]
    assert {meta.tag(n) for n in calls(gm, aten.silu.default)} == {meta.RECOMPUTE}


@pytest.mark.parametrize("recompute", [FULL, BY_OP])
def test_nothing_outside_the_blocks_and_nothing_of_backward_is_tagged(recompute: Recompute) -> None:
    gm = tagged(recompute)
    for node in gm.graph.nodes:
        if meta.phase(node) == "backward" or not meta.module(node).startswith("layers."):
            assert meta.tag(node) is None


def test_gathered_weights_are_no_activations(layout_of: Callable) -> None:
    model = toy()
    gm = shard_params(cleanup(trace_toy(model)), plan_storage(model, layout_of(dp_shard=2), Precision()))
    tag_recomputation(gm, blocks(), FULL)
    gathers = [n for n in calls(gm, GATHER, WAIT) if meta.role(n) == meta.GATHER]
    views = [n for n in calls(gm, aten.t.default) if meta.phase(n) == "forward"]
    assert gathers and views
    assert {meta.tag(n) for n in (*gathers, *views)} == {None}
