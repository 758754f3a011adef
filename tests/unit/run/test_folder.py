"""What is written to a run's folder, and when."""

import errno
import json
import os
import re
import threading
import time
from pathlib import Path

import pytest

from disks import fill, set_read_only, small_disk
from torchtitan_graph.config import load
from torchtitan_graph.errors import FolderLost, UserError
from torchtitan_graph.log import logger
from torchtitan_graph.run import folder as folder_module
from torchtitan_graph.run.folder import RunFolder, check_place
from torchtitan_graph.run.status import FAILED, FINISHED, Status


def test_the_configuration_is_saved_once_the_run_is_set_up(tmp_path: Path) -> None:
    """A start that fails in between leaves that of the run before it."""
    saved = tmp_path / "config.toml"
    saved.write_text("[training]\nsteps = 7\n")
    config = load(["--job.dump_folder", str(tmp_path), "--training.steps", "9"])
    run = RunFolder(config)
    assert "steps = 7" in saved.read_text()
    run.save_config(config)
    assert "steps = 9" in saved.read_text()
    run.close(FAILED)


def test_a_dump_folder_that_can_be_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, words in (
        ("file", "file is a file; name a folder"),
        ("file/run", "file is a file"),
        ("x" * 300, "too long"),
    ):
        with pytest.raises(UserError, match=rf"job.dump_folder = '.*{words}"):
            check_place(str(tmp_path / name))
    assert check_place(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"


def run_in(folder: Path) -> RunFolder:
    return RunFolder(load(["--job.dump_folder", str(folder)]))


@pytest.mark.parametrize(
    ("steps", "state", "level"), [(0, FINISHED, None), (3, FINISHED, "INFO"), (3, FAILED, "WARNING")]
)
def test_one_line_says_where_time_and_memory_went_of_a_run_that_has_trained(
    steps: int, state: str, level: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_in(tmp_path)
    run.planned = "planned 0.250 GiB, "
    if steps:
        run.done(steps, 5.0)
    with caplog.at_level("INFO", logger.name):
        run.close(state)
    assert [record.levelname for record in caplog.records] == ([level] if level else [])
    line = r"goodput .*% of .* s \(lost .*, startup .*\); peak memory of rank 0: planned 0.250 GiB, measured \S+ GiB of"
    assert not level or re.search(line, caplog.text)


def test_a_run_that_ends_leaves_its_status_alone(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    (tmp_path / "comm_traces").mkdir()
    assert {"run.lock", "run.reserve", "status.json"} < {path.name for path in tmp_path.iterdir()}
    run.close(FINISHED)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("with_files", [False, True], ids=["no room", "no inodes"])
def test_a_run_ends_in_order_on_a_full_disk(with_files: bool, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k", inodes=20) as disk:
        run = run_in(disk)
        run.status.done(7)  # type: ignore[union-attr]
        fill(disk, with_files)
        run.status.write()  # type: ignore[union-attr]  # a heartbeat
        assert json.loads((disk / "status.json").read_text())["step"] == 7
        run.close(FAILED, "no room")
        assert json.loads((disk / "status.json").read_text())["state"] == FAILED
        assert not (disk / "run.lock").exists() and not (disk / "run.reserve").exists()


def test_a_folder_that_takes_no_more_files_is_refused_as_such(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "20m", inodes=10) as disk:
        fill(disk, with_files=True)
        with pytest.raises(UserError, match="can't be written: .* takes no more files, for all of its 10 inodes"):
            run_in(disk)


def test_a_run_whose_folder_can_not_be_written_any_more_ends_with_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        run = run_in(disk)
        set_read_only(disk)
        run.close(FINISHED)
        assert "this run is finished is not written" in caplog.text and "run.lock is not deleted" in caplog.text
        with pytest.raises(UserError, match="can't be written: .*Read-only file system"):
            run_in(disk)


def test_the_lock_s_heart_beats_while_the_status_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folder_module, "HEARTBEAT_S", 0.01)
    run = run_in(tmp_path)
    os.rename(tmp_path / "status.json", tmp_path / "kept")
    (tmp_path / "status.json").mkdir()  # it can't be replaced
    os.utime(tmp_path / "run.lock", (0, 0))
    while not (tmp_path / "run.lock").stat().st_mtime or "no heartbeat in" not in caplog.text:
        pass
    run.close(FINISHED)


def test_a_run_that_has_lost_its_folder_writes_nothing_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = run_in(tmp_path)
    for name in ("run.lock", "status.json", "config.toml"):
        (tmp_path / name).write_text("the other's")
    assert not run.has_lost(), "nobody has looked yet"
    with pytest.raises(FolderLost):
        run.save_config(load([]))
    with pytest.raises(FolderLost):
        run.status.write()  # type: ignore[union-attr]
    assert run.has_lost()
    run.close(FINISHED)
    assert "this run is finished is not written" in caplog.text
    left = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file() and path.suffix != ".tmp"}
    assert left == dict.fromkeys(("run.lock", "status.json", "config.toml"), "the other's")
    assert (tmp_path / "run.reserve").exists(), "the other needs it"


def test_a_file_system_that_takes_no_heartbeat_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    with pytest.raises(UserError, match="job.dump_folder = .* can't be written: .*Operation not permitted"):
        run_in(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_whose_file_server_hangs_ends_without_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its heartbeat waits for ever in a call of the system."""
    hangs, answers = threading.Event(), threading.Event()
    monkeypatch.setattr(folder_module, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(folder_module, "HEART_ENDS_S", 0.05)
    run = run_in(tmp_path)
    assert run._lock is not None
    run._lock._stale_after_s = 0.2
    monkeypatch.setattr(os, "utime", lambda path: (hangs.set(), answers.wait(60)))
    assert hangs.wait(60)
    while not run.has_lost():
        time.sleep(0.01)
    run.close(FINISHED)
    answers.set()
    assert "the last heartbeat has not ended" in caplog.text and (tmp_path / "run.lock").exists()


def test_a_configuration_at_an_address_binds_once_there_is_a_checkpoint(tmp_path: Path) -> None:
    words = ["--checkpoint.enable", "--checkpoint.remote_folder", f"file://{tmp_path / 'there'}"]
    for seq_len in ("32", "64"):
        words = [*words, "--job.dump_folder", str(tmp_path / seq_len), "--training.seq_len", seq_len]
        RunFolder(load(words)).close(FINISHED)


@pytest.mark.parametrize(("state", "step", "found"), [(FINISHED, 3, True), (FAILED, 3, False), (FINISHED, 2, False)])
def test_a_group_has_finished_that_says_so_of_all_steps(state: str, step: int, found: bool, tmp_path: Path) -> None:
    status = Status(tmp_path, total_steps=3)
    status.done(step)
    status.write(state)
    assert folder_module._has_finished(tmp_path, 3) == found


def test_a_configuration_that_is_no_file_is_not_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "checkpoint" / "step-1").mkdir(parents=True)
    os.mkfifo(tmp_path / "config.toml")
    run_in(tmp_path).close(FINISHED)
    assert "config.toml: is not a regular file, but a FIFO" in caplog.text
