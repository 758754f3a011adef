"""Histograms of sharded tensors are those of the whole."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from pool import mesh, run_on
from torchtitan_graph.metrics.histograms import NUM_BINS, Histogram, histograms


def whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "uneven": torch.randn(7, 5, generator=generator),
        "one row": torch.randn(1, 9, generator=generator),  # nothing for the second rank
        "constant": torch.full((4, 2), 3.0),
        "bf16": torch.randn(6, generator=generator).bfloat16(),
    }


def of_shards(placement: str) -> dict[str, Histogram]:
    placements = {"shard": Shard(0), "replicate": Replicate()}
    over = mesh((2,), ("dp_shard",))
    laid_out = {name: distribute_tensor(x, over, [placements[placement]]) for name, x in whole().items()}
    return histograms(laid_out, torch.device("cpu"))


@pytest.mark.parametrize("placement", ["shard", "replicate"])
def test_a_histogram_is_that_of_the_whole_tensor(placement: str) -> None:
    first, second = run_on(2, of_shards, placement)
    assert first == second
    for name, x in whole().items():
        found, x = first[name], x.double()
        assert (found.low, found.high, found.num) == (x.min(), x.max(), x.numel()), name
        assert found.sum == pytest.approx(x.sum().item(), rel=1e-12), name
        assert found.sum_of_squares == pytest.approx(x.square().sum().item(), rel=1e-12), name
        if name != "constant":
            assert found.counts == torch.histc(x, NUM_BINS).tolist(), name
            assert found.limits[-1] == pytest.approx(x.max().item(), rel=1e-12)
        assert sum(found.counts) == x.numel(), name


def of_own_tensors() -> dict[str, Histogram]:
    mine = {"both": torch.arange(4.0)} | {f"of rank {dist.get_rank()}": torch.arange(3.0)}
    return histograms(mine, torch.device("cpu"))


def test_a_pipelines_ranks_have_tensors_of_their_own() -> None:
    first, second = run_on(2, of_own_tensors)
    assert first == second
    assert {name: (h.num, h.sum) for name, h in first.items()} == {
        "both": (4, 6.0), "of rank 0": (3, 3.0), "of rank 1": (3, 3.0)
    }  # fmt: skip


def of_not_finite() -> dict[str, Histogram]:
    values = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf, 2.0])
    return histograms({"some": values, "none": values[1:4]}, torch.device("cpu"))


def test_values_that_are_not_finite_are_left_out() -> None:
    found, _ = run_on(2, of_not_finite)  # both ranks hold all of them
    assert list(found) == ["some"]
    assert (found["some"].low, found["some"].high, sum(found["some"].counts)) == (1.0, 2.0, 2)
