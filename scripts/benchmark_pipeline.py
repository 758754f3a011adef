"""Measure what share of a step the ranks of a pipeline wait (the bubble), and what each holds at most, by schedule.

    python scripts/benchmark_pipeline.py --ranks 2 --microbatches 8
    python scripts/benchmark_pipeline.py --ranks 4 --stretch 40

Each number of ranks is a group of gloo processes that train the mid-size llama3 of `benchmark.py`. Beside what is
measured stands what the schedule allows: its share of waiting if messages took no time and every action as long as its
median was. With `--stretch` an action sleeps until it has taken as many milliseconds as it says, backward twice as
many, so that more ranks than there are cores don't take the processor from one another.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmark import config_of, integers, make_batch, make_model, peak_bytes

from torchtitan_graph.command import make_parser
from torchtitan_graph.config import job
from torchtitan_graph.device import Target
from torchtitan_graph.forecast import STEP, forecast
from torchtitan_graph.models.layers.init import initialize
from torchtitan_graph.models.spec import load_family
from torchtitan_graph.parallel.join import join
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.pipeline import Pipeline
from torchtitan_graph.parallel.schedule import SCHEDULES, plan_pipeline
from torchtitan_graph.steps import Assembly, StepOptions, bind_graphs, build_graphs
from torchtitan_graph.torch_private.pipelines import PipelineAction


def watch(pipeline: Pipeline, stretch: float) -> dict[PipelineAction, list[float]]:
    """Record the seconds of every action of this rank; one that takes less than `stretch` sleeps."""
    taken: dict[PipelineAction, list[float]] = defaultdict(list)

    def timed(run: Callable[..., Any], kind: str, stage: int, least: float) -> Callable[..., Any]:
        def call(microbatch: int, *args: Any) -> Any:
            begin = time.perf_counter()
            result = run(microbatch, *args)
            time.sleep(max(0.0, least - (time.perf_counter() - begin)))
            taken[PipelineAction(kind, stage, microbatch)].append(time.perf_counter() - begin)
            return result

        return call

    for number, stage in pipeline.stages.items():
        stage.forward = timed(stage.forward, "F", number, stretch)  # type: ignore[method-assign]
        stage.backward_input = timed(stage.backward_input, "I", number, stretch)  # type: ignore[method-assign]
        stage.backward_weight = timed(stage.backward_weight, "W", number, stretch)  # type: ignore[method-assign]
    return taken


def measure(rank: int, world_size: int, name: str, args: argparse.Namespace, results: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    join("gloo")
    device, layout = torch.device("cpu"), ParallelDims(dp_shard=1, pp=world_size).layout("cpu")
    config = config_of(args)
    model = make_model(config, args)
    parallelism = job.Parallelism(pipeline_parallel_degree=world_size, pipeline_parallel_schedule=name)
    schedule = plan_pipeline(parallelism, model.modules_in_order, args.microbatches)
    options = StepOptions(Target.here(), (1, args.seq_len), num_microbatches=args.microbatches, pipeline=schedule)
    assembly = Assembly(model, load_family(args.family), layout, options)
    graphs = build_graphs(assembly)
    expected = forecast(assembly, graphs, job.Optimizer()).held[STEP]
    steps = bind_graphs(graphs, assembly)
    initialize(model, 0)
    assert isinstance(steps.step, Pipeline)
    taken = watch(steps.step, args.stretch / 1000)
    batches = [make_batch(1, args.seq_len, config.vocab_size, device) for _ in range(args.microbatches)]
    num_tokens = torch.tensor(sum(batch.labels_BL.numel() for batch in batches))

    def step() -> None:
        steps.train(batches, num_tokens)
        model.zero_grad()

    step()
    held = peak_bytes(step)
    waits, medians = [], []
    for _ in range(args.steps):
        taken.clear()
        dist.barrier()
        begin = time.perf_counter()
        step()
        mine = sum(sum(times) for times in taken.values()), time.perf_counter() - begin
        all_ranks: list[Any] = [None] * world_size
        dist.all_gather_object(all_ranks, (mine, dict(taken)))
        seconds = max(whole for (_, whole), _ in all_ranks)
        waits.append(1 - sum(busy for (busy, _), _ in all_ranks) / (world_size * seconds))
        by_stage: dict[tuple[str, int], list[float]] = defaultdict(list)
        for _, actions in all_ranks:
            for action, times in actions.items():
                by_stage[action.kind, action.stage] += times
        typical = {key: statistics.median(times) for key, times in by_stage.items()}
        medians.append(schedule.waiting(lambda action, typical=typical: _seconds(action, typical)))  # type: ignore[misc]
    memory: list[Any] = [None] * world_size
    dist.all_gather_object(memory, (held, expected))
    if rank == 0:
        of_ranks = ", ".join(f"{held / 2**20:.0f} / {expected / 2**20:.0f}" for held, expected in memory)
        results.append(
            f"{name:16} {world_size} ranks {args.microbatches} microbatches: waits {statistics.median(waits):6.1%}"
            f"  schedule {statistics.median(medians):6.1%}  stages alike {schedule.waiting():6.1%}"
            f"  MiB measured / forecast by rank: {of_ranks}"
        )
        print(results[-1], flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _seconds(action: PipelineAction, typical: dict[tuple[str, int], float]) -> float:
    kinds = ("I", "W") if action.kind == "B" else (action.kind,)
    return sum(typical[kind, action.stage] for kind in kinds)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=integers, default=[2], help="numbers of processes (default 2)")
    parser.add_argument(
        "--schedules", type=lambda s: s.split(","), default=list(SCHEDULES), help="of them (default all)"
    )
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (default 8)")
    parser.add_argument("--seq_len", type=int, default=256, help="tokens per row, one a microbatch (default 256)")
    parser.add_argument("--steps", type=int, default=5, help="measured steps per schedule (default 5)")
    parser.add_argument("--stretch", type=float, default=0, help="least milliseconds of a forward (default 0)")
    parser.set_defaults(family="llama3", flavor="mid", attn="sdpa")
    args = parser.parse_args()
    if wrong := [name for name in args.schedules if name not in SCHEDULES]:
        parser.error(f"--schedules {wrong[0]}: legal are {', '.join(SCHEDULES)}")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29542"))
    with mp.Manager() as manager:
        results = manager.list()
        for world_size in args.ranks:
            for name in args.schedules:
                mp.spawn(measure, (world_size, name, args, results), nprocs=world_size)


if __name__ == "__main__":
    main()
