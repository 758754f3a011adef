"""shard_params: a parameter arrives as this rank's shard and is gathered, a gradient leaves as a shard."""

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node
from toy import ALL_REDUCE, COLLECTIVES, GATHER, REDUCE_SCATTER, WAIT, D, F, V, aten, calls, text, toy, trace_toy

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.signature import input_nodes, output_nodes, signature_of
from torchtitan_graph.parallel.storage import Precision, Storage, plan_storage
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.passes.shard_params import shard_params


def sharded(layout_of: Callable, tied: bool = False, **degrees: int) -> tuple[GraphModule, dict[str, Storage]]:
    model = toy(tied=tied)
    gm = cleanup(trace_toy(model))
    storages = plan_storage(model, layout_of(**degrees), Precision())
    gm = shard_params(gm, storages)
    gm.graph.lint()
    return gm, storages


def chain_to(node: Node, *targets: object) -> list[Node]:
    """Follow first arguments back through these targets, last first; what remains is where they start."""
    found = [node]
    for target in targets:
        assert found[-1].target is target, found[-1].format_node()
        found.append(found[-1].args[0])  # type: ignore[arg-type]
    return found


def test_one_rank_changes_nothing_but_the_signature(layout_of: Callable) -> None:
    model = toy()
    gm = cleanup(trace_toy(model))
    before = text(gm)
    storages = plan_storage(model, layout_of(dp_shard=1), Precision())
    gm = shard_params(gm, storages)
    assert text(gm) == before
    assert all(s.layout is storages[s.name] for s in signature_of(gm).inputs if s.kind == "param")


def test_a_parameter_is_gathered_from_shards_and_padding_is_cut_off(layout_of: Callable) -> None:
    gm, storages = sharded(layout_of, dp_shard=4)
    rows = {"layers.0.up.weight": (F, 2), "layers.0.down.weight": (D, 2), "output.weight": (V, 3)}
    for name, (full, local) in rows.items():
        placeholder = input_nodes(gm, "param")[name]
        assert placeholder.meta["val"].shape[0] == local
        (start,) = placeholder.users
        (wait,) = start.users
        (cut,) = wait.users
        assert (start.target, start.args[1:]) == (GATHER, (4, storages[name].shard_group.group_name))
        assert (wait.target, wait.meta["val"].shape[0]) == (WAIT, 4 * local)
        assert (cut.target, cut.args[1:], cut.meta["val"].shape[0]) == (aten.slice.Tensor, (0, 0, full), full)
        assert [(meta.role(n), meta.param(n), meta.phase(n)) for n in (start, wait, cut)] == 3 * [
            (meta.GATHER, name, "forward")
        ]


def test_rows_that_divide_are_not_cut(layout_of: Callable) -> None:
    gm, _ = sharded(layout_of, dp_shard=2)
    (start,) = input_nodes(gm, "param")["layers.0.down.weight"].users
    (wait,) = start.users
    assert aten.slice.Tensor not in {user.target for user in wait.users}


def test_a_gather_stands_before_its_first_use(layout_of: Callable) -> None:
    gm, _ = sharded(layout_of, dp_shard=2)
    for start in calls(gm, GATHER):
        (wait,) = start.users
        nodes = list(gm.graph.nodes)
        assert nodes.index(wait) == nodes.index(start) + 1
        assert nodes[nodes.index(wait) + 1] in wait.users


def test_a_gradient_is_padded_and_reduced_to_its_shard(layout_of: Callable) -> None:
    gm, storages = sharded(layout_of, dp_shard=4)
    wait = output_nodes(gm, "grad")["layers.0.up.weight"]
    _, start, pad, gradient = chain_to(wait, WAIT, REDUCE_SCATTER, aten.constant_pad_nd.default)
    assert start.args[1:] == ("sum", 4, storages["layers.0.up.weight"].shard_group.group_name)
    assert [n.meta["val"].shape[0] for n in (wait, pad, gradient)] == [2, 8, F]
    assert {meta.role(n) for n in (wait, start, pad)} == {meta.REDUCE}
    assert meta.role(gradient) is None


def test_copies_of_the_storage_are_summed_after_the_shards(layout_of: Callable) -> None:
    gm, storages = sharded(layout_of, dp_shard=2, dp_replicate=2)
    name = "layers.0.down.weight"
    _, all_reduce, _, scatter, _ = chain_to(output_nodes(gm, "grad")[name], WAIT, ALL_REDUCE, WAIT, REDUCE_SCATTER)
    assert all_reduce.args[1:] == ("sum", storages[name].replicate_group.group_name)
    assert scatter.args[1:] == ("sum", 2, storages[name].shard_group.group_name)
    assert storages[name].replicate_group.group_name != storages[name].shard_group.group_name


def test_copies_alone_are_summed_and_nothing_is_gathered(layout_of: Callable) -> None:
    gm, _ = sharded(layout_of, dp_replicate=4)
    assert {node.target for node in calls(gm, *COLLECTIVES)} == {ALL_REDUCE}
    assert len(calls(gm, ALL_REDUCE)) == len(output_nodes(gm, "grad"))


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_gathered_once_and_every_gradient_reduced_once(layout_of: Callable, tied: bool) -> None:
    gm, storages = sharded(layout_of, tied=tied, dp_shard=2)
    assert ("output.weight" in storages) is not tied
    for target in (GATHER, REDUCE_SCATTER):
        assert sorted(str(meta.param(node)) for node in calls(gm, target)) == sorted(storages)


def test_the_signature_says_how_the_state_lies(layout_of: Callable) -> None:
    gm, storages = sharded(layout_of, dp_shard=4)
    signature = signature_of(gm)
    for slot in (*signature.inputs, *signature.outputs):
        if slot.kind in ("param", "grad"):
            assert slot.layout is storages[slot.name]
    values = zip(gm.graph.find_nodes(op="placeholder"), signature.inputs, strict=True)
    assert all(node.meta["val"].shape == storages[s.name].padded_shape for node, s in values if s.kind == "param")
    gradients = output_nodes(gm, "grad")
    assert all(gradients[name].meta["val"].shape == storages[name].padded_shape for name in storages)


def test_a_rank_without_rows_runs_the_same_graph(layout_of: Callable) -> None:
    gm, storages = sharded(layout_of, dp_shard=64)
    assert storages["output.weight"].padded_shape == torch.Size([1, D])
    assert all(node.meta["val"].shape[0] == 1 for node in input_nodes(gm, "param").values())
