"""Traces of some steps, as files that a trace viewer opens."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from disks import fill, small_disk
from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.metrics import check_profiling, maybe_profile


def train(config: job.Profiling, folder: Path, num_steps: int, fail_at: int | None = None, start_step: int = 0) -> None:
    with maybe_profile(config, folder, rank=1, start_step=start_step) as end_step:
        for step in range(1, num_steps + 1):
            with torch.profiler.record_function(f"step {start_step + step}"):
                torch.ones(2, 2) @ torch.ones(2, 2)
            if step == fail_at:
                raise ValueError("non-finite loss")
            end_step()


def steps_in(path: Path) -> list[str]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sorted({event["name"] for event in events if event.get("name", "").startswith("step ")})


def test_the_last_step_of_each_cycle_is_traced(tmp_path: Path) -> None:
    config = job.Profiling(enable_profiling=True, profile_freq=4)
    train(config, tmp_path, num_steps=9, start_step=100)
    traces = sorted((tmp_path / "profile_traces").rglob("*.json.gz"))
    assert [str(path.relative_to(tmp_path)) for path in traces] == [
        "profile_traces/step-104/rank1.json.gz",
        "profile_traces/step-108/rank1.json.gz",
    ]
    assert steps_in(traces[0]) == ["step 104"]
    assert steps_in(traces[1]) == ["step 108"]


@pytest.mark.parametrize(("num_steps", "steps"), [(2, []), (3, []), (4, [4]), (6, [4])])
def test_a_run_that_ends_in_a_cycle_leaves_no_trace_without_a_step(
    num_steps: int, steps: list[int], tmp_path: Path
) -> None:
    config = job.Profiling(enable_profiling=True, profile_freq=4)
    train(config, tmp_path, num_steps)
    assert [path.name for path in tmp_path.glob("*/*")] == [f"step-{step}" for step in steps]


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_every_step_may_be_traced(tmp_path: Path) -> None:
    config = job.Profiling(enable_profiling=True, profile_freq=1)
    train(config, tmp_path, num_steps=2)
    traces = sorted((tmp_path / "profile_traces").rglob("*.json.gz"))
    assert [steps_in(path) for path in traces] == [["step 1"], ["step 2"]]


def test_training_goes_on_where_no_trace_can_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = job.Profiling(enable_profiling=True, profile_freq=4)
    with small_disk(tmp_path / "disk", "64k", inodes=5) as disk:
        fill(disk)
        train(config, disk, num_steps=9)
        assert caplog.text.count("is not written, training continues: [Errno 28]") == 2
        assert not list(disk.rglob("*.gz"))


def test_nothing_is_written_when_it_is_off(tmp_path: Path) -> None:
    train(job.Profiling(profile_freq=2), tmp_path, num_steps=4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fail_at", [1, 3, 4, 7])
def test_an_error_in_the_loop_comes_through(fail_at: int, tmp_path: Path) -> None:
    config = job.Profiling(enable_profiling=True, profile_freq=4)
    with pytest.raises(ValueError, match="non-finite loss"):
        train(config, tmp_path, num_steps=9, fail_at=fail_at)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, whose memory can be looked at")
def test_memory_snapshots_are_refused_by_name_on_a_cpu() -> None:
    with pytest.raises(UserError, match=r"profiling.enable_memory_snapshot = true: .* runs on a CPU; remove it"):
        check_profiling(job.Profiling(enable_memory_snapshot=True))
    check_profiling(job.Profiling())


@pytest.mark.gpu
def test_memory_snapshots_of_a_gpu(tmp_path: Path) -> None:
    config = job.Profiling(enable_memory_snapshot=True, profile_freq=2)
    with pytest.raises(torch.OutOfMemoryError), maybe_profile(config, tmp_path, rank=1, start_step=10) as end_step:
        for _ in range(3):
            torch.ones(1000, device="cuda")
            end_step()
        torch.ones(2**50, device="cuda")
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.pickle"))
    assert written == [f"memory_snapshot/step-{name}/rank1.pickle" for name in ("12", "14-out-of-memory")]
