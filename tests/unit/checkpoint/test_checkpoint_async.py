"""A save in a thread holds the bits of its step, meets no other save, and loses no error."""

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pool import run_on
from torchtitan_graph.checkpoint import Checkpointer, SaveError
from torchtitan_graph.checkpoint import save as saving
from torchtitan_graph.checkpoint.checkpointer import DUE, FAILED, tensors_of
from torchtitan_graph.config import job
from torchtitan_graph.errors import FolderLost
from torchtitan_graph.log import logger
from torchtitan_graph.optim import build_lr_scheduler, build_optimizer

MODES = ("async", "async_with_pinned_mem")


def checkpointer_of(folder: Path, size: int = 2, **options: Any) -> Checkpointer:
    model = nn.Linear(size, size)
    optimizer = build_optimizer(model, job.Optimizer())
    config = job.Checkpoint(**({"enable": True, "async_mode": "async", "last_save_model_only": False} | options))
    return Checkpointer(
        folder, config, model, optimizer, build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=0), 10)
    )


def fill(of: Checkpointer, value: float) -> None:
    with torch.no_grad():
        for tensor in tensors_of(of.model, of.optimizer).values():
            tensor.fill_(value)


def saved_values(folder: Path, step: int) -> set[float]:
    loaded = checkpointer_of(folder, load_step=step)
    fill(loaded, -1.0)
    loaded.load()
    return {
        value for tensor in tensors_of(loaded.model, loaded.optimizer).values() for value in tensor.flatten().tolist()
    }


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Saves wait at their first named point until this is set."""
    event, prepare = threading.Event(), saving.prepare

    def wait_and_prepare(tmp: Path) -> None:
        assert event.wait(60)
        prepare(tmp)

    monkeypatch.setattr(saving, "prepare", wait_and_prepare)
    yield event
    event.set()


@pytest.mark.parametrize("mode", MODES)
def test_what_is_saved_is_what_was_there_at_the_step(mode: str, gate: threading.Event, tmp_path: Path) -> None:
    run = checkpointer_of(tmp_path, async_mode=mode)
    fill(run, 1.0)
    run.save(1, {})
    fill(run, 2.0)
    gate.set()
    run.save(2, {})
    fill(run, 3.0)
    run.wait()
    assert (saved_values(tmp_path, 1), saved_values(tmp_path, 2)) == ({1.0}, {2.0})


def test_without_the_copy_it_would_not_be(
    gate: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving.Saver, "_copy", lambda _, chunks: chunks)
    run = checkpointer_of(tmp_path)
    fill(run, 1.0)
    run.save(1, {})
    fill(run, 2.0)
    gate.set()
    run.wait()
    assert saved_values(tmp_path, 1) == {2.0}


def test_pinned_mode_copies_into_the_same_memory(tmp_path: Path) -> None:
    kept = {}
    for mode in MODES:
        saver = checkpointer_of(tmp_path, async_mode=mode).saver
        chunks = {"x": saving.chunk_of(torch.ones(3))}
        kept[mode] = saver._copy(chunks)["x"].local is saver._copy(chunks)["x"].local
    assert kept == {"async": False, "async_with_pinned_mem": True}


def test_a_save_that_is_due_while_one_runs_waits_for_it(
    gate: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("INFO", logger.name)
    run = checkpointer_of(tmp_path)
    run.save(1, {})
    assert not list(tmp_path.iterdir())
    threading.Timer(0.2, gate.set).start()
    run.save(2, {})
    assert (tmp_path / "step-1").is_dir()
    assert "waiting for the last checkpoint to be written" in caplog.messages
    run.wait()
    assert (tmp_path / "step-2").is_dir()


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("point", ["prepare", "commit", "prune"])
def test_a_save_whose_folder_is_lost_amid_it_leaves_the_other_run_s_files_alone(
    point: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is lost before one of the save's changes, and another run has begun a save of the same step."""
    run = checkpointer_of(tmp_path, async_mode=mode, keep_latest_k=1)
    run.save(1, {})
    run.wait()
    before = {"prepare": "none", "commit": "write_manifest", "prune": "write_best"}[point]
    is_lost = point == "prepare"

    def check() -> None:
        if is_lost:
            raise FolderLost("lost")

    def lose_after(function: Callable[..., None]) -> Callable[..., None]:
        def work(*args: Any) -> None:
            nonlocal is_lost
            function(*args)
            is_lost = True
            (tmp_path / "step-2.tmp").mkdir(exist_ok=True)

        return work

    if not is_lost:
        monkeypatch.setattr(saving, before, lose_after(getattr(saving, before)))
    run.saver.check = check
    with pytest.raises(FolderLost), run:
        run.save(2, {})
        run.wait()
    assert (tmp_path / "step-1").is_dir(), "it was pruned"
    assert (tmp_path / "step-2.tmp").is_dir() == (point != "prepare")
    assert (tmp_path / "step-2").is_dir() == (point == "prune")


