"""bucket_collectives: a block's parameters, and its gradients, travel in one collective each, packed as FSDP2 does."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch.fx import GraphModule, Node
from toy import ALL_REDUCE, GATHER, REDUCE_SCATTER, aten, blocks, calls, phase_of, text, toy, trace_toy

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.signature import input_nodes, output_nodes
from torchtitan_graph.parallel.storage import Precision, Reshard, buckets, plan_storage
from torchtitan_graph.passes.bucket_collectives import bucket_collectives
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.mixed_precision import mixed_precision
from torchtitan_graph.passes.rematerialize import rematerialize
from torchtitan_graph.passes.shard_params import shard_params
from torchtitan_graph.passes.tag_resharding import tag_resharding

MIXED = Precision(torch.float32, torch.bfloat16, torch.float32)


def before_buckets(
    layout_of: Callable, precision: Precision = MIXED, reshard: bool = True, **degrees: int
) -> tuple[GraphModule, list[list[str]]]:
    model = toy()
    gm = cleanup(trace_toy(model, precision.compute))
    storages = plan_storage(model, layout_of(**degrees), precision)
    gm = mixed_precision(shard_params(gm, storages), storages)
    gm = rematerialize(tag_resharding(gm, blocks(), Reshard(blocks=reshard)))
    return gm, buckets(model, blocks())


def bucketed(layout_of: Callable, **options: object) -> tuple[GraphModule, list[list[str]]]:
    gm, groups = before_buckets(layout_of, **options)  # type: ignore[arg-type]
    gm = bucket_collectives(gm, groups)
    gm.graph.lint()
    return gm, groups


def origin(node: Node) -> Node:
    """Follow first arguments back to a placeholder."""
    while node.op != "placeholder":
        node = node.args[0]  # type: ignore[assignment]
    return node


def packed(gm: GraphModule, start: Node) -> list[str]:
    """Name the parameters in a gather's buffer, in order."""
    names = {node: name for name, node in input_nodes(gm, "param").items()}
    cat = start.args[0]
    return [names[origin(node)] for node in cat.args[0]]  # type: ignore[union-attr]


def test_the_groups_are_those_of_fsdp2() -> None:
    layers = [[f"layers.{i}.{name}.weight" for name in ("norm", "up", "down")] for i in range(2)]
    assert buckets(toy(), blocks()) == [*layers, ["tok_embeddings.weight", "output.weight"]]


def test_each_group_is_gathered_once_and_once_more_for_backward_where_it_was_resharded(layout_of: Callable) -> None:
    gm, (first, second, root) = bucketed(layout_of, dp_shard=4)
    gathers = calls(gm, GATHER)
    assert [packed(gm, n) for n in filter(phase_of("forward"), gathers)] == [root, first, second]
    again = [packed(gm, n) for n in filter(phase_of("backward"), gathers)]
    assert again == [second, first], "backward reads every weight of a block"


def test_without_resharding_nothing_is_gathered_again(layout_of: Callable) -> None:
    gm, _ = bucketed(layout_of, dp_shard=4, reshard=False)
    assert {meta.phase(n) for n in calls(gm, GATHER)} == {"forward"}


def test_a_gathered_parameter_is_taken_out_of_the_buffer_as_it_was(layout_of: Callable) -> None:
    gm, _ = before_buckets(layout_of, dp_shard=4)
    shapes = {str(n.meta["val"].shape) for n in calls(gm, aten.mm.default)}
    arguments = [[a.meta["val"].shape for a in n.all_input_nodes] for n in calls(gm, aten.mm.default)]
    gm = bucket_collectives(gm, buckets(toy(), blocks()))
    assert {str(n.meta["val"].shape) for n in calls(gm, aten.mm.default)} == shapes
    assert [[a.meta["val"].shape for a in n.all_input_nodes] for n in calls(gm, aten.mm.default)] == arguments


