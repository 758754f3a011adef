"""Profiler traces of steps, for chrome://tracing or Perfetto, and snapshots of a GPU's memory."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from torchtitan_graph.config import job
from torchtitan_graph.device import device_type
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.metrics.out_of_memory import is_out_of_memory
from torchtitan_graph.torch_private.profiler import record_memory_history, save_memory_snapshot

Step = Callable[[], None]  # to be called after each training step


def check_profiling(config: job.Profiling) -> None:
    """Raise UserError if `profiling.enable_memory_snapshot` is on and there is no GPU."""
    if config.enable_memory_snapshot and device_type() != "cuda":
        raise UserError(
            "profiling.enable_memory_snapshot = true: snapshots are of a GPU's memory, and this process runs on a CPU; "
            "remove it: memory_gib is in every log line, and when memory runs out the largest tensors are listed"
        )


def _write(what: str, path: Path, write: Callable[[Path], None]) -> None:
    """Write a profiler's file; an error is logged and training continues."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        logger.error(f"{what} {path} is not written, training continues: {error}")
    else:
        logger.info(f"wrote {what} {path}")


@contextmanager
def maybe_profile(config: job.Profiling, dump_folder: Path, rank: int, start_step: int = 0) -> Iterator[Step]:
    """Trace steps and save memory snapshots, as [profiling] sets; yields a function to call after each step."""
    with (
        _maybe_trace(config, dump_folder / "profile_traces", rank, start_step) as trace,
        _maybe_snapshot(config, dump_folder / "memory_snapshot", rank, start_step) as snapshot,
    ):

        def step() -> None:
            trace()
            snapshot()

        yield step


@contextmanager
def _maybe_snapshot(config: job.Profiling, folder: Path, rank: int, start_step: int) -> Iterator[Step]:
    """Record the GPU allocator's history, and save it every `profile_freq` steps, and when memory runs out, to
    `FOLDER/step-N/rankR.pickle`, which https://pytorch.org/memory_viz shows."""
    if not config.enable_memory_snapshot:
        yield lambda: None
        return
    done = start_step

    def save(name: str) -> None:
        _write("memory snapshot", folder / name / f"rank{rank}.pickle", save_memory_snapshot)

    def step() -> None:
        nonlocal done
        done += 1
        if (done - start_step) % config.profile_freq == 0:
            save(f"step-{done}")

    record_memory_history(True)
    try:
        yield step
    except BaseException as error:
        if is_out_of_memory(error):
            save(f"step-{done + 1}-out-of-memory")
        raise
    finally:
        record_memory_history(False)


@contextmanager
def _maybe_trace(config: job.Profiling, traces: Path, rank: int, start_step: int) -> Iterator[Step]:
    """Trace the last of every `profile_freq` steps, if `profiling.enable_profiling` is set.

    The trace of step N, counted from the run's beginning, is `TRACES/step-N/rankR.json.gz`. Up to 3 steps before it are
    traced too and thrown away, to warm the profiler up.
    """
    if not config.enable_profiling:
        yield lambda: None
        return
    unrecorded, done = config.profile_freq - 1, 0
    warmup = min(3, unrecorded)

    def write(profiler: profile) -> None:
        nonlocal done
        begun = (profiler.step_num - 1) // config.profile_freq * config.profile_freq + unrecorded
        if profiler.step_num == max(begun, done):
            return  # the run ends before the cycle's first recorded step: an empty trace
        done = profiler.step_num
        path = traces / f"step-{start_step + profiler.step_num}" / f"rank{rank}.json.gz"
        _write("profile", path, lambda path: profiler.export_chrome_trace(str(path)))

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    cycle = schedule(wait=unrecorded - warmup, warmup=warmup, active=1)
    with profile(activities=activities, schedule=cycle, on_trace_ready=write, record_shapes=True) as profiler:

        def step() -> None:
            with warnings.catch_warnings():
                # Each cycle's events are written and then dropped: as wanted.
                warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
                profiler.step()

        yield step
