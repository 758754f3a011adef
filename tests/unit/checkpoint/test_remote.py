"""Checkpoints at an address: the same bits come back, and nothing torn, damaged or hostile is ever taken."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from pool import run_on
from torchtitan_graph import patience
from torchtitan_graph.checkpoint import Checkpointer, SaveError, check_choice
from torchtitan_graph.checkpoint import remote as remotes
from torchtitan_graph.checkpoint.checkpointer import tensors_of
from torchtitan_graph.checkpoint.folder import MANIFEST, TRAIN_STATE
from torchtitan_graph.checkpoint.remote import Remote
from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.optim import build_lr_scheduler, build_optimizer

DATA = "__0_0.distcp"
ADDRESS = "memory://bucket/run"


@pytest.fixture(autouse=True)
def memory() -> Iterator[MemoryFileSystem]:
    """An empty store, whose files are `store`, by path."""
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log can be read by the test."""
    monkeypatch.setattr(logger, "propagate", True)


def checkpointer_of(folder: Path, **options: Any) -> Checkpointer:
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, job.Optimizer())
    given = {"enable": True, "last_save_model_only": False, "remote_folder": ADDRESS} | options
    scheduler = build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=0), 10)
    return Checkpointer(folder, job.Checkpoint(**given), model, optimizer, scheduler)


def fill(of: Checkpointer, value: float) -> Checkpointer:
    with torch.no_grad():
        for tensor in tensors_of(of.model, of.optimizer).values():
            tensor.fill_(value)
    return of


def save(folder: Path, *steps: int, last: bool = False, **options: Any) -> None:
    """Save steps whose every number is the step."""
    with checkpointer_of(folder, **options) as run:
        for step in steps:
            fill(run, step).save(step, {"step": step}, last=last)


def load(folder: Path, num_steps: int | None = None, **options: Any) -> int | None:
    """Load, check that all that was loaded is of one step, and return the step; None where nothing was loaded."""
    run = fill(checkpointer_of(folder, **options), -1.0)
    state = run.load(num_steps)
    step = -1 if state is None else state["step"]
    for tensor in tensors_of(run.model, run.optimizer if run.loaded_optimizer else None).values():
        assert torch.equal(tensor, torch.full_like(tensor, step))
    return None if state is None else step


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stored(memory: MemoryFileSystem) -> dict[str, bytes]:
    return {path.removeprefix("/bucket/run/"): memory.cat_file(path) for path in memory.store}


def steps_there() -> list[int]:
    return [step for step, remote in Remote(ADDRESS).list_steps().items() if not remote.find_problem()]


# There and back


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_what_is_saved_is_there_and_comes_back(mode: str, tmp_path: Path, memory: MemoryFileSystem) -> None:
    save(tmp_path / "a", 1, 2, async_mode=mode)
    assert stored(memory) == content(tmp_path / "a")
    assert load(tmp_path / "b") == 2
    assert content(tmp_path / "b" / "step-2") == content(tmp_path / "a" / "step-2")
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["step-2"]  # and no more than that


