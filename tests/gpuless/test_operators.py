"""Which kernels torch's own choice gives attention and norms on an H100, by family, dtype and width of heads."""

import collections
import dataclasses

import null_gpu
import pytest
import torch
import torch.distributed as dist
from test_kernels import FLAVORS
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.check import matrix
from torchtitan_graph.check.matrix import BF16, FP32, Cell
from torchtitan_graph.models.spec import load_family, tiny_config

FUSED = {"cudnn", "flash", "efficient"}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(matrix, "DEVICE", torch.device("cuda"))


def with_heads(family: str, flavor: str, width: int) -> tuple[tuple[str, int], ...]:
    """Give the changes of a tiny configuration that make its heads so wide."""
    config = tiny_config(load_family(family).FLAVORS[flavor])
    if any(hasattr(config, name) for name in ("nope_dim", "rope_dim")):
        return tuple((name, width) for name in ("nope_dim", "v_dim", "kv_lora_rank")) + (("rope_dim", width // 2),)
    is_chosen = "head_dim" in {field.name for field in dataclasses.fields(config)}
    return (("head_dim", width),) if is_chosen else (("dim", width * config.num_heads),)


def operators(cell: Cell) -> tuple[collections.Counter[str], dict[str, int]]:
    """Count a traced step's operators for attention, by kernel, forward and backward, and those for norms."""
    graphs = matrix.final_graphs(cell)[1]
    assert isinstance(graphs.train, TracedResult)
    found = collections.Counter(str(node.target) for node in graphs.train.gm.graph.nodes if node.op == "call_function")
    attention = collections.Counter[str]()
    for op, n in found.items():
        if op.startswith("aten._scaled_dot_product_"):
            attention[op.split("_")[4]] += n
    return attention, {op: n for op, n in found.items() if "rms_norm" in op}


@pytest.mark.parametrize("family, flavor", FLAVORS)
def test_attention_and_norms_are_fused(family: str, flavor: str) -> None:
    for width in (64, 128):
        changes = with_heads(family, flavor, width)
        for name, precision in (("fp32", FP32), ("bf16", BF16)):
            attention, norms = operators(Cell(family=family, flavor=flavor, precision=precision, changes=changes))
            null_gpu.tell(f"{width:4d} wide, {name}: attention {dict(attention)}, norms {norms}")
            assert attention and attention.keys() <= FUSED and norms


def test_attention_that_is_not_fused_is_found() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        attention, _ = operators(Cell())
    assert not attention
