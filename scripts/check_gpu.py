"""On a machine with one CUDA GPU, in one call and under ten minutes: is the graph eager's equal, and how fast is it?

    python scripts/check_gpu.py [--json gpu.jsonl] [--skip_speed]

First every family's tiny model, five steps as a graph and in eager mode with compiled flex attention (forward and
backward): loss, every gradient and the parameters, bit for bit. Then tokens per second and, where the GPU's peak is
known, MFU of llama3 1B and of a small qwen3 with experts: eager, as a graph with its flex regions compiled, and the
graph compiled as a whole.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_graph.check import matrix
from torchtitan_graph.check.matrix import BF16, FP32, Cell
from torchtitan_graph.models.spec import family_names, load_family

# Heads that the GPU's kernels take: a power of two, at least 16 wide.
HEADS = (("head_dim", 32), ("nope_dim", 32), ("rope_dim", 32), ("v_dim", 32), ("kv_lora_rank", 32))
SPEED = (
    ["--models", "llama3:1B", "--seq_len", "4096", "--attn", "sdpa"],
    ["--models", "llama3:1B", "--seq_len", "4096", "--attn", "flex"],
    ["--models", "qwen3:debugmodel_moe", "--seq_len", "4096", "--rows", "4", "--attn", "flex"],
)


def check_bits() -> list[str]:
    """Train every debug flavour both ways; print a line each, and return those that differ."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    matrix.DEVICE = torch.device("cuda")
    # Else bf16 attention takes cuDNN's kernels, whose backward adds in an order of its own each time. To warn would not
    # do: attention then takes them all the same.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    failed = []
    flavors = [(f, x) for f in family_names() for x in load_family(f).FLAVORS if x.startswith("debugmodel")]
    for family, flavor in flavors:
        for attn in ("sdpa", "flex"):
            for precision in (FP32, BF16):
                begin = time.perf_counter()
                cell = Cell(family=family, flavor=flavor, attn=attn, precision=precision, changes=HEADS)
                eager = matrix.train(cell, matrix.build_eager(cell))
                different = matrix.bits_that_differ(eager, matrix.train(cell, matrix.build_graph(cell)))
                name = f"{family} {flavor} {attn} {precision.compute}"
                result = f"{len(different)} of {len(eager)} differ, first {different[0]}" if different else "equal"
                print(f"{name:<50} {result}  ({time.perf_counter() - begin:.1f} s)", flush=True)
                failed += [name] * bool(different)
    dist.destroy_process_group()
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append the benchmark's rows to this file, an object each")
    parser.add_argument("--skip_speed", action="store_true", help="check the bits alone")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("check_gpu: torch sees no CUDA GPU here; tests/numerics checks the same on a CPU")
    failed = check_bits()
    for model in SPEED if not args.skip_speed else ():
        command = [sys.executable, str(Path(__file__).with_name("benchmark.py")), *model]
        command += ["--layouts", "fsdp1", "--dtypes", "bfloat16", "--modes", "eager,graph,whole", "--steps", "7"]
        subprocess.run(command + (["--json", str(args.json)] if args.json else []), check=True)
    if failed:
        raise SystemExit(f"check_gpu: graph and eager differ for {', '.join(failed)}")


if __name__ == "__main__":
    main()
