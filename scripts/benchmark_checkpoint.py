"""How much training time a checkpoint costs: saved while training waits, or in a thread.

    python scripts/benchmark_checkpoint.py --ranks 2 --folder /tmp/benchmark

A round is some steps with one save after the first of them, up to the moment when it is on disk. Rounds without a
save, and with one in each mode, take turns in the same processes. Time lost is a round's time less that of its
neighbour without a save; figures are medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmark import REGIONS, build, check_numbers, config_of, make_batch

from torchtitan_graph import device as devices
from torchtitan_graph.checkpoint import Checkpointer
from torchtitan_graph.command import make_parser
from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.optim import build_lr_scheduler, build_optimizer
from torchtitan_graph.parallel.join import join
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.storage import Precision

MODES = ("disabled", "async", "async_with_pinned_mem")


def measure(rank: int, args: argparse.Namespace, folder: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    device = devices.device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    join("nccl" if device.type == "cuda" else "gloo")
    layout = ParallelDims(dp_shard=args.ranks).layout(device.type)
    batch = make_batch(1, args.seq_len, config_of(args).vocab_size, device)
    num_tokens = torch.tensor(batch.labels_BL.numel() * args.ranks, device=device)
    steps, _ = build(args.mode, Precision(compute=torch.float32), args, layout, device)
    model = steps.model
    optimizer = build_optimizer(model, job.Optimizer())
    scheduler = build_lr_scheduler(optimizer, job.LRScheduler(), 1000)
    checkpointers = {}
    for mode in MODES:
        config = job.Checkpoint(enable=True, async_mode=mode, keep_latest_k=2)
        checkpointers[mode] = Checkpointer(folder / mode, config, model, optimizer, scheduler)

    def a_round(number: int, checkpointer: Checkpointer | None) -> tuple[float, float]:
        """Return the seconds of the round, and of the call of `save`."""
        dist.barrier()
        begin, saving = time.perf_counter(), 0.0
        for i in range(args.steps):
            steps.train([batch], num_tokens)
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if i == 0 and checkpointer is not None:
                called = time.perf_counter()
                checkpointer.save(number, {})
                saving = time.perf_counter() - called
        if checkpointer is not None:
            checkpointer.wait()
        return time.perf_counter() - begin, saving

    lost: dict[str, list[float]] = {mode: [] for mode in MODES}
    calls: dict[str, list[float]] = {mode: [] for mode in MODES}
    without = []
    for number in range(args.rounds + 1):
        if rank == 0:
            print(f"round {number} of {args.rounds}", file=sys.stderr)
        for mode in MODES:
            base, _ = a_round(number, None)
            whole, call = a_round(number, checkpointers[mode])
            if number > 0:  # the first warms up
                without.append(base)
                lost[mode].append(whole - base)
                calls[mode].append(call)
    if rank == 0:
        num_bytes = sum(path.stat().st_size for path in (folder / MODES[0] / f"step-{args.rounds}").iterdir())
        print(f"ranks {args.ranks}  step_s {statistics.median(without) / args.steps:.2f}  MiB {num_bytes / 2**20:.0f}")
        for mode in MODES:
            median: Any = {name: statistics.median(of[mode]) for name, of in (("lost", lost), ("call", calls))}
            ratio = median["lost"] / statistics.median(lost["disabled"])
            print(f"{mode:22} call_s {median['call']:.2f}  lost_s {median['lost']:.2f}  lost_to_disabled {ratio:.2f}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="number of processes (default 2)")
    parser.add_argument("--family", default="llama3", help="model family (default llama3)")
    parser.add_argument("--flavor", default="mid", help="a flavour, or mid (default): debug at dim 512, 8 layers")
    modes = ("eager", "graph", *REGIONS)
    parser.add_argument("--mode", default="graph", choices=modes, help="the step, as in benchmark.py (default graph)")
    parser.add_argument("--seq_len", type=int, default=256, help="tokens per row, one row per rank (default 256)")
    parser.add_argument("--steps", type=int, default=8, help="steps per round (default 8)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds per mode (default 5)")
    parser.add_argument("--folder", type=Path, help="where to save (default: the system's folder for temporary files)")
    args = parser.parse_args()
    try:
        check_numbers(args, "ranks", "seq_len", "steps", "rounds")
        config_of(args)
        if args.folder and not args.folder.is_dir():
            raise UserError(f"--folder {args.folder}: there is no such folder")
    except UserError as error:
        parser.error(str(error))
    args.attn, args.rows, args.disable = "sdpa", 1, []
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29542"))
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        mp.spawn(measure, (args, folder), nprocs=args.ranks)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
