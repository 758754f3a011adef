"""Histograms of sharded tensors: exact, and the same on every rank."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_graph.parallel.chunk import chunk_of

NUM_BINS = 64


class Histogram(NamedTuple):
    """The finite values of one tensor: `counts[i]` of them are at most `limits[i]`, and above the limit before."""

    low: float
    high: float
    num: int
    sum: float
    sum_of_squares: float
    limits: list[float]
    counts: list[int]


@torch.no_grad()
def histograms(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Histogram]:
    """Return histograms of the finite values of each tensor, in equal bins: two reductions over all ranks, on `device`.

    Ranks that hold the same part all count it: every element equally often, so the counts are divided by that. A tensor
    without a finite value is left out. Ranks may hold different tensors, as a pipeline's stages do.
    """
    by_rank: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(by_rank, {name: x.numel() for name, x in tensors.items()})
    sizes = {name: size for of_rank in by_rank for name, size in of_rank.items()}
    tensors = {name: tensors[name] if name in tensors else torch.empty(0) for name in sizes}
    extremes = torch.tensor([_extremes(_finite(x)) for x in tensors.values()], dtype=torch.float64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    spans = [(-negative_low, high) for negative_low, high in extremes.tolist()]
    rows = torch.stack([_counts_and_sums(x, *span) for x, span in zip(tensors.values(), spans, strict=True)]).to(device)
    dist.all_reduce(rows)
    found = {}
    for (name, size), (low, high), (*row, num_held) in zip(sizes.items(), spans, rows.tolist(), strict=True):
        if low <= high:
            *counts, total, sum_of_squares = (value * size / num_held for value in row)
            first, last = _widened(low, high)
            limits = [first + (last - first) * (i + 1) / NUM_BINS for i in range(NUM_BINS)]
            num = round(sum(counts))
            found[name] = Histogram(low, high, num, total, sum_of_squares, limits, [round(count) for count in counts])
    return found


def _finite(x: Tensor) -> Tensor:
    """Return the finite values of this rank's shard, fp64, on the CPU: there counting is deterministic."""
    local = chunk_of(x).local.flatten().cpu().double()
    return local[local.isfinite()]


def _extremes(x: Tensor) -> tuple[float, float]:
    """Return the maxima of -x and x."""
    return (-x.min().item(), x.max().item()) if len(x) else (-torch.inf, -torch.inf)


def _counts_and_sums(tensor: Tensor, low: float, high: float) -> Tensor:
    """Return a vector: counts of this rank's finite values, their sum and sum of squares, and its shard's size."""
    x = _finite(tensor)
    counts = torch.histc(x, NUM_BINS, *_widened(low, high)) if len(x) else x.new_zeros(NUM_BINS)
    num_held = x.new_tensor(chunk_of(tensor).local.numel())
    return torch.cat([counts, torch.stack([x.sum(), x.square().sum(), num_held])])


def _widened(low: float, high: float) -> tuple[float, float]:
    return (low, high) if low < high else (low - 0.5, high + 0.5)
