"""tag_resharding: it writes tags on gathers and their views, and nothing else."""

from collections.abc import Callable

import pytest
import torch
from toy import GATHER, WAIT, aten, blocks, calls, text, toy, trace_toy

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import is_view
from torchtitan_graph.parallel.storage import Precision, Reshard, plan_storage
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.shard_params import shard_params
from torchtitan_graph.passes.tag_resharding import tag_resharding


@pytest.mark.parametrize("reshard", [True, False])
def test_gathers_of_blocks_weights_are_tagged_with_their_views(layout_of: Callable, reshard: bool) -> None:
    model = toy()
    gm = shard_params(cleanup(trace_toy(model)), plan_storage(model, layout_of(dp_shard=2), Precision()))
    tag_resharding(gm, blocks(), Reshard(blocks=reshard))
    gathers = [n for n in calls(gm, GATHER, WAIT) if meta.role(n) == meta.GATHER]
    views = [n for n in calls(gm, aten.t.default) if meta.phase(n) == "forward"]
    assert gathers and views and all(is_view(n) for n in views)
    for node in (*gathers, *views):
        of_a_block = (meta.param(node) or meta.module(node)).startswith("layers.")
        assert meta.tag(node) == (meta.RECOMPUTE if reshard and of_a_block else None)


def test_weights_outside_the_blocks_stay_gathered(layout_of: Callable) -> None:
    model = toy()
    gm = shard_params(cleanup(trace_toy(model)), plan_storage(model, layout_of(dp_shard=2), Precision()))
    tag_resharding(gm, blocks(), Reshard())
    outside = [n for n in calls(gm, GATHER) if not str(meta.param(n)).startswith("layers.")]
    assert [meta.param(n) for n in outside] == ["tok_embeddings.weight", "output.weight"]
    assert all(meta.tag(n) is None for n in outside)
    assert isinstance(outside[0].meta["val"], torch.Tensor)


def test_the_root_is_resharded_too_where_asked_and_the_graph_stays_as_it_is(layout_of: Callable) -> None:
    model = toy()
    gm = shard_params(cleanup(trace_toy(model)), plan_storage(model, layout_of(dp_shard=2), Precision()))
    before = text(gm)
    tag_resharding(gm, blocks(), Reshard(root=True))
    assert {meta.tag(n) for n in calls(gm, GATHER)} == {meta.RECOMPUTE}
    assert text(gm) == before
