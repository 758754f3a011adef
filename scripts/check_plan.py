"""Compare what `python -m torchtitan_graph.plan --device cpu` foretells with what real processes then do, on this CPU.

    OMP_NUM_THREADS=1 python scripts/check_plan.py
    OMP_NUM_THREADS=1 python scripts/check_plan.py --only llama3,tp --json plan.jsonl

Each cell is a job of train_configs/, shortened, on one rank or on several gloo processes: all families, fp32 and bf16,
FSDP, HSDP, tensor, context, expert and pipeline parallel. The exit code is 1 where the peak memory of the rank that
needs most is off by more than 5 %, or the time of a step by more than 15 %.

Memory is what a rank holds between steps, and the most that a step allocates on top, by the profiler's record of every
allocation. Time is by the clock, so the machine must have nothing else to do: medians of steps, on the slowest rank,
and of rounds, in each of which a forecast with a replay of its own stands alongside a run.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmark import make_batch, peak_bytes

from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.capture.state import local_part
from torchtitan_graph.command import make_parser
from torchtitan_graph.config import load
from torchtitan_graph.parallel.join import join
from torchtitan_graph.plan.on_cpu import ThisCpu
from torchtitan_graph.plan.ranks import build, configuration
from torchtitan_graph.plan.simulate import simulate
from torchtitan_graph.rates import RATES
from torchtitan_graph.steps import rows_per_microbatch
from torchtitan_graph.trainer import Trainer

MEMORY_WITHIN, TIME_WITHIN = 0.05, 0.15
_DEBUG = "train_configs/{}_debug.toml"
_BF16, _FULL = "--training.mixed_precision_param bfloat16", "--activation_checkpoint.mode full"
_TP, _EP = "--parallelism.tensor_parallel_degree", "--parallelism.expert_parallel_degree"
_PP, _CP = "--parallelism.pipeline_parallel_degree", "--parallelism.context_parallel_degree"

# A name, the job's file, the number of ranks, further options.
CELLS: dict[str, tuple[str, int, str]] = {
    "llama3 fp32": ("llama3", 1, "--training.local_batch_size 1 --training.global_batch_size 2"),
    "llama3 bf16 full": ("llama3", 1, f"{_BF16} {_FULL}"),
    "llama4 bf16": ("llama4", 1, _BF16),
    "qwen3 fp32": ("qwen3", 1, ""),
    "deepseek_v3 fp32": ("deepseek_v3", 1, ""),
    "gpt_oss bf16": ("gpt_oss", 1, _BF16),
    "gpt_oss flex fp32": ("gpt_oss", 1, "--model.attn flex"),
    "llama3 fsdp2 bf16": ("llama3", 2, _BF16),
    "qwen3 tp2 fp32": ("qwen3", 2, f"{_TP} 2"),
    "deepseek_v3 fsdp2 ep2 bf16": ("deepseek_v3", 2, f"{_BF16} {_EP} 2"),
    "llama3 pp2 fp32": ("llama3", 2, f"{_PP} 2 --training.local_batch_size 4"),
    "llama3 cp2 fp32": ("llama3", 2, f"{_CP} 2"),
    "llama4 fsdp4 bf16": ("llama4", 4, _BF16),
    "llama3 fsdp2 tp2 fp32": ("llama3", 4, f"{_TP} 2"),
    # Chosen when the cost model was final.
    "llama3 bf16": ("llama3", 1, _BF16),
    "llama4 fp32 full": ("llama4", 1, _FULL),
    "qwen3 bf16": ("qwen3", 1, _BF16),
    "qwen3_moe fp32": ("qwen3_moe", 1, ""),
    "deepseek_v3 bf16 full": ("deepseek_v3", 1, f"{_BF16} {_FULL}"),
    "gpt_oss fp32": ("gpt_oss", 1, ""),
    "gpt_oss fsdp2 bf16": ("gpt_oss", 2, _BF16),
    "qwen3_moe ep2 fp32": ("qwen3_moe", 2, f"{_EP} 2"),
    "llama4 tp2 bf16": ("llama4", 2, f"{_BF16} {_TP} 2"),
    "deepseek_v3 pp2 fp32": ("deepseek_v3", 2, f"{_PP} 2 --training.local_batch_size 4"),
    "qwen3 cp2 bf16": ("qwen3", 2, f"{_BF16} {_CP} 2"),
    "llama3 hsdp2x2 bf16": ("llama3", 4, f"{_BF16} --parallelism.data_parallel_replicate_degree 2"),
}


class Measured(NamedTuple):
    """A rank's measurements: bytes at its peak, and seconds of a step."""

    peak: int
    step_s: float


