"""What a whole training step computes with all that Inductor fuses on a GPU, by Triton's interpreter for its kernels
and by the host for torch's own, against the plain model in fp64."""

import dataclasses

import host
import null_gpu
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from torchtitan_graph.check import matrix
from torchtitan_graph.check.matrix import BF16, FP32, FP64, Cell, Seen
from torchtitan_graph.steps.choices import FUSIONS

HEADS = (("head_dim", 16), ("nope_dim", 16), ("rope_dim", 16), ("v_dim", 16), ("kv_lora_rank", 16))
# As of tests/numerics/test_codegen.py: of a gradient's norm.
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-2}
DENSE = [("llama3", tuple(FUSIONS)), ("qwen3", tuple(FUSIONS))]
ROUTED = [("deepseek_v3", ("rms_norm", "rope")), ("gpt_oss", ("rms_norm", "rope"))]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "NUM_ROWS", 2)
    monkeypatch.setattr(matrix, "SEQ_LEN", 40)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def plain(cell: Cell) -> tuple[Seen, Seen]:
    """Give the weights that the seed gives, and the loss and the gradients of the first step on the host, in fp64."""
    side = matrix.build_plain(dataclasses.replace(cell, precision=FP64, attn="sdpa"))
    weights = {name: p.detach().clone() for name, p in side.model.named_parameters()}
    loss = side.train(*matrix.microbatches(cell, 0, 1)).loss
    return weights, {"loss": loss} | gradients(side.model)


def gradients(model: torch.nn.Module) -> Seen:
    return {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def local(x: Tensor) -> Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


def distances(cell: Cell, monkeypatch: pytest.MonkeyPatch, broken: bool = False) -> dict[str, float]:
    """Give how far the loss and each gradient of the device's step are from the plain one's."""
    weights, expected = plain(cell)
    monkeypatch.setattr(matrix, "DEVICE", torch.device("cuda"))
    steps = matrix.build_graph(cell, without_a_mask if broken else None)
    with host.OnHost(), torch.no_grad():
        for name, p in steps.model.named_parameters():
            local(p).copy_(weights[name])
        loss = steps.train(*matrix.microbatches(cell, 0, 1)).loss
        found = {name: x.cpu() for name, x in ({"loss": loss} | gradients(steps.model)).items()}
    assert found.keys() == expected.keys()
    return {name: float((found[name].double() - x).norm() / x.norm()) for name, x in expected.items()}


def without_a_mask(gm: GraphModule) -> GraphModule:
    """Let the first compiled region be given its last input's zeros."""
    region = next(node for node in gm.graph.nodes if node.name.startswith("flex") and node.name.endswith("inputs"))
    documents = region.args[-1]
    with gm.graph.inserting_before(region):
        zeros = gm.graph.call_function(torch.ops.aten.zeros_like.default, (documents,))
    region.replace_input_with(documents, zeros)
    gm.recompile()
    return gm


def check(cell: Cell, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    found = distances(cell, monkeypatch)
    worst = max(found, key=found.__getitem__)
    null_gpu.tell(f"loss {found['loss']:.1e}, at most {found[worst]:.1e}, {worst}")
    assert found[worst] < tolerance


@pytest.mark.parametrize("family, fusions", DENSE + ROUTED)
def test_a_fused_step_is_the_plain_step(family: str, fusions: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(family=family, attn="flex", precision=FP32, fusions=fusions, changes=HEADS)
    check(cell, TOLERANCE["fp32"], monkeypatch)


def test_a_fused_step_is_the_plain_step_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(attn="flex", precision=BF16, fusions=tuple(FUSIONS), changes=HEADS)
    check(cell, TOLERANCE["bf16"], monkeypatch)


def test_documents_that_are_lost_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(attn="flex", precision=FP32, fusions=tuple(FUSIONS), changes=HEADS)
    found = distances(cell, monkeypatch, broken=True)
    null_gpu.tell(f"loss {found['loss']:.1e}, at most {max(found.values()):.1e}")
    assert max(found.values()) > 1000 * TOLERANCE["fp32"]
