"""Checkpoints in a real S3 server that fails, stalls and throttles: they come back whole, with few requests."""

import itertools
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from pool import run_on
from s3 import ACTIONS, BUCKET, Store, at_first, found_by
from torchtitan_graph import patience
from torchtitan_graph.checkpoint import Checkpointer, SaveError
from torchtitan_graph.checkpoint.remote import Remote
from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.optim import build_lr_scheduler, build_optimizer
from torchtitan_graph.transient import is_transient


def checkpointer_of(folder: Path, store: Store, **options: Any) -> Checkpointer:
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, job.Optimizer())
    given = {"enable": True, "last_save_model_only": False, "remote_folder": f"{store.address}/run"} | options
    scheduler = build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=0), 10)
    return Checkpointer(folder, job.Checkpoint(**given), model, optimizer, scheduler)


def save(run: Checkpointer, step: int) -> None:
    with torch.no_grad():
        run.model.weight.fill_(step)
    run.save(step, {"step": step})


def load(folder: Path, store: Store) -> int | None:
    run = checkpointer_of(folder, store)
    state = run.load()
    assert state is None or torch.all(run.model.weight == state["step"])
    return state and state["step"]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stored(store: Store) -> dict[str, bytes]:
    return {key.removeprefix("run/"): store.get(key) for key in store.list_keys()}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow one another closely."""
    monkeypatch.setattr(patience, "FIRST_S", 0.01)
    monkeypatch.setattr(patience, "EVERY_S", 0.05)


def test_a_save_lists_the_address_once_however_many_checkpoints_are_there(store: Store, tmp_path: Path) -> None:
    run, counts = checkpointer_of(tmp_path, store, keep_latest_k=3), []
    for step in range(1, 6):
        store.requests.clear()
        save(run, step)
        counts.append((sum(request.is_list for request in store.requests), len(store.requests)))
    (first, few), *_, (last, as_many), (of_last, number) = counts
    assert first == last == of_last == 1
    assert number == as_many < few + 10  # more by what is deleted
    assert stored(store) == content(tmp_path)


def test_what_others_changed_there_is_seen(store: Store, tmp_path: Path) -> None:
    """Small files that were read before are read again once they are others."""
    run = checkpointer_of(tmp_path / "a", store)
    for step in (1, 2):
        save(run, step)
    other = checkpointer_of(tmp_path / "b", store)
    save(other, 1)
    save(run, 3)
    assert stored(store) == content(tmp_path / "a")


@pytest.mark.parametrize("seed", range(3))
def test_faults_at_random_change_nothing(seed: int, store: Store, tmp_path: Path) -> None:
    random = Random(seed)
    # Without stalls, which take a second each.
    faults = [action for action in ACTIONS if action not in ("stall", "slow")]
    plan = (random.choice(faults) if random.random() < 0.3 else "pass" for _ in itertools.count())
    run = checkpointer_of(tmp_path / "a", store, keep_latest_k=2)
    for step in (1, 2, 3):
        store.plan = plan
        save(run, step)
        store.plan = at_first([])
        assert stored(store) == content(tmp_path / "a")
    store.plan = plan
    assert load(tmp_path / "b", store) == 3
    assert {request.action for request in store.requests} > {"pass", "503", "500", "reset"}


@pytest.mark.parametrize("number", range(5))
def test_a_large_file_goes_through_a_lost_answer_to_each_of_its_requests(
    number: int, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One to begin an upload in parts, two parts, one to end it, and a look at its size."""
    monkeypatch.setattr("s3fs.core.calculate_chunksize", lambda *_, **__: 5 * 2**20)
    data = Random(0).randbytes(10 * 2**20 + 1)
    (tmp_path / "large").write_bytes(data)
    store.plan = at_first(["pass"] * number + ["lost"])
    Remote(f"{store.address}/run").put(tmp_path, ["large"])
    assert store.requests[number].action == "lost" and store.requests[0].method == "POST"
    assert store.get("run/large") == data


def test_a_server_that_stalls_is_asked_again(store: Store, tmp_path: Path) -> None:
    save(checkpointer_of(tmp_path / "a", store), 1)
    store.plan = at_first(["stall"])
    assert load(tmp_path / "b", store) == 1
    assert store.requests[-1].action == "pass"


