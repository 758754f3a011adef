"""One rank of four under torch's own NCCL group: what it sends in a step, as a graph and in eager mode."""

import collections
import dataclasses
import os
from collections.abc import Callable
from functools import partial

import null_gpu
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.fx import GraphModule

from torchtitan_graph.check import matrix
from torchtitan_graph.check.matrix import BF16, Cell
from torchtitan_graph.device import CudaRecorder, Recorders
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.steps import Steps, bind_graphs, inputs

LAYOUTS = {
    "FSDP": Cell(ParallelDims(dp_shard=4), BF16),
    "HSDP": Cell(ParallelDims(dp_replicate=2, dp_shard=2), BF16),
    "TP": Cell(ParallelDims(dp_shard=2, tp=2), BF16),
    "CP": Cell(ParallelDims(dp_shard=2, cp=2), BF16),
}


def sent(cell: Cell, build: Callable[[Cell], Steps]) -> dict[str, int]:
    """Give the bytes of a step's collectives, by their kind."""
    steps, data = build(cell), matrix.microbatches(cell, 0, 1)
    null_gpu.take()
    steps.train(*data)
    total = collections.Counter[str]()
    for what, number in null_gpu.take().items():
        if what.startswith("collective "):
            _, kind, size, *_ = what.split()
            total[kind] += number * int(size)
    return dict(total)


@pytest.fixture(autouse=True)
def first_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    # The other ranks never come: nobody waits for them, or for what they say over gloo.
    monkeypatch.setattr(distributed_c10d, "_store_based_barrier", lambda *args, **kwargs: None)
    monkeypatch.setattr(inputs, "files_group", lambda: None)
    monkeypatch.setattr(inputs, "on_rank_0", lambda run, group: run())
    monkeypatch.setattr(matrix, "DEVICE", torch.device("cuda"))
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_sends_what_eager_does(layout: str) -> None:
    eager, graph = sent(LAYOUTS[layout], matrix.build_eager), sent(LAYOUTS[layout], matrix.build_graph)
    null_gpu.tell(f"eager {eager}")
    null_gpu.tell(f"graph {graph}")
    assert eager and graph == eager


def test_a_reduction_sent_twice_is_found() -> None:
    def again(gm: GraphModule) -> GraphModule:
        target = torch.ops._c10d_functional.reduce_scatter_tensor.default
        node = gm.graph.find_nodes(op="call_function", target=target)[0]
        with gm.graph.inserting_after(node):
            gm.graph.node_copy(node)
        gm.recompile()
        return gm

    cell = LAYOUTS["FSDP"]
    assert sent(cell, matrix.build_graph) != sent(cell, partial(matrix.build_graph, edit=again))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_are_recorded_in_cuda_graphs(layout: str) -> None:
    os.environ.pop("PYTORCH_NO_CUDA_MEMORY_CACHING", None)  # a recorder's pool is the caching allocator's
    cell = LAYOUTS[layout]
    model, graphs = matrix.final_graphs(cell)
    options = dataclasses.replace(cell.options("graph"), recorders=Recorders(CudaRecorder))
    steps, data = bind_graphs(graphs, model, matrix.layout_of(cell.dims), options), matrix.microbatches(cell, 0, 1)
    found = []
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = None
        null_gpu.take()
        steps.train(*data)
        found.append(null_gpu.take())
    steps.close()
    num_sent = [sum(n for what, n in counts.items() if what.startswith("collective ")) for counts in found]
    assert num_sent[0] == num_sent[1] > 0 and num_sent[2] == 0
    assert found[1]["capture"] == found[2]["replay"] > 0
    assert not [what for counts in found for what in counts if what.startswith(("refused", "not captured"))]