def test_a_save_that_fails_since_its_folder_is_lost_says_so_and_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run has deleted the unfinished folder, and made its own."""
    run, is_lost = checkpointer_of(tmp_path, async_mode="disabled"), False

    def find_none(*_: Any) -> None:
        nonlocal is_lost
        is_lost = True
        raise FileNotFoundError(2, "No such file or directory")

    def check() -> None:
        if is_lost:
            raise FolderLost("lost")

    monkeypatch.setattr(saving, "write_train_state", find_none)
    run.saver.check = check
    with pytest.raises(FolderLost):
        run.save(2, {})
    assert (tmp_path / "step-2.tmp").is_dir()


def test_the_last_save_is_waited_for(tmp_path: Path) -> None:
    run = checkpointer_of(tmp_path)
    run.save(1, {}, last=True)
    assert (tmp_path / "step-1").is_dir()


def test_leaving_waits_for_the_save_that_runs(gate: threading.Event, tmp_path: Path) -> None:
    with pytest.raises(KeyError), checkpointer_of(tmp_path) as run:
        run.save(1, {})
        threading.Timer(0.2, gate.set).start()
        raise KeyError
    assert (tmp_path / "step-1").is_dir()


def failed(folder: Path) -> Checkpointer:
    """Return a checkpointer whose second save has failed."""

    def prepare(path: Path) -> None:
        raise OSError(f"no room for {path}")

    run = checkpointer_of(folder)
    fill(run, 1.0)
    run.save(1, {})
    run.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "prepare", prepare)
        run.save(2, {})
        assert run.saver._running is not None
        assert isinstance(run.saver._running.exception(60), SaveError)
    return run


def leave(run: Checkpointer) -> None:
    with run:
        pass


@pytest.mark.parametrize(
    "come_next",
    [lambda run: run.save(3, {}), Checkpointer.wait, lambda run: run.check_flags([FAILED]), leave],
    ids=["save", "wait", "hear", "leave"],
)
def test_an_error_is_raised_by_whatever_comes_next(come_next: Callable[[Checkpointer], None], tmp_path: Path) -> None:
    run = failed(tmp_path)
    assert run.flags() == FAILED
    with pytest.raises(SaveError, match=r"step-2 could not be saved \(.*step-2\.tmp"):
        come_next(run)
    assert saved_values(tmp_path, 1) == {1.0}


def test_an_error_while_another_ends_the_run_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    with pytest.raises(KeyError), failed(tmp_path):
        raise KeyError
    assert "step-2 could not be saved" in caplog.text


# Several ranks


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Make the system refuse larger files to this process, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_with_a_full_disk_on(rank: int, folder: Path, mode: str) -> list[str]:
    """Save, and with no room on one rank again; say what each of the following two steps raised on this rank."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(64, 64, bias=False)
    fully_shard(model)
    optimizer = build_optimizer(model, job.Optimizer())
    scheduler = build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=0), 10)
    config = job.Checkpoint(enable=True, async_mode=mode)
    run = Checkpointer(folder, config, model, optimizer, scheduler)
    run.save(1, {})
    raised = []
    try:
        run.wait()
        if torch.distributed.get_rank() == rank:
            with files_of_at_most(10_000):
                run.save(2, {})
                run.wait()
        else:
            run.save(2, {})
            run.wait()
    except SaveError as error:
        raised.append(str(error))
    run.save(3, {})
    run.wait()
    return raised


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_is_an_error_on_all(rank: int, mode: str, tmp_path: Path) -> None:
    raised = run_on(2, save_with_a_full_disk_on, rank, tmp_path, mode, timeout=60)
    assert raised[0] == raised[1]
    (message,) = raised[0]
    assert f"rank {rank}: OSError: [Errno 27] File too large" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3"]


# When


def test_rank_0s_clock_is_everybodys(tmp_path: Path) -> None:
    run = checkpointer_of(tmp_path, async_mode="disabled", interval=100)
    run.check_flags([0, DUE])
    run.maybe_save(3, dict)
    assert not list(tmp_path.iterdir())
    run.check_flags([DUE, 0])
    run.maybe_save(4, dict)
    run.check_flags([0, 0])
    run.maybe_save(5, dict)
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]


def test_the_clock_begins_anew_with_each_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    run = checkpointer_of(tmp_path, async_mode="disabled", interval_minutes=2)

    def news_at(seconds: float) -> int:
        now[0] = seconds
        return run.flags()

    assert [news_at(119), news_at(120), news_at(121)] == [0, DUE, DUE]
    run.save(1, {})
    assert [news_at(240), news_at(241)] == [0, DUE]
    assert checkpointer_of(tmp_path).flags() == 0  # interval_minutes = 0


def test_milestones_are_saved_and_kept(tmp_path: Path) -> None:
    run = checkpointer_of(tmp_path, async_mode="disabled", interval=2, keep_every=5, keep_latest_k=2)
    for step in range(1, 13):
        run.maybe_save(step, dict)
    assert sorted(int(path.name.removeprefix("step-")) for path in tmp_path.iterdir()) == [5, 10, 12]
