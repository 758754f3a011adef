"""The one answer to which ranks see different data, and what is summed over which."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pool import run_on
from torchtitan_graph.parallel.layout import CP, DP_REPLICATE, DP_SHARD, EP, EXPERT_FSDP, FSDP, PP, TP, ParallelDims
from torchtitan_graph.torch_private.distributed import init_fake_process_group

HSDP_TP = ParallelDims(dp_replicate=2, dp_shard=1, tp=2)


def as_each(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Call it as each rank in turn, of a group in which nothing is sent."""
    found = []
    for rank in range(world_size):
        init_fake_process_group(world_size, rank)
        try:
            found.append(fn(*args))
        finally:
            dist.destroy_process_group()
    return found


HOW = pytest.mark.parametrize("run", [as_each, pytest.param(run_on, marks=pytest.mark.slow)])


def seen(dims: ParallelDims) -> dict:
    layout = dims.layout("cpu")
    return {
        "degrees": [layout.degree(axis) for axis in (DP_REPLICATE, DP_SHARD, TP, CP)],
        "ranks": [layout.rank(axis) for axis in (DP_REPLICATE, DP_SHARD, TP, CP)],
        "data": layout.data_rank,
        "sum": layout.sum_over_data(torch.tensor(10.0**layout.data_rank)).item(),
        "total": layout.total_loss([0.5, 0.5, 0.25, 0.25][: dims.num_ranks]),
    }


@pytest.mark.slow
def test_ranks_along_tensor_parallel_see_the_same_data() -> None:
    assert run_on(4, seen, HSDP_TP) == [
        {"degrees": [2, 1, 2, 1], "ranks": [r // 2, 0, r % 2, 0], "data": r // 2, "sum": 11.0, "total": 0.75}
        for r in range(4)
    ]


def test_two_ranks_of_an_axis_see_other_data_or_the_same() -> None:
    assert run_on(2, seen, ParallelDims(dp_replicate=2)) == [
        {"degrees": [2, 1, 1, 1], "ranks": [r, 0, 0, 0], "data": r, "sum": 11.0, "total": 1.0} for r in range(2)
    ]
    assert run_on(2, seen, ParallelDims(tp=2)) == [
        {"degrees": [1, 1, 2, 1], "ranks": [0, 0, r, 0], "data": 0, "sum": 1.0, "total": 0.5} for r in range(2)
    ]


def test_one_rank_is_the_first_of_every_axis() -> None:
    (found,) = run_on(1, seen, ParallelDims())
    assert found == {"degrees": [1] * 4, "ranks": [0] * 4, "data": 0, "sum": 1.0, "total": 0.5}


def all_axes(dims: ParallelDims) -> dict:
    layout = dims.layout("cpu")
    axes = [axis for axis in (PP, DP_REPLICATE, DP_SHARD, CP, TP, EP, FSDP, EXPERT_FSDP) if layout.degree(axis) > 1]
    groups = [axis for axis in axes if axis != DP_SHARD]
    return {
        "ranks": {axis: layout.rank(axis) for axis in axes},
        "groups": {axis: dist.get_process_group_ranks(layout.group(axis)) for axis in groups},
    }


@HOW
def test_context_is_inside_the_shards_and_experts_reuse_all_ranks(run: Callable) -> None:
    found = run(4, all_axes, ParallelDims(dp_shard=2, cp=2, ep=2))
    assert found[2] == {
        "ranks": {DP_SHARD: 1, CP: 0, EP: 0, FSDP: 2, EXPERT_FSDP: 1},
        "groups": {CP: [2, 3], EP: [2, 3], FSDP: [0, 1, 2, 3], EXPERT_FSDP: [0, 2]},
    }


def over_stages(dims: ParallelDims) -> dict[str, float]:
    layout = dims.layout("cpu")
    stage = layout.rank(PP)
    mine = {f"layers.{stage}": torch.tensor(float(stage)), "flops": torch.tensor(1.0 + stage)}
    return {name: x.item() for name, x in layout.of_all_stages(mine).items()}


def test_what_stages_have_is_put_together() -> None:
    assert run_on(2, over_stages, ParallelDims(pp=2)) == [{"layers.0": 0.0, "flops": 3.0, "layers.1": 1.0}] * 2


def links(dims: ParallelDims, num_near: int) -> dict:
    return {link.axis: (link.degree, link.near) for link in dims.layout("cpu").links(num_near).values()}


@HOW
def test_a_link_says_how_many_of_a_groups_ranks_share_a_machine(run: Callable) -> None:
    """On every rank the same, also on those in the middle of a machine."""
    assert run(4, links, ParallelDims(dp_shard=2, tp=2), 2) == [{FSDP: (2, 1), TP: (2, 2)}] * 4
    assert run(4, links, ParallelDims(dp_replicate=2, dp_shard=2), 3) == [{DP_REPLICATE: (2, 2), FSDP: (2, 2)}] * 4


@HOW
def test_stages_are_outermost_and_have_meshes_of_their_own(run: Callable) -> None:
    found = run(4, all_axes, ParallelDims(pp=2, tp=2, ep=2))
    assert found[3] == {"ranks": {PP: 1, TP: 1, EP: 1}, "groups": {PP: [1, 3], TP: [2, 3], EP: [2, 3]}}
