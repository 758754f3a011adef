"""One run at a time copies its checkpoints to an address."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from s3 import Store, at_first
from torchtitan_graph.config import load
from torchtitan_graph.errors import FolderLost, UserError
from torchtitan_graph.run import copies
from torchtitan_graph.run.copies import NAME, Copying
from torchtitan_graph.run.folder import RunFolder
from torchtitan_graph.run.status import FINISHED

HOLD = """
import os, sys
from pathlib import Path
from torchtitan_graph.run.copies import Copying
Path(sys.argv[2]).mkdir()
Copying(sys.argv[1], Path(sys.argv[2]), False, False)
os._exit(0)
"""


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "STALE_AFTER_S", 0.3)
    monkeypatch.setattr(copies, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(copies, "BEAT_S", 0.01)


def run_in(folder: Path, address: str, *words: str) -> RunFolder:
    options = ["--checkpoint.enable", "--checkpoint.remote_folder", address, "--job.dump_folder", str(folder), *words]
    return RunFolder(load(options))


def with_a_step(folder: Path) -> Path:
    (folder / "checkpoint" / "step-1").mkdir(parents=True)
    return folder


def test_a_second_run_is_refused_while_the_first_writes_there(tmp_path: Path, store: Store) -> None:
    for address in (f"file://{tmp_path / 'there'}", f"{store.address}/run"):
        first = run_in(tmp_path / "first", address)
        second = rf"remote_folder = '{address}': another run .*{tmp_path}/first.* this run is in {tmp_path}/second"
        with pytest.raises(UserError, match=second):
            run_in(tmp_path / "second", address)
        assert not (tmp_path / "second" / "run.lock").exists()
        first.check_copying()
        first.close(FINISHED)
        shutil.rmtree(tmp_path / "first")


def test_a_run_with_other_checkpoints_is_refused_after_the_first_has_ended(tmp_path: Path) -> None:
    address = f"file://{tmp_path / 'there'}"
    run_in(tmp_path / "first", address).close(FINISHED)
    with pytest.raises(UserError, match="has copies of another run's checkpoints, that in .*/first .*/second"):
        run_in(with_a_step(tmp_path / "second"), address)
    run_in(tmp_path / "second", address, "--checkpoint.load_only").close(FINISHED)  # writes nothing there


def test_a_run_goes_on_in_its_folder_and_in_a_new_one(tmp_path: Path) -> None:
    address = f"file://{tmp_path / 'there'}"
    run_in(tmp_path / "first", address).close(FINISHED)
    for name in ("first", "second", "first"):  # of an empty one the run is now the first's
        run_in(tmp_path / name, address).close(FINISHED)
        with_a_step(tmp_path / name) if not (tmp_path / name / "checkpoint").exists() else None
    names = {json.loads((folder / NAME).read_text())["run"] for folder in (tmp_path / "first", tmp_path / "there")}
    assert len(names) == 1


def test_a_killed_process_is_not_waited_for_where_it_is_known_to_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"file://{tmp_path / 'there'}"
    subprocess.run([sys.executable, "-c", HOLD, address, str(tmp_path / "first")], check=True)
    monkeypatch.setattr(copies, "STALE_AFTER_S", 1e9)
    (tmp_path / "second").mkdir()
    Copying(address, tmp_path / "second", False, False).release()


def test_one_of_another_machine_is_waited_for_but_not_in_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"file://{tmp_path / 'there'}"
    waits: list[float] = []
    for name in ("first", "first", "second"):
        (tmp_path / name).mkdir(exist_ok=True)
        with monkeypatch.context() as patch:
            patch.setattr(copies, "BEAT_S", 1e9)
            patch.setenv("SLURMD_NODENAME", f"node of {name}")
            Copying(address, tmp_path / name, False, False, wait=waits.append)
        assert bool(waits) == (name == "second")
    shutil.copytree(tmp_path / "second", tmp_path / "copied")
    del waits[:]
    Copying(address, tmp_path / "copied", True, False, wait=waits.append).release()
    assert waits


def test_a_run_that_was_taken_for_gone_copies_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"file://{tmp_path / 'there'}"
    first = run_in(tmp_path / "first", address)
    (tmp_path / "there" / NAME).unlink()
    with monkeypatch.context() as patch:  # its heartbeat came late
        patch.setattr(Copying, "_beat_once", lambda *_: True)
        second = run_in(tmp_path / "second", address)
    with pytest.raises(FolderLost, match=f"written by the run in {tmp_path}/second"):
        first.check_copying()
    first.close(FINISHED)
    second.check_copying()
    second.close(FINISHED)


def test_a_store_that_is_away_for_a_while_is_no_lost_address(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_in(tmp_path / "run", f"{store.address}/run")
    store.plan = at_first(["503"] * 4)
    while "no heartbeat in s3://bucket/run" not in caplog.text:
        pass
    store.plan = at_first([])
    run.check_copying()
    run.close(FINISHED)
    assert json.loads(store.get(f"run/{NAME}"))["token"] == ""
