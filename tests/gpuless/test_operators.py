"""Which kernels torch's own choice gives attention and norms on an H100, by family, dtype and width of heads."""

import collections

import null_gpu
import pytest
import torch
import torch.distributed as dist
from test_kernels import FLAVORS

from torchtitan_graph.check import matrix
from torchtitan_graph.check.matrix import BF16, FP32, Cell

FUSED = {"cudnn", "flash", "efficient"}


def operators(cell: Cell) -> collections.Counter[str]:
    """Count a traced step's operators, forward and backward."""
    _, graphs = matrix.final_graphs(cell)
    calls = graphs.train.gm.graph.find_nodes  # type: ignore[union-attr]
    return collections.Counter(
        str(node.target).split(".")[1]
        for node in calls(op="call_function", target=None) or graphs.train.gm.graph.nodes  # type: ignore[union-attr]
        if node.op == "call_function" and str(node.target).startswith("aten.")
    )


@pytest.mark.parametrize("family, flavor", FLAVORS)
def test_attention_and_norms_are_fused(family: str, flavor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(matrix, "DEVICE", torch.device("cuda"))
    for width in (64, 128):
        names = ("head_dim", "nope_dim", "rope_dim", "v_dim", "kv_lora_rank")
        changes = tuple((name, width // 2 if name == "rope_dim" else width) for name in names)
        for name, precision in (("fp32", FP32), ("bf16", BF16)):
            found = operators(Cell(family=family, flavor=flavor, precision=precision, changes=changes))
            attention = {op.split("_")[4]: n for op, n in found.items() if op.startswith("_scaled_dot_product_")}
            norms = {op: n for op, n in found.items() if "rms_norm" in op}
            null_gpu.tell(f"{width:4d} {name}: attention by {attention}, norms by {norms}")
            assert attention.keys() <= FUSED and norms
            assert not any("_softmax" in op and "log" not in op for op in found if op == "_safe_softmax")
