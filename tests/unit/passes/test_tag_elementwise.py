"""tag_elementwise: elementwise results that backward can make of what it has anyway are computed again."""

from collections.abc import Callable

import torch
from torch.fx import GraphModule
from toy import aten, bitwise, blocks, calls, run_toy, text, toy, trace_toy

from torchtitan_graph.analysis import keeping
from torchtitan_graph.analysis.flops import count_flops
from torchtitan_graph.analysis.liveness import peak_memory
from torchtitan_graph.graph import meta
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.parallel.storage import Precision, plan_storage
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.rematerialize import rematerialize
from torchtitan_graph.passes.shard_params import shard_params
from torchtitan_graph.passes.tag_elementwise import tag_elementwise
from torchtitan_graph.passes.tag_recomputation import tag_recomputation

NONE, FULL, BY_OP = Recompute(), Recompute(every=1), Recompute(by_op=True)


def free_to_start(monkeypatch) -> None:
    """The toy's tensors are smaller than what it costs to start an operator."""
    monkeypatch.setattr(keeping, "START", 0)


def tagged(recompute: Recompute = NONE) -> GraphModule:
    return tag_elementwise(tag_recomputation(cleanup(trace_toy(toy())), blocks(), recompute), blocks())


def recomputed(gm: GraphModule) -> set[str]:
    return {str(n.target) for n in gm.graph.nodes if meta.tag(n) == meta.RECOMPUTE and "layers.0" in meta.module(n)}


def test_it_only_writes_tags(monkeypatch) -> None:
    free_to_start(monkeypatch)
    assert text(tagged()) == text(cleanup(trace_toy(toy())))


def test_of_a_block_the_elementwise_is_computed_again_and_products_and_sums_are_kept(monkeypatch) -> None:
    free_to_start(monkeypatch)
    assert recomputed(tagged()) >= {"aten.silu.default", "aten.mul.Tensor"}
    assert not recomputed(tagged()) & {"aten.mm.default", "aten.mean.dim"}


def test_what_is_small_is_kept() -> None:
    assert recomputed(tagged()) == set()


def test_a_step_keeps_its_numbers_and_its_products_and_holds_less(monkeypatch) -> None:
    free_to_start(monkeypatch)
    gm = tagged()
    expected, peak, flops = run_toy(gm), peak_memory(gm).num_bytes, count_flops(gm, blocks())
    gm = rematerialize(gm)
    gm.graph.lint()
    assert bitwise(run_toy(gm), expected)
    assert count_flops(gm, blocks()) == flops
    assert peak_memory(gm).num_bytes < peak


def test_what_the_user_asked_for_stays(monkeypatch) -> None:
    free_to_start(monkeypatch)
    for recompute in (FULL, BY_OP):
        before = tag_recomputation(cleanup(trace_toy(toy())), blocks(), recompute)
        chosen = [(n.name, meta.tag(n)) for n in before.graph.nodes if meta.tag(n)]
        tag_elementwise(before, blocks())
        after = {n.name: meta.tag(n) for n in before.graph.nodes}
        assert chosen and all(after[name] == tag for name, tag in chosen)


def test_every_second_block_whole_leaves_the_others_to_the_cut(monkeypatch) -> None:
    free_to_start(monkeypatch)
    gm = tagged(Recompute(every=2))
    again = [meta.module(n) for n in calls(gm, aten.mm.default) if meta.tag(n) == meta.RECOMPUTE]
    assert again and all(name.startswith("layers.1") for name in again)
    assert "aten.silu.default" in recomputed(gm)


def test_alike_blocks_are_tagged_alike(monkeypatch) -> None:
    free_to_start(monkeypatch)
    gm = tagged()
    first, second = (
        [meta.tag(n) == meta.RECOMPUTE for n in gm.graph.nodes if meta.module(n).startswith(f"layers.{i}.feed")]
        for i in range(2)
    )
    assert first == second


def test_nothing_is_gathered_or_waited_for_again(layout_of: Callable, monkeypatch) -> None:
    free_to_start(monkeypatch)
    model = toy()
    gm = shard_params(cleanup(trace_toy(model)), plan_storage(model, layout_of(dp_shard=2), Precision()))
    tag_elementwise(gm, blocks())
    tags = [n for n in gm.graph.nodes if meta.tag(n) == meta.RECOMPUTE]
    assert tags and not [n for n in tags if meta.role(n) or "c10d" in str(n.target)]
    assert all(isinstance(n.meta["val"], torch.Tensor) for n in tags)
