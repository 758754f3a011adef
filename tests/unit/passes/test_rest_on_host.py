"""rest_on_host, overlap_copies: parameters come from the host's memory, gradients go there; bitwise."""

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node
from toy import GATHER, bitwise, blocks, calls, place, run_toy, toy, trace_toy

from torchtitan_graph.analysis.liveness import host_memory, peak_memory
from torchtitan_graph.compiler import PassPlan, passes
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.graph.edit import infer, value
from torchtitan_graph.graph.signature import input_nodes, output_nodes
from torchtitan_graph.parallel.layout import Layout
from torchtitan_graph.parallel.storage import Precision, Reshard, buckets, plan_storage

OPS = torch.ops.torchtitan_graph
OFFLOAD, RELOAD, ARRIVED, LANDED = (getattr(OPS, name).default for name in ("offload", "reload", "arrived", "landed"))
BLOCKS = blocks(4)
MIXED = Precision(compute=torch.bfloat16)


def final(
    layout: Layout,
    precision: Precision = MIXED,
    on_host: bool = True,
    upto: str = "",
    edit: Callable[[GraphModule], None] = lambda gm: None,
) -> GraphModule:
    """Run all passes on a toy, or those up to one; `edit` changes what they begin with."""
    model = toy(4)
    gm = trace_toy(model, precision.compute)
    edit(gm)
    storages = plan_storage(model, layout, precision, on_host)
    for each in passes(PassPlan(storages, BLOCKS, buckets(model, BLOCKS), reshard=Reshard())):
        gm = each.run(gm)
        gm.graph.lint()
        if each.name == upto:
            break
    return gm


def on_gpu(gm: GraphModule) -> None:
    """Let every value of a graph lie on a GPU: fake ones need none."""
    fake_mode = value(next(iter(gm.graph.nodes))).fake_mode
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            x = value(node)
            with fake_mode:
                node.meta["val"] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
        elif node.op == "call_function":
            node.kwargs = {k: "cuda" if k == "device" else x for k, x in node.kwargs.items()}
            if node.all_input_nodes:
                infer(node)
                continue
            with fake_mode:
                node.meta["val"] = node.target(*node.args, **node.kwargs)


@pytest.mark.parametrize("dp_shard", [1, 2])
def test_parameters_and_gradients_are_on_the_host_and_all_else_on_the_device(
    layout_of: Callable, dp_shard: int
) -> None:
    gm = final(layout_of(dp_shard=dp_shard), edit=on_gpu)
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.all_input_nodes:
            infer(node)  # fails if an operator's tensors lie in different places
    parameters, gradients = input_nodes(gm, "param"), output_nodes(gm, "grad")
    assert {value(node).device.type for node in (*parameters.values(), *gradients.values())} == {"cpu"}
    (loss,) = output_nodes(gm, "loss").values()
    assert value(loss).device.type == "cuda"
    assert not [n for p in parameters.values() for n in p.users if n.target not in (RELOAD, ARRIVED)]
    assert all(node.target is LANDED or "landed" in _origin(node) for node in gradients.values())


def _origin(node: Node) -> str:
    while node.target is not LANDED:
        node = node.all_input_nodes[0]
    return node.name


@pytest.mark.parametrize("upto", ["rest_on_host", ""])
def test_bits(layout_of: Callable, upto: str) -> None:
    layout = layout_of(dp_shard=1)
    expected = run_toy(final(layout, Precision(), on_host=False, upto=upto))
    gm = final(layout, Precision(), upto=upto)
    assert calls(gm, RELOAD) and bitwise(run_toy(gm), expected)
    first, second = (
        node
        for node in calls(gm, RELOAD)
        if meta.param(node) in ("layers.0.norm.weight", "layers.1.norm.weight") and meta.phase(node) == "forward"
    )
    first.args, second.args = second.args, first.args
    gm.recompile()
    assert not bitwise(run_toy(gm), expected), "a copy of another parameter is seen"


def test_the_device_holds_fewer_shards_than_there_are(layout_of: Callable) -> None:
    layout = layout_of(dp_shard=2)
    stay, away = (final(layout, on_host=on_host) for on_host in (False, True))
    shards = sum(value(node).nbytes for node in input_nodes(stay, "param").values())
    assert peak_memory(away).num_bytes < peak_memory(stay).num_bytes + shards
    assert host_memory(away) == 0, "no activation is there"


@pytest.mark.parametrize("dp_shard", [1, 2])
def test_what_comes_starts_a_bucket_ahead(layout_of: Callable, dp_shard: int) -> None:
    gm = final(layout_of(dp_shard=dp_shard))
    order = place(gm)
    arrived = [node for node in calls(gm, ARRIVED) if meta.role(node) == meta.GATHER]
    for phase, names in (("forward", BLOCKS), ("backward", BLOCKS[::-1])):
        first = {}
        for node in arrived:
            if meta.phase(node) == phase and (block := block_of(meta.param(node) or "", BLOCKS)):
                first.setdefault(block, node)
        assert list(first) == names
        for before, block in zip(names, names[1:], strict=False):
            starts = [
                n
                for n in calls(gm, RELOAD)
                if meta.phase(n) == phase and block_of(meta.param(n) or "", BLOCKS) == block
            ]
            assert starts and all(order[start] < order[first[before]] for start in starts)
            if names.index(before):
                earlier = first[names[names.index(before) - 1]]
                assert all(order[start] > order[earlier] for start in starts), "not more than a bucket ahead"


@pytest.mark.parametrize("dp_shard", [1, 2])
def test_what_leaves_has_the_next_buckets_time_and_the_host_waits_at_the_end(
    layout_of: Callable, dp_shard: int
) -> None:
    gm = final(layout_of(dp_shard=dp_shard))
    order = place(gm)
    copies: dict[str, list[Node]] = {}
    for copy in calls(gm, OFFLOAD):
        copies.setdefault(block_of(meta.param(copy) or "", BLOCKS) or "", []).append(copy)
    assert len(copies["layers.0"]) == (3 if dp_shard == 1 else 1), "a copy for each bucket"
    for block, before in zip(BLOCKS, BLOCKS[1:], strict=False):
        last = max(map(order.__getitem__, copies[block]))
        for copy in copies[before]:
            (there,) = copy.users
            assert order[copy] < order[there] < last and last - order[there] <= len(copies[before])
    begin = min(order[node] for node in calls(gm, LANDED))
    assert all(order[node] < begin for node in calls(gm, OFFLOAD, ARRIVED, GATHER))


def test_what_backward_begins_with_starts_as_early_as_the_peak_allows(layout_of: Callable) -> None:
    """The toy's peak is in backward's reductions: there is room before it."""
    gm = final(layout_of(dp_shard=2))
    order = place(gm)
    starts = [
        n
        for n in calls(gm, RELOAD)
        if meta.phase(n) == "backward" and block_of(meta.param(n) or "", BLOCKS) == BLOCKS[-1]
    ]
    backward = min(
        order[n]
        for n in calls(gm, *{n.target for n in gm.graph.nodes if n.op == "call_function"})
        if meta.phase(n) == "backward" and n.target is not RELOAD
    )
    assert starts and all(order[start] < backward for start in starts)


def test_what_rests_on_the_device_is_left_as_it_is(layout_of: Callable) -> None:
    assert not calls(final(layout_of(dp_shard=2), on_host=False), OFFLOAD, RELOAD, ARRIVED, LANDED)