def test_each_groups_gradients_are_reduced_once_in_the_groups_order(layout_of: Callable) -> None:
    gm, (first, second, root) = bucketed(layout_of, dp_shard=4)
    starts = calls(gm, REDUCE_SCATTER)
    assert len(starts) == 3
    assert [meta.param(n) for n in starts] == [second[0], first[0], root[0]]
    outputs = output_nodes(gm, "grad")
    for group in (first, second, root):
        parts = [outputs[name].args[0] for name in group]
        assert len({p.args[0] for p in parts}) == 1  # type: ignore[union-attr]
        assert [p.args[1] for p in parts] == list(range(len(group)))  # type: ignore[union-attr]


def test_the_shapes_of_gradients_stay(layout_of: Callable) -> None:
    gm, groups = before_buckets(layout_of, dp_shard=4)
    before = {name: (n.meta["val"].shape, n.meta["val"].dtype) for name, n in output_nodes(gm, "grad").items()}
    gm = bucket_collectives(gm, groups)
    assert {name: (n.meta["val"].shape, n.meta["val"].dtype) for name, n in output_nodes(gm, "grad").items()} == before


def test_a_reduction_starts_as_soon_as_its_last_gradient_is_there(layout_of: Callable) -> None:
    gm, _ = bucketed(layout_of, dp_shard=4)
    nodes = list(gm.graph.nodes)
    for start in calls(gm, REDUCE_SCATTER):
        pack = next(n for n in reversed(nodes[: nodes.index(start)]) if n.target is aten._chunk_cat.default)
        between = nodes[nodes.index(pack) : nodes.index(start)]
        assert all(meta.role(n) == meta.REDUCE for n in between)
        last = nodes[nodes.index(pack) - 1]
        while meta.role(last) == meta.REDUCE:
            last = last.prev
        assert last in pack.args[0] or any(last is n.args[0] for n in pack.args[0])  # type: ignore[operator, union-attr]


def test_copies_are_summed_in_groups_too(layout_of: Callable) -> None:
    gm, groups = bucketed(layout_of, dp_replicate=2, dp_shard=2)
    assert len(calls(gm, REDUCE_SCATTER)) == len(calls(gm, ALL_REDUCE)) == len(groups)


def test_without_a_collective_nothing_changes(layout_of: Callable) -> None:
    gm, groups = before_buckets(layout_of, dp_shard=1)
    before = text(gm)
    assert text(bucket_collectives(gm, groups)) == before


def test_a_group_of_one_is_left_as_it_is(layout_of: Callable) -> None:
    gm, groups = before_buckets(layout_of, dp_shard=4)
    before = text(gm)
    assert text(bucket_collectives(gm, [[name] for group in groups for name in group])) == before


@pytest.mark.parametrize("widened", [[], ["layers.0.norm.weight"]])
def test_gradients_of_two_dtypes_share_a_reduction(layout_of: Callable, widened: Sequence[str]) -> None:
    """FSDP2 from torch 2.15 on leaves a norm's gradient in fp32 beside bf16 ones; they are reduced together."""
    gm, groups = before_buckets(layout_of, dp_shard=4)
    for name in widened:
        chain = [output_nodes(gm, "grad")[name]]
        while meta.role(chain[-1]) == meta.REDUCE:
            chain.append(chain[-1].args[0])  # type: ignore[arg-type]
        gradient = chain[-1]
        if gradient.meta["val"].dtype == torch.bfloat16:
            cast = chain[-2]
            assert cast.target is aten._to_copy.default
            meta.write(cast, role=None, param=None)
    gm = bucket_collectives(gm, groups)
    gm.graph.lint()
    starts = calls(gm, REDUCE_SCATTER)
    assert len(starts) == len(groups)
    assert {n.meta["val"].dtype for n in starts} == {torch.float32}
    for pack in calls(gm, aten._chunk_cat.default):
        assert len({n.meta["val"].dtype for n in pack.args[0]}) == 1  # type: ignore[union-attr]
