"""What Triton and ptxas make of each region that Inductor compiles, on an H100 and an A100: registers, spills, shared
memory."""

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import null_gpu
import pytest
import torch
import torch.distributed as dist
import triton
from test_operators import with_heads

from torchtitan_graph.check import matrix
from torchtitan_graph.check.matrix import BF16, FP32, Cell
from torchtitan_graph.models.layers import attention
from torchtitan_graph.parallel.storage import Precision
from torchtitan_graph.passes import compile_regions
from torchtitan_graph.steps.choices import FUSIONS

SHARED = {"H100": 232448, "A100": 166912}  # bytes that a block may have
FEW = 16  # spills that don't matter: those of the loops of a kernel that spills are in the hundreds
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# The masks of all families, and the widths of all released heads. deepseek_v3's keys are half as wide again.
HEADS = [("llama3", 64), ("llama3", 128), ("llama4", 128), ("gpt_oss", 64), ("deepseek_v3", 128)]
# An 8B's sizes, as far as a family has them.
SIZES = (("dim", 4096), ("num_heads", 32), ("num_kv_heads", 8), ("head_dim", 128))
CODE: list[tuple[str, dict[str, Any]]] = [
    ("llama3", {"fusions": tuple(FUSIONS)}),
    ("deepseek_v3", {"fusions": ("rms_norm", "swiglu", "rope")}),
    ("llama3", {"codegen": "whole"}),
    *((family, {"codegen": "blocks"}) for family in ("llama4", "qwen3", "deepseek_v3", "gpt_oss")),
]


class Kernel(NamedTuple):
    """Registers and spilled stores of a thread, and bytes of shared memory of a block."""

    name: str
    registers: int
    spills: int
    shared: int


def inspect(kernel: Any, folder: Path) -> Kernel:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [CUOBJDUMP, "--dump-resource-usage", "-sass", cubin]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers = re.search(r"REG:(\d+)", text)
    assert registers is not None, text
    name, shared = kernel.metadata.name, kernel.metadata.shared
    # An angle's exact reduction, in a sine, keeps a table in local memory: such a kernel's stores there are its own.
    is_own = "__local_depot" in kernel.asm["ptx"]
    return Kernel(name, int(registers[1]), 0 if is_own else len(re.findall(r"\bSTL\b", text)), shared)


def compiled_ones(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Give the kernels that Triton compiles from now on, as they are compiled."""
    kernels, plain = [], triton.compile

    def kept(*args: Any, **kwargs: Any) -> Any:
        kernels.append(plain(*args, **kwargs))
        return kernels[-1]

    monkeypatch.setattr("triton.compiler.compile", kept)
    return kernels


def kernels_of(cell: Cell, gpu: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """Compile a step of one row of 1,024 tokens for a GPU; give its kernels.

    Of a kernel whose blocks Inductor chooses by the clock it is the choice that spills least: on a GPU Inductor times
    none that spills more than FEW if there is another.
    """
    null_gpu.become(gpu)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    found: dict[str, Kernel] = {}
    plain = triton.compile

    def kept(source: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = plain(source, *args, **kwargs)
        code, choice = source.fn.src, inspect(kernel, folder)
        found[code] = min(found.get(code, choice), choice, key=lambda each: each.spills)
        return kernel

    monkeypatch.setattr(triton, "compile", kept)
    monkeypatch.setattr(matrix, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(matrix, "NUM_ROWS", 1)
    monkeypatch.setattr(matrix, "SEQ_LEN", 1024)
    matrix.final_graphs(cell)
    return list(found.values())


def tell(kernels: list[Kernel], gpu: str) -> None:
    for kernel in kernels:
        null_gpu.tell(
            f"{gpu} {kernel.name[:40]}: {kernel.registers} registers, {kernel.spills} spills, {kernel.shared} bytes"
        )


def flex_cell(family: str, width: int, precision: Precision) -> Cell:
    return Cell(family=family, attn="flex", precision=precision, changes=with_heads(family, "debugmodel", width))


@pytest.mark.parametrize("gpu", SHARED)
@pytest.mark.parametrize("precision", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family, width", HEADS)
def test_flex_attention_fits_the_device(
    family: str, width: int, precision: Precision, gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = kernels_of(flex_cell(family, width, precision), gpu, tmp_path, monkeypatch)
    attention = [kernel for kernel in kernels if "_tem_" in kernel.name]
    tell(attention, gpu)
    assert len(attention) >= 2  # forward and backward, of each mask
    assert all(kernel.shared <= SHARED[gpu] and kernel.spills <= FEW for kernel in kernels)


def test_blocks_that_spill_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (compile_regions, attention):
        monkeypatch.setattr(module, "flex_kernel_options", lambda *args, **kwargs: {})
    kernels = kernels_of(flex_cell("llama3", 64, FP32), "A100", tmp_path, monkeypatch)
    tell(kernels, "A100")
    assert any(kernel.spills > FEW for kernel in kernels)


@pytest.mark.parametrize("gpu", SHARED)
@pytest.mark.parametrize("family, code", CODE, ids=[f"{f}-{code.get('codegen', 'fusions')}" for f, code in CODE])
def test_compiled_parts_fit_the_device(
    family: str, code: dict[str, Any], gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = "fusions" not in code  # as "auto" has it
    cell = Cell(
        family=family, precision=BF16, ffn_dim=14336, vocab_size=128256, changes=SIZES, fused_layers=fused, **code
    )
    kernels = kernels_of(cell, gpu, tmp_path, monkeypatch)
    tell(sorted(kernels, key=lambda kernel: kernel.registers)[-1:], gpu)
    tell([kernel for kernel in kernels if kernel.spills], gpu)
    null_gpu.tell(f"{gpu}: {len(kernels)} kernels, at most {max(kernel.shared for kernel in kernels)} bytes shared")
    assert all(kernel.shared <= SHARED[gpu] and kernel.spills <= FEW for kernel in kernels)
