"""What Triton and ptxas make of compiled flex attention on an H100: registers, spills, shared memory."""

import re
import subprocess
from pathlib import Path
from typing import Any

import null_gpu
import pytest
import torch
import torch.distributed as dist
import triton
from test_operators import with_heads

from torchtitan_graph.check import matrix
from torchtitan_graph.check.matrix import BF16, FP32, Cell
from torchtitan_graph.parallel.storage import Precision

SHARED = 232448  # bytes that a block may have on an H100
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def inspect(kernel: Any, folder: Path) -> dict[str, int]:
    """Give a compiled kernel's registers and spilled stores of a thread, and its shared memory in bytes."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    usage, code = (
        subprocess.run([CUOBJDUMP, option, cubin], capture_output=True, text=True, check=True).stdout
        for option in ("--dump-resource-usage", "-sass")
    )
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    return {
        "registers": int(registers[1]),
        "spills": len(re.findall(r"\bSTL\b", code)),
        "shared": kernel.metadata.shared,
    }


@pytest.mark.parametrize("precision", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family, width", [("llama3", 64), ("llama3", 128), ("deepseek_v3", 128)])
def test_flex_attention_fits_the_device(
    family: str, width: int, precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the widths of all released heads; deepseek_v3's keys are half as wide again."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    kernels, plain = [], triton.compile

    def kept(*args: Any, **kwargs: Any) -> Any:
        kernels.append(plain(*args, **kwargs))
        return kernels[-1]

    monkeypatch.setattr(triton, "compile", kept)
    monkeypatch.setattr(matrix, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(matrix, "NUM_ROWS", 1)
    monkeypatch.setattr(matrix, "SEQ_LEN", 1024)
    matrix.final_graphs(
        Cell(family=family, attn="flex", precision=precision, changes=with_heads(family, "debugmodel", width))
    )
    found = {kernel.metadata.name: inspect(kernel, tmp_path) for kernel in kernels}
    for name, numbers in found.items():
        null_gpu.tell(f"{name}: {numbers}")
    assert sum("tem" in name for name in found) == 2  # forward and backward
    assert all(numbers["shared"] <= SHARED for numbers in found.values())
