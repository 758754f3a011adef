"""The layouts that tests run; the rest of the matrix is what users of `python -m torchtitan_graph.check` run too."""

import dataclasses
import functools

from torchtitan_graph.check.matrix import *  # noqa: F403
from torchtitan_graph.parallel.layout import ParallelDims

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
