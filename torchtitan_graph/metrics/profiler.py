"""Traces of single steps, for chrome://tracing or Perfetto."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from torchtitan_graph.config import job
from torchtitan_graph.log import logger


class Profiler:
    """Call `step()` after each training step."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step


@contextmanager
def maybe_profile(config: job.Profiling, dump_folder: Path, rank: int, start_step: int = 0) -> Iterator[Profiler]:
    """Trace the last `profiler_active` of every `profile_freq` steps, if `profiling.enable_profiling` says so.

    The trace of a cycle that ends with step N, counted from the run's beginning, is
    `SAVE_TRACES_FOLDER/step-N/rankR.json.gz` in `dump_folder`; its last `profiler_active` steps are recorded, after
    `profiler_warmup` steps that are traced and thrown away.
    """
    if not config.enable_profiling:
        yield Profiler(lambda: None)
        return
    idle = config.profile_freq - config.profiler_warmup - config.profiler_active

    def write(profiler: profile) -> None:
        folder = dump_folder / config.save_traces_folder / f"step-{start_step + profiler.step_num}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{rank}.json.gz"
        profiler.export_chrome_trace(str(path))
        logger.info(f"wrote profile {path}")

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    cycle = schedule(wait=idle, warmup=config.profiler_warmup, active=config.profiler_active)
    with profile(activities=activities, schedule=cycle, on_trace_ready=write, record_shapes=True) as profiler:

        def step() -> None:
            with warnings.catch_warnings():
                # Each cycle's events are written and then dropped: as wanted.
                warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
                profiler.step()

        yield Profiler(step)
