"""A rehearsal holds what the graph holds once `rematerialize` and `bucket_collectives` have run."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from toy import blocks, toy, trace_toy

from torchtitan_graph.analysis.liveness import peak_memory
from torchtitan_graph.analysis.rehearse import Rehearsal
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.signature import Signature
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.parallel.storage import Precision, Reshard, plan_storage
from torchtitan_graph.passes.bucket_collectives import bucket_collectives
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.rematerialize import rematerialize
from torchtitan_graph.passes.shard_params import shard_params
from torchtitan_graph.passes.tag_recomputation import tag_recomputation
from torchtitan_graph.passes.tag_resharding import tag_resharding
from torchtitan_graph.torch_private.fake import FakeTensorMode


@pytest.mark.parametrize("recompute", [Recompute(), Recompute(every=1), Recompute(every=2), Recompute(by_op=True)])
@pytest.mark.parametrize("dp_shard", [1, 2])
def test_it_holds_what_the_graph_does(layout_of: Callable, recompute: Recompute, dp_shard: int) -> None:
    model = toy()
    gm = shard_params(cleanup(trace_toy(model)), plan_storage(model, layout_of(dp_shard=dp_shard), Precision()))
    gm = tag_recomputation(tag_resharding(gm, blocks(), Reshard()), blocks(), recompute)
    again = {node for node in gm.graph.nodes if meta.tag(node) == meta.RECOMPUTE}
    rehearsal, without = Rehearsal(gm), Rehearsal(gm).held(())
    assert without.peak == peak_memory(gm).num_bytes
    found = rehearsal.held(again)
    assert found.peak == peak_memory(rematerialize(gm)).num_bytes
    assert found.kept < without.kept or recompute == Recompute()  # weights are not what is kept


def test_gathered_weights_are_not_what_a_microbatch_keeps(layout_of: Callable) -> None:
    model = toy()
    gm = shard_params(cleanup(trace_toy(model)), plan_storage(model, layout_of(dp_shard=2), Precision()))
    gm = tag_resharding(gm, blocks(), Reshard(blocks=False, root=False))
    assert Rehearsal(gm).held(()).kept == Rehearsal(cleanup(trace_toy(toy()))).held(()).kept


@pytest.mark.parametrize("names", [["sort", "values"], ["values"], ["sort", "values", "indices"], []])
def test_it_knows_operators_with_several_results(names: list[str]) -> None:
    """Recomputed are the operator and what is picked of it; the picking alone; all of it; nothing."""

    def step(x: Tensor) -> tuple[Tensor]:
        values, indices = (x + 1).sort()
        dy = (values * indices).exp()  # backward begins
        return ((dy * values).sum() + indices.sum(),)

    with FakeTensorMode():
        gm = make_fx(step)(torch.empty(256))
    gm.meta["signature"] = Signature((), ())
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    named = dict(zip(("add", "sort", "values", "indices"), nodes, strict=False))
    for node in nodes:
        meta.write(node, phase="forward" if node in named.values() else "backward")
    for name in names:
        meta.write(named[name], tag=meta.RECOMPUTE)
    found = Rehearsal(gm).held({named[name] for name in names})
    assert found.peak == peak_memory(rematerialize(gm)).num_bytes


@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, {"dp_replicate": 2}])
def test_gradients_that_are_reduced_together_wait_for_the_last(layout_of: Callable, degrees: dict[str, int]) -> None:
    model = toy(8)
    gm = shard_params(cleanup(trace_toy(model)), plan_storage(model, layout_of(**degrees), Precision()))
    gm = tag_recomputation(gm, blocks(8), Recompute(every=1))
    together = [[name for name, _ in model.named_parameters()]]
    again = {node for node in gm.graph.nodes if meta.tag(node) == meta.RECOMPUTE}
    alone, found = Rehearsal(gm).held(again), Rehearsal(gm, together).held(again)
    assert found.peak > alone.peak
    holds = peak_memory(bucket_collectives(rematerialize(gm), together)).num_bytes
    assert found.peak == holds if "dp_replicate" in degrees else found.peak < holds  # gathers are packed as well
