"""The layouts that tests run; the rest of the matrix is what users of `python -m torchtitan_graph.check` run too."""

import dataclasses
import functools

import torch

from torchtitan_graph.check.matrix import *  # noqa: F403
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.parallel.storage import Reshard

ONE, FSDP2, FSDP4 = ParallelDims(), ParallelDims(dp_shard=2), ParallelDims(dp_shard=4)
DDP2, HSDP = ParallelDims(dp_replicate=2), ParallelDims(dp_replicate=2, dp_shard=2)
TP2, FSDP2_TP2 = ParallelDims(tp=2), ParallelDims(dp_shard=2, tp=2)
CPU = DEVICE  # noqa: F405
LAYOUTS = {
    "one-rank": ONE,
    "FSDP-2": FSDP2,
    "DDP-2": DDP2,
    "TP-2": TP2,
    "FSDP-4": FSDP4,
    "HSDP-2x2": HSDP,
    "FSDP-2-x-TP-2": FSDP2_TP2,
}


def eager(cell: Cell) -> Seen:  # noqa: F405
    """Train the eager reference; what a process has seen of a cell it does not train again."""
    return _eager(dataclasses.replace(cell, disabled=()))


@functools.lru_cache(maxsize=64)
def _eager(cell: Cell) -> Seen:  # noqa: F405
    return train(cell, build_eager(cell))  # noqa: F405


def off_one_rank(cell: Cell, found: Seen) -> list[str]:  # noqa: F405
    """Name what is not, in fp64, what a plain module sees that does the same on one rank."""
    expected = _plain(dataclasses.replace(cell, dims=ONE, recompute=Recompute(), reshard=Reshard(), pipeline=()))
    # What has no scale, a load that may be zero or a bias that begins so, is equal.
    exact = {name for name in expected if name.endswith(".load") or name.startswith("buffer")}
    wrong = [name for name in exact if not torch.equal(found[name], expected[name])]
    floats = [{n: x for n, x in seen.items() if n not in exact} for seen in (expected, found)]
    return wrong + far_apart(*floats, 1e-12)  # noqa: F405


@functools.cache
def _plain(cell: Cell) -> Seen:  # noqa: F405
    return train(cell, build_plain(cell))  # noqa: F405