class Cell(NamedTuple):
    """A forecast and a measurement: bytes at the peak, and seconds."""

    name: str
    world_size: int
    peak: int
    planned_peak: int
    step_s: float
    planned_s: float

    @property
    def memory_off(self) -> float:
        return self.planned_peak / self.peak - 1

    @property
    def time_off(self) -> float:
        return self.planned_s / self.step_s - 1

    def __str__(self) -> str:
        memory = f"{self.peak / 2**20:8.1f} MiB, planned {self.planned_peak / 2**20:8.1f} {self.memory_off:+6.1%}"
        seconds = f"{self.step_s * 1e3:8.1f} ms, planned {self.planned_s * 1e3:8.1f} {self.time_off:+6.1%}"
        return f"{self.name:28}{self.world_size:2}  {memory}  {seconds}"


def words_of(name: str) -> tuple[list[str], int]:
    """Return a cell's options, and its number of ranks."""
    family, world_size, more = CELLS[name]
    shared = "--debug.moe_force_load_balance --validation.no-enable --checkpoint.no-enable --training.seq_len 256"
    return ["--job.config_file", _DEBUG.format(family), *shared.split(), *more.split()], world_size


def train(rank: int, world_size: int, words: Sequence[str], num_steps: int, port: int, folder: str) -> None:
    """Train a few steps as one rank, and write the measurements to a file."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    join("gloo")
    found = train_here([*words, "--job.dump_folder", folder], num_steps)
    Path(folder, f"rank_{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def train_here(words: Sequence[str], num_steps: int) -> Measured:
    """Train a few steps as this process' rank, and return the measurements."""
    config = load(words)
    trainer = Trainer(Blueprint(config, dist.get_world_size()))
    rows = rows_per_microbatch(config), config.training.seq_len
    vocab_size = trainer.model.config.vocab_size
    batches = [make_batch(*rows, vocab_size, trainer.device) for _ in range(trainer.blueprint.num_microbatches)]
    num_tokens = torch.tensor(trainer.blueprint.rows_per_step * config.training.seq_len)

    def step() -> None:
        trainer.steps.train(batches, num_tokens)
        trainer.steps.clip(config.training.max_norm)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    step()
    at_rest = _bytes_at_rest(trainer) + sum(x.nbytes for batch in batches[:1] for x in batch)
    peak = at_rest + peak_bytes(step)
    times = []
    for _ in range(num_steps):
        dist.barrier()
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return Measured(peak, statistics.median(times))


def _bytes_at_rest(trainer: Trainer) -> int:
    """Return the bytes of parameters and of the optimizer's state, except its counts of steps."""
    parameters = {id(p): p for p in trainer.model.parameters()}
    state = [x for p in parameters.values() for x in trainer.optimizer.state.get(p, {}).values() if x.dim()]
    return sum(local_part(x).nbytes for x in [*parameters.values(), *state])


def measure(words: Sequence[str], world_size: int, num_steps: int, port: int) -> list[Measured]:
    """Train in real processes, and return each rank's measurements."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (world_size, words, num_steps, port, folder), nprocs=world_size)
        ranks = range(world_size)
        return [Measured(*json.loads(Path(folder, f"rank_{rank}.json").read_text())) for rank in ranks]


def compare(name: str, num_rounds: int, num_steps: int, port: int) -> Cell:
    """Forecast a cell, and measure it."""
    words, world_size = words_of(name)
    rates = RATES["CPU"]
    job = build(configuration(words, world_size), world_size, rates)
    planned, ranks, times = [], [], []
    for _ in range(num_rounds):
        cpu = ThisCpu(world_size)
        cpu.learn(job)
        planned.append(simulate(job, cpu.prices(rates), rates).step.seconds)
        ranks = measure(words, world_size, num_steps, port)
        times.append(max(rank.step_s for rank in ranks))
    planned_peak, peak = max(rank.forecast.in_all for rank in job.ranks), max(rank.peak for rank in ranks)
    return Cell(name, world_size, peak, planned_peak, statistics.median(times), statistics.median(planned))


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="", help="words that a cell's name must have, one of them")
    parser.add_argument("--rounds", type=int, default=3, help="forecasts and runs of each cell (default 3)")
    parser.add_argument("--steps", type=int, default=7, help="measured steps of a run (default 7)")
    parser.add_argument("--port", type=int, default=29561, help="of the processes' store, on loopback")
    parser.add_argument("--json", type=Path, help="append the figures to this file, a line for each cell")
    args = parser.parse_args()
    wanted = [word for word in args.only.split(",") if word]
    names = [name for name in CELLS if not wanted or any(word in name for word in wanted)]
    if not names:
        parser.error(f"--only {args.only}: no cell has such a word; the cells are {', '.join(CELLS)}")
    torch.set_num_threads(1)
    bad = 0
    for name in names:
        cell = compare(name, args.rounds, args.steps, args.port)
        is_off = abs(cell.memory_off) > MEMORY_WITHIN or abs(cell.time_off) > TIME_WITHIN
        bad += is_off
        print(f"{cell}{'  OFF' * is_off}", flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(cell._asdict()) + "\n")
    print(f"{len(names) - bad} of {len(names)} within {MEMORY_WITHIN:.0%} of memory and {TIME_WITHIN:.0%} of time")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