def train_on_ranks(folder: Path, address: str, value: float | None) -> list[float]:
    """Save `value` as step 3, or where it is None load; return the numbers of this rank."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(6, 6, bias=False)
    fully_shard(model)
    optimizer = build_optimizer(model, job.Optimizer())
    scheduler = build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=0), 10)
    config = job.Checkpoint(enable=True, last_save_model_only=False, remote_folder=address)
    run = Checkpointer(folder, config, model, optimizer, scheduler)
    local = model.weight.detach().to_local()
    if value is not None:
        with torch.no_grad():
            local.copy_(torch.arange(local.numel()).view_as(local) + value)
        run.save(3, {"step": 3})
    else:
        assert run.load() == {"step": 3}
    return local.flatten().tolist()


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_share_the_work(world_size: int, tmp_path: Path) -> None:
    address = f"file://{tmp_path / 'there'}"
    saved = run_on(world_size, train_on_ranks, tmp_path / "a", address, 0.5, timeout=60)
    loaded = run_on(world_size, train_on_ranks, tmp_path / "b", address, None, timeout=60)
    assert loaded == saved
    assert content(tmp_path / "there") == content(tmp_path / "a") == content(tmp_path / "b")


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    address = f"file://{tmp_path / 'there'}"
    saved = run_on(2, train_on_ranks, tmp_path / "a", address, 0.5, timeout=60)
    (loaded,) = run_on(1, train_on_ranks, tmp_path / "b", address, None, timeout=60)
    assert loaded == saved[0] + saved[1]


def test_a_folder_that_is_as_new_is_not_fetched(tmp_path: Path) -> None:
    save(tmp_path / "a", 1, 2)
    save(tmp_path / "b", 2, remote_folder=None)
    before = (tmp_path / "b" / "step-2").stat().st_ino
    assert load(tmp_path / "b") == 2
    assert (tmp_path / "b" / "step-2").stat().st_ino == before


def test_load_step_is_fetched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "a", 1, 2, 3)
    assert load(tmp_path / "b", load_step=2) == 2
    assert "checkpoints of later steps (3)" in caplog.text
    with pytest.raises(UserError, match=r"load_step = 7: no such .* there are: 1, 2, 3"):
        load(tmp_path / "b", load_step=7)


def test_load_only_fetches_and_uploads_nothing(tmp_path: Path, memory: MemoryFileSystem) -> None:
    save(tmp_path / "a", 1)
    before = stored(memory)
    assert load(tmp_path / "b", load_only=True) == 1
    save(tmp_path / "b", 2, load_only=True)
    assert stored(memory) == before


def test_training_goes_on_from_the_last_full_one(tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    save(tmp_path / "a", 2, last=True, last_save_model_only=True)
    assert load(tmp_path / "b", num_steps=3) == 1
    shutil.rmtree(tmp_path / "b")
    run = fill(checkpointer_of(tmp_path / "b"), -1.0)
    assert run.load(num_steps=2) == {"step": 2} and not run.loaded_optimizer


def test_a_run_whose_only_checkpoint_there_is_of_the_model_does_not_begin_anew(tmp_path: Path) -> None:
    save(tmp_path / "a", 2, last=True, last_save_model_only=True)
    with pytest.raises(UserError, match="step-2 holds only the model"):
        load(tmp_path / "b", num_steps=3)


# initial_load_path


INITIAL = {"remote_folder": None, "initial_load_path": f"{ADDRESS}/step-2", "initial_load_model_only": False}


def test_a_run_begins_with_a_checkpoint_at_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a", 1, 2)
    assert load(tmp_path / "b", **INITIAL) == 2
    assert content(tmp_path / "b") == {
        f"initial/step-2/{name}": data for name, data in content(tmp_path / "a" / "step-2").items()
    }
    monkeypatch.setattr(remotes, "commit", None)  # fetching it again would fail
    assert load(tmp_path / "b", **INITIAL) == 2


def test_what_was_fetched_to_begin_with_is_fetched_again_where_it_is_not_the_same(tmp_path: Path) -> None:
    save(tmp_path / "a", 2)
    assert load(tmp_path / "b", **INITIAL) == 2
    flip(tmp_path / "b" / "initial" / "step-2" / DATA)
    assert load(tmp_path / "b", **INITIAL) == 2
    fill(other := checkpointer_of(tmp_path / "a"), 5).save(2, {"step": 5})
    assert other and load(tmp_path / "b", **INITIAL) == 5


def test_no_checkpoint_at_an_address_to_begin_with(tmp_path: Path, memory: MemoryFileSystem) -> None:
    save(tmp_path / "a", 2)
    with pytest.raises(UserError, match=r"initial_load_path = '.*step-3' is not a checkpoint: it has no manifest.json"):
        load(tmp_path / "b", **INITIAL | {"initial_load_path": f"{ADDRESS}/step-3"})
    damage(memory, "step-2", DATA)
    with pytest.raises(UserError, match=r"initial_load_path = '.*step-2' is not a checkpoint: .*distcp is damaged"):
        load(tmp_path / "b", **INITIAL)


def test_what_a_run_begins_with_is_looked_for_before_the_run_is_built(
    tmp_path: Path, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_address = job.Checkpoint(enable=True, initial_load_path=f"{ADDRESS}/step-3")
    with_copies = job.Checkpoint(enable=True, remote_folder=ADDRESS, initial_load_path="nowhere")
    for config, said in ((at_address, "step-3' is not a checkpoint"), (with_copies, "there is no such folder")):
        with pytest.raises(UserError, match=f"initial_load_path = .*{said}"):
            check_choice(tmp_path / "b", config, num_steps=5)
    monkeypatch.setenv("RANK", "1")  # rank 0 looks
    check_choice(tmp_path / "b", with_copies, num_steps=5)
    monkeypatch.setenv("RANK", "0")
    save(tmp_path / "a", 2)
    check_choice(tmp_path / "b", with_copies, num_steps=5)  # it goes on from the copies


# Torn and damaged


class Killed(BaseException):
    """Ends a save as a kill would: no code of the save handles it."""


def failing_at(number: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store fail in place of its `number`-th change, and of all after it."""
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count >= number:
                raise error
            return function(*args, **kwargs)

        return run

    for name in ("put_file", "rm_file"):
        monkeypatch.setattr(MemoryFileSystem, name, counted(getattr(MemoryFileSystem, name)))


