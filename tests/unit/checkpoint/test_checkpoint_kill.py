"""A save killed at any point leaves the last good checkpoint, whole, and nothing in the way of the next save."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dying import run_in_a_child
from torchtitan_graph.checkpoint import SAVE_POINTS, Checkpointer
from torchtitan_graph.checkpoint import save as saving
from torchtitan_graph.config import job
from torchtitan_graph.optim import build_lr_scheduler, build_optimizer

# What changes the disk, as Python does it: DCP, pathlib and shutil all end here.
DISK_OPERATIONS = ("mkdir", "fsync", "rename", "unlink", "rmdir")


def checkpointer_of(folder: Path, value: float) -> Checkpointer:
    """Return the checkpointer of a run whose every number is `value`."""
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, job.Optimizer())
    with torch.no_grad():
        for tensor in tensors_of(model, optimizer):
            tensor.fill_(value)
    config = job.Checkpoint(enable=True, keep_latest_k=2)
    return Checkpointer(
        folder, config, model, optimizer, build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=0), 10)
    )


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]


def save(folder: Path, step: int, value: float) -> None:
    checkpointer_of(folder, value).save(step, {"step": step, "value": value})


def load(folder: Path) -> tuple[int, float]:
    """Load, and return step and value of what was loaded, if all of it is of one piece."""
    loaded = checkpointer_of(folder, -1.0)
    state = loaded.load()
    assert state is not None
    for tensor in tensors_of(loaded.model, loaded.optimizer):
        assert torch.equal(tensor, torch.full_like(tensor, state["value"]))
    return state["step"], state["value"]


def kill_myself(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def with_kill_at(point: str, after: bool) -> None:
    """Make the named function of a save kill this process, before or after it does its work."""
    function = getattr(saving, point)

    def run_and_die(*args: Any) -> None:
        function(*args)
        kill_myself()

    setattr(saving, point, run_and_die if after else kill_myself)


def with_kill_at_disk_operation(number: int) -> None:
    """Make this process kill itself in place of its `number`-th change to the disk."""
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                kill_myself()
            return function(*args, **kwargs)

        return run

    for name in DISK_OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))


def two_checkpoints(folder: Path) -> None:
    save(folder, 1, 10.0)
    save(folder, 2, 20.0)


def assert_usable(folder: Path, allowed: set[tuple[int, float]]) -> None:
    assert load(folder) in allowed
    save(folder, 9, 90.0)
    assert load(folder) == (9, 90.0)
    assert all(path.name.removeprefix("step-").isdigit() for path in folder.iterdir()), "leftovers"


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", SAVE_POINTS)
def test_killed_at_a_named_point(point: str, after: bool, tmp_path: Path) -> None:
    two_checkpoints(tmp_path)

    def work() -> None:
        with_kill_at(point, after)
        save(tmp_path, 3, 30.0)

    assert run_in_a_child(work) == signal.SIGKILL
    complete = SAVE_POINTS.index(point) + after > SAVE_POINTS.index("write_manifest")
    assert_usable(tmp_path, {(3, 30.0)} if complete else {(2, 20.0)})


@pytest.mark.parametrize(
    "step",
    [3, pytest.param(2, marks=pytest.mark.slow)],
    ids=["a new step", "a step that is there already"],
)
def test_killed_at_every_change_to_the_disk(step: int, tmp_path: Path) -> None:
    outcomes = []
    for number in range(1, 100):
        folder = tmp_path / str(number)
        two_checkpoints(folder)

        def work(number: int = number, folder: Path = folder) -> None:
            with_kill_at_disk_operation(number)
            save(folder, step, 30.0)

        if run_in_a_child(work) == 0:
            break
        outcomes.append(load(folder))
        assert_usable(folder, {(2, 20.0), (step, 30.0)})
    assert number > 10
    assert outcomes == sorted(outcomes), "once the new one is there, it stays"
    assert outcomes[0] == (2, 20.0) and outcomes[-1] == (step, 30.0)


def test_a_folder_renamed_before_all_its_files_are_written_is_not_taken_for_complete(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)

    def work() -> None:
        write_train_state = saving.write_train_state

        def too_early(tmp: Path, state: dict[str, Any]) -> None:
            os.rename(tmp, tmp.with_suffix(""))
            kill_myself()
            write_train_state(tmp, state)

        saving.write_train_state = too_early
        save(tmp_path, 3, 30.0)

    assert run_in_a_child(work) == signal.SIGKILL
    assert (tmp_path / "step-3").is_dir()
    assert load(tmp_path) == (2, 20.0)
