"""Checkpoints of whole runs: saved in a thread, killed at any moment, with no room on one rank."""

import random
import signal
from pathlib import Path

import patched_train
import pytest
from runs import Result, numbers, records, saved, saved_steps, train

from torchtitan_graph.checkpoint.folder import find_damage, find_problem


@pytest.mark.slow
def test_saving_in_a_thread_changes_no_bit(reference: tuple[Path, Result], tmp_path: Path) -> None:
    options = ["--job.dump_folder", str(tmp_path), "--checkpoint.keep_latest_k", "0"]
    code, output = train(*options, "--checkpoint.async_mode", "async_with_pinned_mem", ranks=2)
    assert code == 0, output
    assert "training waited" in output
    assert numbers(tmp_path) == numbers(reference[0])
    assert saved_steps(tmp_path) == [2, 4, 5]
    for step in (2, 4, 5):
        assert saved(tmp_path, step) == saved(reference[0], step)


def test_no_room_on_one_rank_ends_all_of_them_with_one_error(tmp_path: Path) -> None:
    options = ["--job.dump_folder", str(tmp_path), "--checkpoint.async_mode", "async"]
    code, output = train(*options, ranks=2, patch=patched_train.no_room_on_rank_1)
    assert code == 4, output
    assert "step-4 could not be saved (rank 1: OSError: [Errno 27] File too large)" in output, output
    last = tmp_path / "checkpoint" / "step-2"
    assert (find_problem(last), find_damage(last)) == (None, None)
    assert not (tmp_path / "checkpoint" / "step-4").exists()


STEPS_PER_KILL = 2


@pytest.mark.parametrize(
    ("num_ranks", "num_kills"),
    [
        pytest.param(1, 30, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
        pytest.param(2, 8, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_killed_at_random_moments(num_ranks: int, num_kills: int, tmp_path: Path) -> None:
    steps = STEPS_PER_KILL * (num_kills + 1)
    options = ["--training.steps", str(steps), "--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "2"]
    options += ["--checkpoint.async_mode", "async"]
    options += ["--compile.mode", "eager"]  # starts in no time, and saves the same bits
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    code, output = run(num_ranks, whole, options)
    assert code == 0, output
    step_time = sorted(record["step_time_s"] for record in records(whole))[steps // 2]
    moments, num_killed = random.Random(num_kills), 0
    for number in range(num_kills):
        delay = moments.uniform(0, STEPS_PER_KILL * step_time)
        code, output = run(num_ranks, killed, options, delay)
        if code == 0:  # a machine that was busy is busy no more: the run was done before
            break
        assert code == -signal.SIGKILL or num_ranks > 1, f"kill {number} after {delay} s:\n{output}"
        num_killed += 1
    assert num_killed
    code, output = run(num_ranks, killed, options)
    assert code == 0, output
    assert numbers(killed) == numbers(whole)
    assert saved_steps(killed) == saved_steps(whole) == [steps - 1, steps]
    assert saved(killed, steps) == saved(whole, steps)


def run(num_ranks: int, folder: Path, options: list[str], kill_after: float | None = None) -> Result:
    """Train, and kill every rank after that many seconds of training."""
    options = ["--job.dump_folder", str(folder), *options]
    patch = None if kill_after is None else patched_train.kill_after
    return train(*options, ranks=num_ranks, patch=patch, KILL_AFTER=str(kill_after))
