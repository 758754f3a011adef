"""One rank of four under torch's own NCCL group: what it sends in a step, as a graph and in eager mode."""

import collections

import null_gpu
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torchtitan_graph.check import matrix
from torchtitan_graph.check.matrix import BF16, Cell
from torchtitan_graph.parallel.layout import ParallelDims

LAYOUTS = {
    "FSDP": Cell(ParallelDims(dp_shard=4), BF16),
    "HSDP": Cell(ParallelDims(dp_replicate=2, dp_shard=2), BF16),
    "TP": Cell(ParallelDims(dp_shard=2, tp=2), BF16),
    "CP": Cell(ParallelDims(dp_shard=2, cp=2), BF16),
}


def sent(cell: Cell, build: object) -> dict[str, int]:
    """Give the bytes of a step's collectives, by their kind."""
    steps, data = build(cell), matrix.microbatches(cell, 0, 1)  # type: ignore[operator]
    null_gpu.take()
    steps.train(*data)
    total = collections.Counter[str]()
    for what, number in null_gpu.take().items():
        if what.startswith("collective "):
            _, kind, size, *_ = what.split()
            total[kind] += number * int(size)
    return dict(total)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_sends_what_eager_does(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_c10d, "_store_based_barrier", lambda *args, **kwargs: None)  # the others never come
    monkeypatch.setattr(matrix, "DEVICE", torch.device("cuda"))
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=4)
    eager, graph = sent(LAYOUTS[layout], matrix.build_eager), sent(LAYOUTS[layout], matrix.build_graph)
    null_gpu.tell(f"eager {eager}")
    null_gpu.tell(f"graph {graph}")
    assert eager and graph == eager
