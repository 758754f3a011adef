"""The one answer to which ranks see different data, and what is summed over which."""

import torch

from pool import run_on
from torchtitan_graph.parallel.layout import CP, DP_REPLICATE, DP_SHARD, TP, ParallelDims

HSDP_TP = ParallelDims(dp_replicate=2, dp_shard=1, tp=2)


def seen(dims: ParallelDims) -> dict:
    layout = dims.layout("cpu")
    return {
        "degrees": [layout.degree(axis) for axis in (DP_REPLICATE, DP_SHARD, TP, CP)],
        "ranks": [layout.rank(axis) for axis in (DP_REPLICATE, DP_SHARD, TP, CP)],
        "data": layout.data_rank,
        "sum": layout.sum_over_data(torch.tensor(10.0**layout.data_rank)).item(),
        "total": layout.total_loss([0.5, 0.5, 0.25, 0.25]),
    }


def test_ranks_along_tensor_parallel_see_the_same_data() -> None:
    assert run_on(4, seen, HSDP_TP) == [
        {"degrees": [2, 1, 2, 1], "ranks": [r // 2, 0, r % 2, 0], "data": r // 2, "sum": 11.0, "total": 0.75}
        for r in range(4)
    ]


def test_one_rank_is_the_first_of_every_axis() -> None:
    (found,) = run_on(1, seen, ParallelDims())
    assert found == {"degrees": [1] * 4, "ranks": [0] * 4, "data": 0, "sum": 1.0, "total": 1.5}
