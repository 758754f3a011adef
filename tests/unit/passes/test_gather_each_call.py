"""gather_each_call: a block that forward calls twice has its weights gathered twice, and not kept in between."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from toy import GATHER, batch, blocks, calls, phase_of, text, toy

from torchtitan_graph.capture.own_step import OwnStep
from torchtitan_graph.capture.step import trace_train_step
from torchtitan_graph.graph import meta
from torchtitan_graph.parallel.storage import Precision, Reshard, buckets, plan_storage
from torchtitan_graph.passes.bucket_collectives import bucket_collectives
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.gather_each_call import gather_each_call
from torchtitan_graph.passes.rematerialize import rematerialize
from torchtitan_graph.passes.shard_params import shard_params
from torchtitan_graph.passes.tag_resharding import tag_resharding


def with_both(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch) * model(batch).sin()).sum()  # type: ignore[no-any-return]


def twice(model: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        before = model(batch)
    return (model(batch) * before).sum()  # type: ignore[no-any-return]


def sharded(layout_of: Callable, function: Any = twice) -> tuple[GraphModule, list[list[str]]]:
    model = toy()
    step = OwnStep("twice", function)
    gm = trace_train_step(model, step, batch(), None, torch.tensor(6.0), device="cpu").gm
    return shard_params(cleanup(gm), plan_storage(model, layout_of(dp_shard=2), Precision())), buckets(model, blocks())


def gathers(gm: GraphModule, phase: str) -> list[str]:
    return [str(meta.param(n)) for n in filter(phase_of(phase), calls(gm, GATHER))]


@pytest.mark.parametrize(("function", "in_backward"), [(twice, 2), (with_both, 4)])
def test_each_call_gathers_the_blocks_weights(layout_of: Callable, function: Any, in_backward: int) -> None:
    gm, groups = sharded(layout_of, function)
    once = gathers(gm, "forward")
    gm = gather_each_call(gm, blocks(), Reshard())
    gm.graph.lint()
    found = gathers(gm, "forward")
    of_blocks = [name for name in once if name.startswith("layers.")]
    assert sorted(found) == sorted([*once, *of_blocks])
    gm = bucket_collectives(rematerialize(tag_resharding(gm, blocks(), Reshard())), groups)
    gm.graph.lint()
    assert len(gathers(gm, "forward")) == 5  # two calls of two blocks, and what is outside of them once
    assert len(gathers(gm, "backward")) == in_backward  # of calls with gradients


def test_weights_that_stay_gathered_are_gathered_once(layout_of: Callable) -> None:
    gm, _ = sharded(layout_of)
    before = text(gm)
    assert text(gather_each_call(gm, blocks(), Reshard(blocks=False))) == before


def test_a_step_that_calls_each_block_once_stays_as_it_is(layout_of: Callable) -> None:
    gm, _ = sharded(layout_of, lambda model, batch: model(batch).sum())
    before = text(gm)
    assert text(gather_each_call(gm, blocks(), Reshard())) == before
