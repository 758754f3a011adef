"""A disk of the network that fails for a while, at any place of a save: the save is begun again, on all ranks."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pool import run_on
from torchtitan_graph import patience
from torchtitan_graph.checkpoint import Checkpointer, SaveError
from torchtitan_graph.checkpoint import save as saves
from torchtitan_graph.checkpoint.folder import find_damage, list_steps
from torchtitan_graph.config import job
from torchtitan_graph.optim import build_lr_scheduler, build_optimizer
from torchtitan_graph.transient import is_transient


def checkpointer_of(folder: Path, **options: Any) -> Checkpointer:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, job.Optimizer())
    config = job.Checkpoint(enable=True, last_save_model_only=False, **options)
    scheduler = build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=0), 10)
    return Checkpointer(folder, config, model, optimizer, scheduler)


def fails(function: Callable[..., Any], after: bool, times: int = 1) -> Callable[..., Any]:
    """Return a function that raises as a file server does that restarts, before or after it did its work."""
    left = iter(range(times))

    def failing(*arguments: Any, **options: Any) -> Any:
        is_bad = next(left, None) is not None
        result = None if is_bad and not after else function(*arguments, **options)
        if is_bad:
            raise OSError(errno.ESTALE, "Stale file handle")
        return result

    return failing


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", saves.SAVE_POINTS)
def test_a_hiccup_at_each_point_of_a_save(
    point: str, after: bool, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "FIRST_S", 0.01)
    with checkpointer_of(tmp_path, keep_latest_k=2, async_mode=mode) as run:
        for step in (1, 2, 3):
            monkeypatch.setattr(saves, point, fails(getattr(saves, point), after))
            run.save(step, {"step": step})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]
    assert not any(map(find_damage, list_steps(tmp_path).values()))
    assert checkpointer_of(tmp_path).load() == {"step": 3}


def test_one_that_lasts_ends_the_run_for_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "WAIT_S", 0.0)
    monkeypatch.setattr(saves, "commit", fails(saves.commit, False, times=1000))
    with pytest.raises(SaveError) as caught:
        checkpointer_of(tmp_path).save(1, {"step": 1})
    assert is_transient(caught.value)


def save_on_ranks(folder: Path, rank: int, times: int) -> bool | None:
    """Save while one rank's disk fails so often; return whether that failed for storage alone, None if it did not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patience, "FIRST_S", 0.01)
        patch.setattr(patience, "WAIT_S", 0.5 if times > 3 else 60.0)  # three tries may take long on a busy machine
        if torch.distributed.get_rank() == rank:
            patch.setattr(saves, "_sums_of_this_rank", fails(saves._sums_of_this_rank, False, times))
        try:
            checkpointer_of(folder).save(1, {"step": 1})
        except SaveError as error:
            return is_transient(error)
    return None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hiccup_of_one_rank_is_one_of_all(rank: int, tmp_path: Path) -> None:
    assert run_on(2, save_on_ranks, tmp_path / "a", rank, 3, timeout=60) == [None, None]
    assert find_damage(tmp_path / "a" / "step-1") is None
    assert run_on(2, save_on_ranks, tmp_path / "b", rank, 10**9, timeout=60) == [True, True]