def test_a_bucket_that_vanishes_is_not_made_again_and_gets_all_once_it_is_back(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    run = checkpointer_of(tmp_path, store)
    save(run, 1)
    store.delete_bucket()
    monkeypatch.setattr(patience, "WAIT_S", 0.1)
    save(run, 2)
    assert "step-2 is whole, but could not be copied" in caplog.text
    assert not [request for request in store.requests if request.method == "PUT" and request.path.strip("/") == BUCKET]
    store.make_bucket()
    save(run, 3)
    assert stored(store) == content(tmp_path)


def test_a_run_does_not_begin_anew_while_its_bucket_is_away(store: Store, tmp_path: Path) -> None:
    save(checkpointer_of(tmp_path / "a", store), 1)
    store.plan = at_first([], then="404")
    with pytest.raises(UserError, match="remote_folder: s3://bucket/run can't be used"):
        load(tmp_path / "b", store)
    with pytest.raises(FileNotFoundError):
        Remote(f"{store.address}/run", is_new=True).sizes()
    store.plan = at_first([])
    assert Remote(f"{store.address}/another").sizes() == {} and load(tmp_path / "b", store) == 1


@pytest.mark.parametrize(
    ("missing", "every"), [(2, 9), *(pytest.param(n, 1, marks=pytest.mark.slow) for n in (1, 2, 5))]
)
def test_a_bucket_that_is_missing_for_a_while_is_waited_for(
    missing: int, every: int, store: Store, tmp_path: Path
) -> None:
    """From each request of a save on, with some to delete; and in a run that has a checkpoint, at its start."""
    run = checkpointer_of(tmp_path, store, keep_latest_k=2)
    for step in (1, 2):
        save(run, step)
    store.requests.clear()
    save(run, 3)
    for at in range(0, len(store.requests), every):
        store.plan = at_first(["pass"] * at + ["404"] * missing)
        save(run, 4 + at)
        assert stored(store) == content(tmp_path)
    store.plan = at_first(["404"] * missing)
    assert load(tmp_path, store) == 4 + at


def test_a_run_that_ended_without_its_last_copy_makes_it_when_it_is_started_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "WAIT_S", 0.1)
    store.delete_bucket()
    run = checkpointer_of(tmp_path, store)
    says = "step-3 is whole, but could not be copied .*start the run again, which copies"
    with pytest.raises(SaveError, match=says) as caught:
        run.save(3, {"step": 3}, last=True)
    assert is_transient(caught.value)
    store.make_bucket()
    run.copy_last(3)
    assert stored(store) == content(tmp_path)


@pytest.mark.parametrize("last", [False, True])
def test_patience_ends(
    last: bool, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "WAIT_S", 0.2)
    monkeypatch.setattr(logger, "propagate", True)
    store.plan = at_first([], then="500")
    run = checkpointer_of(tmp_path, store)
    with pytest.raises(SaveError) if last else nullcontext() as caught:
        run.save(1, {"step": 1}, last=last)
    if caught is not None:
        assert is_transient(caught.value)
    assert "storage is unavailable; retrying" in caplog.text
    with pytest.raises(OSError) as at_start:
        load(tmp_path / "b", store)
    assert is_transient(at_start.value) and not isinstance(at_start.value, UserError)


def train_on_ranks(folder: Path, env: dict[str, str], step: int | None) -> list[float]:
    """Save `step`, or where it is None load; return the numbers of this rank."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(6, 6, bias=False)
    fully_shard(model)
    optimizer = build_optimizer(model, job.Optimizer())
    scheduler = build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=0), 10)
    config = job.Checkpoint(enable=True, last_save_model_only=False, remote_folder=f"s3://{BUCKET}/run")
    local = model.weight.detach().to_local()
    with found_by(env), pytest.MonkeyPatch.context() as patch:
        patch.setattr(patience, "FIRST_S", 0.01)
        patch.setattr(patience, "EVERY_S", 0.05)
        run = Checkpointer(folder, config, model, optimizer, scheduler)
        if step is None:
            assert run.load() is not None
        else:
            with torch.no_grad():
                local.copy_(torch.arange(local.numel()).view_as(local) + step)
            run.save(step, {"step": step})
    return local.flatten().tolist()


def test_two_ranks_save_and_load_through_faults(store: Store, tmp_path: Path) -> None:
    random = Random(0)
    store.plan = (random.choice(["pass", "pass", "500", "reset", "lost", "half"]) for _ in itertools.count())
    saved = run_on(2, train_on_ranks, tmp_path / "a", store.env(), 7, timeout=60)
    loaded = run_on(2, train_on_ranks, tmp_path / "b", store.env(), None, timeout=60)
    assert loaded == saved
    assert stored(store) == content(tmp_path / "a") == content(tmp_path / "b")