def test_a_copy_begins_with_the_file_that_tells_a_leftover_and_ends_with_the_manifest(
    tmp_path: Path, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a", 1)
    copied, copy = [], MemoryFileSystem.cp_file
    monkeypatch.setattr(
        MemoryFileSystem, "cp_file", lambda self, a, b: (copied.append(a.rpartition("/")[2]), copy(self, a, b))
    )
    Remote(f"{ADDRESS}/step-1").stored().copy_to(Remote(f"{ADDRESS}/step-1-model"))
    assert (copied[0], copied[-1]) == (TRAIN_STATE, MANIFEST) and len(copied) > 3


@pytest.mark.parametrize("step", [3, 2], ids=["a new step", "a step that is there already"])
def test_killed_at_every_change_there(step: int, tmp_path: Path, memory: MemoryFileSystem) -> None:
    outcomes = []
    for number in range(1, 100):
        a, b = tmp_path / f"a{number}", tmp_path / f"b{number}"
        memory.store.clear()
        save(a, 1, 2, keep_latest_k=2)
        shutil.rmtree(a)
        fill(run := checkpointer_of(a, keep_latest_k=2), 3.0)
        with pytest.MonkeyPatch.context() as patch:
            failing_at(number, Killed(), patch)
            try:
                run.save(step, {"step": 3})
                break
            except Killed:
                pass
        outcomes.append(load(b))
        save(a, 4, keep_latest_k=2)
        assert load(tmp_path / f"c{number}") == 4
        assert stored(memory) == content(a), "the next save completes it, and leaves nothing behind"
    assert number > 6
    # A new one is whole before any other goes; one that is saved again makes place first.
    assert (outcomes[0], set(outcomes), outcomes[-1]) == ((2, {2, 3}, 3) if step == 3 else (2, {1, 2}, 1))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def damage(memory: MemoryFileSystem, step: str, name: str, size: int | None = None) -> None:
    """Change one bit of a file there, or cut it to `size`."""
    path = f"/bucket/run/{step}/{name}"
    data = bytearray(memory.cat_file(path))
    data[len(data) // 2] ^= size is None
    memory.pipe_file(path, bytes(data[:size]))


@pytest.mark.parametrize("size", [None, 10], ids=["flipped", "truncated"])
@pytest.mark.parametrize("name", [DATA, ".metadata", MANIFEST, TRAIN_STATE])
def test_an_older_one_is_taken_in_the_place_of_a_damaged_one(
    name: str, size: int | None, tmp_path: Path, memory: MemoryFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "a", 1, 2, 3)
    damage(memory, "step-3", name, size)
    assert load(tmp_path / "b") == 2
    assert "skipping checkpoint memory://bucket/run/step-3: its " in caplog.text
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["step-2"]
    save(tmp_path / "c", 2, remote_folder=None)
    caplog.clear()
    assert load(tmp_path / "c") == 2
    assert "fetched" not in caplog.text


def test_a_missing_file_there_is_found(tmp_path: Path, memory: MemoryFileSystem) -> None:
    save(tmp_path / "a", 1, 2)
    memory.rm_file(f"/bucket/run/step-2/{DATA}")
    assert load(tmp_path / "b") == 1


@pytest.mark.parametrize(("size", "problem"), [(None, "is damaged"), (10, "has 10 bytes")])
def test_when_all_there_are_damaged_nothing_begins_anew(
    size: int | None, problem: str, tmp_path: Path, memory: MemoryFileSystem
) -> None:
    save(tmp_path / "a", 1)
    damage(memory, "step-1", DATA, size)
    with pytest.raises(UserError, match=rf"no checkpoint that is whole:\n.*step-1: its file .* {problem}"):
        load(tmp_path / "b")


def test_a_first_save_that_was_killed_is_none(tmp_path: Path, memory: MemoryFileSystem) -> None:
    save(tmp_path / "a", 1)
    memory.rm_file(f"/bucket/run/step-1/{MANIFEST}")
    assert load(tmp_path / "b") is None


def test_a_store_that_loses_bytes_is_found_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def lose(of: MemoryFileSystem, here: str, there: str) -> None:
        of.pipe_file(there, Path(here).read_bytes()[: 10 if here.endswith(DATA) else None])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", lose)
        save(tmp_path / "a", 1)
    assert "is not what was written: its file __0_0.distcp has 10 bytes" in caplog.text
    assert not Remote(f"{ADDRESS}/step-1").sizes().keys() & {MANIFEST}


def test_a_damaged_one_here_is_fetched(tmp_path: Path) -> None:
    save(tmp_path / "a", 1, 2)
    flip(tmp_path / "a" / "step-2" / DATA)
    assert load(tmp_path / "a") == 2


def test_a_renamed_one_is_not_taken(tmp_path: Path, memory: MemoryFileSystem) -> None:
    save(tmp_path / "a", 1)
    memory.cp("/bucket/run/step-1/", "/bucket/run/step-9/", recursive=True)
    assert load(tmp_path / "b") == 1


@pytest.mark.parametrize("name", ["../x", "/x", "..", "", "a/../../x"])
def test_a_manifest_that_leads_elsewhere_writes_nothing(name: str, tmp_path: Path, memory: MemoryFileSystem) -> None:
    save(tmp_path / "a", 1, 2)
    path = f"/bucket/run/step-2/{MANIFEST}"
    listed = json.loads(memory.cat_file(path))
    listed["files"][name] = 4
    memory.pipe_file(path, json.dumps(listed).encode())
    if name:
        memory.pipe_file(f"/bucket/run/step-2/{name}", b"evil")
    memory.pipe_file("/bucket/run/x", b"evil")
    assert load(tmp_path / "b") == 1
    assert content(tmp_path / "b").keys() == {f"step-1/{name}" for name in content(tmp_path / "a" / "step-1")}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


# Failing


@pytest.mark.parametrize("what", ["a FIFO", "a sparse giant"])
@pytest.mark.parametrize("name", [MANIFEST, TRAIN_STATE])
def test_what_is_no_small_file_there_is_not_fetched(what: str, name: str, tmp_path: Path) -> None:
    address = f"file://{tmp_path / 'there'}"
    save(tmp_path / "run", 1, 2, remote_folder=address)
    file = tmp_path / "there" / "step-2" / name
    file.unlink()
    if what == "a FIFO":
        os.mkfifo(file)
    else:
        with file.open("wb") as stream:
            stream.truncate(2**42)
    assert load(tmp_path / "new", remote_folder=address) == 1


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_failed_upload_is_caught_up_with(mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with checkpointer_of(tmp_path / "a", async_mode=mode) as run:
        fill(run, 1).save(1, {"step": 1})
        run.wait()
        with pytest.MonkeyPatch.context() as patch:
            failing_at(3, OSError("quota exceeded"), patch)
            fill(run, 2).save(2, {"step": 2})
            run.wait()
        (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert "step-2 is whole, but could not be copied to memory://bucket/run (" in error
        assert "quota exceeded" in error and "the next save tries again" in error
        assert steps_there() == [1]
        assert load(tmp_path / "b") == 1
        fill(run, 3).save(3, {"step": 3})
    assert steps_there() == [1, 2, 3]
    assert load(tmp_path / "c") == 3


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_the_last_upload_must_not_fail(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_at(1, OSError("quota exceeded"), monkeypatch)
    with pytest.raises(SaveError, match=r"a/step-2 is whole, but could not be copied to memory://bucket/run .*quota"):
        save(tmp_path / "a", 2, last=True, async_mode=mode)
    assert load(tmp_path / "a", remote_folder=None) == 2


def fail_on_one_rank(rank: int, folder: Path, address: str, last: bool) -> str | None:
    """Save while `put` fails on one rank; return the error that this rank saw."""
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == rank:

            def put(*_: Any) -> None:
                raise OSError("quota exceeded")

            patch.setattr(Remote, "put", put)
        run = checkpointer_of(folder, remote_folder=address)
        try:
            fill(run, 1).save(1, {"step": 1}, last=last)
        except SaveError as error:
            return str(error)
    return None


@pytest.mark.parametrize("rank", [0, 1])
def test_an_upload_that_fails_on_one_rank_fails_on_all(rank: int, tmp_path: Path) -> None:
    address = f"file://{tmp_path / 'there'}"
    assert run_on(2, fail_on_one_rank, rank, tmp_path / "a", address, False, timeout=60) == [None, None]
    first, second = run_on(2, fail_on_one_rank, rank, tmp_path / "a", address, True, timeout=60)
    assert first == second and "quota exceeded" in first
    assert not list((tmp_path / "there").rglob(MANIFEST))


@pytest.mark.parametrize(
    ("options", "name"), [({}, "remote_folder"), (INITIAL, "initial_load_path")], ids=["remote_folder", "initial"]
)
@pytest.mark.parametrize("method", ["ls", "get_file"])
def test_a_run_does_not_begin_without_an_address(
    method: str, options: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a", 1, 2)

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError("no right to read")

    monkeypatch.setattr(MemoryFileSystem, method, refused)
    with pytest.raises(UserError, match=rf"checkpoint.{name}: memory://bucket/run.* can't be .*no right to read"):
        load(tmp_path / "b", **options)


@pytest.mark.parametrize("options", [{}, INITIAL], ids=["remote_folder", "initial"])
@pytest.mark.parametrize("method", ["ls", "get_file"])
def test_an_address_that_stays_away_is_no_mistake_of_the_user(
    method: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a", 1, 2)

    def away(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(patience, "WAIT_S", 0.0)
    monkeypatch.setattr(MemoryFileSystem, method, away)
    with pytest.raises(ConnectionError, match="no route to host"):
        load(tmp_path / "b", **options)


def test_an_empty_address_is_a_new_run(tmp_path: Path) -> None:
    assert load(tmp_path / "a") is None


# Pruning


def test_there_is_kept_what_is_kept_here(tmp_path: Path, memory: MemoryFileSystem) -> None:
    save(tmp_path / "a", *range(1, 13), keep_latest_k=2, keep_every=5)
    assert steps_there() == [5, 10, 11, 12]
    assert stored(memory) == content(tmp_path / "a")


def test_a_new_folder_prunes_what_an_older_one_copied(tmp_path: Path) -> None:
    save(tmp_path / "a", 4, 5, 6, keep_latest_k=2, keep_every=4)
    assert load(tmp_path / "b", keep_latest_k=2, keep_every=4) == 6
    save(tmp_path / "b", 7, 9, keep_latest_k=2, keep_every=4)
    assert steps_there() == [4, 7, 9]


def test_a_step_that_is_saved_again_is_copied_again(tmp_path: Path, memory: MemoryFileSystem) -> None:
    save(tmp_path / "a", 1, 2)
    fill(run := checkpointer_of(tmp_path / "a"), 5).save(2, {"step": 5})
    assert run and load(tmp_path / "b") == 5
    assert stored(memory) == content(tmp_path / "a")


def test_what_others_keep_there_stays(tmp_path: Path, memory: MemoryFileSystem) -> None:
    others = {"step-1/__0_0.distcp": b"x", "step-1/.metadata": b"y", "notes": b"z", "step-1-hf/config.json": b"{}"}
    for name, data in others.items():
        memory.pipe_file(f"/bucket/run/{name}", data)
    save(tmp_path / "a", 2, 3, 4, keep_latest_k=2)
    assert others.items() <= stored(memory).items()
    assert steps_there() == [3, 4]


@pytest.mark.parametrize("steps", [(2, 4), (3, 4)], ids=["saved again", "pruned"])
def test_the_model_that_a_run_ended_with_is_kept_there_by_a_longer_run(
    steps: tuple[int, ...], tmp_path: Path, memory: MemoryFileSystem
) -> None:
    save(tmp_path / "a", 1)
    save(tmp_path / "a", 2, last=True, last_save_model_only=True)
    before = {path: data for path, data in stored(memory).items() if path.startswith("step-2/")}
    save(tmp_path / "b", *steps, keep_latest_k=1)  # from an empty disk
    kept = "step-2-model" if 2 in steps else "step-2"
    assert {path.partition("/")[0] for path in stored(memory)} == {"step-4", kept}
    after = {path.replace(kept, "step-2"): data for path, data in stored(memory).items() if path.startswith(f"{kept}/")}
    assert after == before
