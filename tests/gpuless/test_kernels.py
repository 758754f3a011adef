"""A graph launches the kernels that eager does, of the same sizes: on a GPU other kernels are other bits. In bf16
nothing between the batch and the gradients waits for the device."""

import os
import re
from collections.abc import Callable

import null_gpu
import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule

from torchtitan_graph.check import matrix
from torchtitan_graph.check.matrix import BF16, FP32, Cell
from torchtitan_graph.models.spec import family_names, load_family
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.steps import Steps

FLAVORS = [(f, x) for f in family_names() for x in load_family(f).FLAVORS if x.startswith("debugmodel")]
# Heads as wide as released ones, for which flex attention has blocks of its own.
HEADS = (("head_dim", 64), ("nope_dim", 64), ("rope_dim", 64), ("v_dim", 64), ("kv_lora_rank", 64))
# What sums, and so may round otherwise: products, attention, norms, experts, embeddings; and waits. Elementwise kernels
# differ in how many rows they take at a time, and so do the loss's, see ops/loss.py; their bits stay.
SUMS = r"^wait |^product |fmha|flash|layer_norm|GammaBeta|triton_(tem|per|red)|cutlass|gemm|embedding_backward"


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    # As scripts/check_gpu.py does.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(matrix, "DEVICE", torch.device("cuda"))


def sums(counts: null_gpu.Counts) -> null_gpu.Counts:
    """Give those that sum. Inductor numbers and names its kernels as it meets them; of its reductions the blocks are
    left out, which hold more or fewer rows."""
    found = null_gpu.Counts()
    for what, number in counts.items():
        name = re.sub(r"triton_(\w{3})_fused\w*", r"triton_\1", what)
        if re.search(SUMS, name):
            found[re.sub(r"(triton_(?:per|red)).*", r"\1", name)] += number
    return found


def launched(cell: Cell, build: Callable[[Cell], Steps]) -> null_gpu.Counts:
    """Give what the second step launches: the first one finds plans and workspaces."""
    steps, (batches, num_tokens) = build(cell), matrix.microbatches(cell, 0, 1)
    on_host = [batch.to("cpu") for batch in batches]
    for _ in range(2):
        for parameter in steps.model.parameters():
            parameter.grad = None
        null_gpu.take()
        steps.train(batches, num_tokens, on_host)
    return sums(null_gpu.take())


@pytest.mark.parametrize("attn", ["sdpa", "flex"])
@pytest.mark.parametrize("family, flavor", FLAVORS)
def test_a_graph_launches_what_eager_does(family: str, flavor: str, attn: str) -> None:
    for name, precision in (("fp32", FP32), ("bf16", BF16)):
        cell = Cell(family=family, flavor=flavor, attn=attn, precision=precision, changes=HEADS, fused_layers=True)
        eager, graph = launched(cell, matrix.build_eager), launched(cell, matrix.build_graph)
        null_gpu.tell(f"{name}: {eager.total()} kernels that sum, {len(eager)} of them different")
        assert eager and not describe(eager, graph)
        assert name != "bf16" or not any(what.startswith("wait ") for what in eager)


@pytest.mark.parametrize("recompute", [Recompute(), Recompute(every=1)], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family, flavor", [each for each in FLAVORS if each[0] != "gpt_oss"])
def test_within_segments_flash_is_launched_once_a_layer(family: str, flavor: str, recompute: Recompute) -> None:
    """Forward, once more where it is computed again, and backward; nothing waits."""
    cell = Cell(family=family, flavor=flavor, attn="varlen", precision=BF16, changes=HEADS, recompute=recompute)
    eager, graph = launched(cell, matrix.build_eager), launched(cell, matrix.build_graph)
    # Eager computes all of a block again, the graph what backward reads.
    assert recompute.every or not describe(eager, graph)
    assert not any(what.startswith("wait ") for what in eager | graph)
    num_layers = len(matrix.build_model(cell).blocks)
    for what, number in (("flash_fwd_kernel", num_layers * (1 + recompute.every)), ("flash_bwd_dq_dk_dv", num_layers)):
        for launches in (eager, graph):
            assert sum(n for name, n in launches.items() if what in name) == number, (what, list(launches))


def describe(eager: null_gpu.Counts, graph: null_gpu.Counts) -> list[str]:
    """Say what is launched more often by one of them."""
    names = [name for name in sorted(eager | graph) if eager[name] != graph[name]]
    return [
        f"{eager[n]} in eager, {graph[n]} in the graph: {x}" for n, x in zip(names, null_gpu.plain(names), strict=True)
    ]


def test_a_product_taken_twice_is_found() -> None:
    def again(gm: GraphModule) -> GraphModule:
        node = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)[0]
        with gm.graph.inserting_after(node):
            gm.graph.node_copy(node)
        gm.recompile()
        return gm

    cell = Cell()
    eager, graph = (
        launched(cell, build) for build in (matrix.build_eager, lambda cell: matrix.build_graph(cell, again))
    )
    assert len(describe(eager, graph)) == 1
