"""What the launcher of all replica groups says at the beginning and at the end."""

import errno
from pathlib import Path

import pytest
import torch

from torchtitan_graph.config import load
from torchtitan_graph.errors import UserError
from torchtitan_graph.launch import __main__ as launcher
from torchtitan_graph.launch import replicas
from torchtitan_graph.launch.replicas import Group, find_unsaved
from torchtitan_graph.run.status import FINISHED, Status


@pytest.mark.parametrize(("number", "options"), [("8", ["--fault_tolerance.enable"]), ("9", [])], ids=["groups", "run"])
def test_more_processes_than_gpus_are_refused_before_any_starts(
    number: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(launcher.Launch, "run", lambda *_: pytest.fail("it was started"))
    monkeypatch.setattr(replicas.subprocess, "Popen", lambda *_, **__: pytest.fail("it was started"))
    monkeypatch.setenv("NGPU", number)
    with pytest.raises(UserError, match=f"NGPU = {number}: .* there are 8 here"):
        launcher._main(["--job.dump_folder", str(tmp_path), *options])
    assert not list(tmp_path.iterdir())


def test_a_group_is_given_up_after_starts_that_got_no_further_than_it_was(tmp_path: Path) -> None:
    group = Group.__new__(Group)  # no launcher is started
    group.folder, group.fruitless, group.reached = tmp_path, 0, 0
    found = []
    for step in (5, 2, 5, 4):
        status = Status(tmp_path, total_steps=7)
        status.done(step)
        status.write()
        found.append(group.is_fruitless())
    assert found == [False, False, False, True] and group.reached == 5


def test_a_status_that_can_not_be_read_for_a_while_ends_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Status(tmp_path, total_steps=7)
    group = Group.__new__(Group)  # no launcher is started
    group.folder, group.fruitless, group.reached = tmp_path, 0, 0

    def away(*_: object, **__: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("torchtitan_graph.small_files.os.open", away)
    assert not group.is_fruitless() and not replicas._has_finished(group)
    assert "can't be read: [Errno 5]" in caplog.text


def test_a_folder_that_can_not_be_written_is_refused_before_any_group_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replicas.subprocess, "Popen", lambda *_, **__: pytest.fail("it was started"))
    (tmp_path / "replica_1").touch()
    assert launcher.main(["--job.dump_folder", str(tmp_path), "--fault_tolerance.enable"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "ERROR" in line]
    assert "job.dump_folder = " in line and "replica_1 is there, and is not a folder" in line


def test_a_run_whose_last_step_nobody_saved_is_no_success(tmp_path: Path) -> None:
    words = ["--job.dump_folder", str(tmp_path), "--fault_tolerance.enable", "--checkpoint.enable"]
    config = load(words)
    for number in range(2):
        folder = tmp_path / f"replica_{number}"
        folder.mkdir()
        status = Status(folder, total_steps=7)
        status.done(7, 1.0)
        status.write(FINISHED)
    (tmp_path / "checkpoint" / "step-5").mkdir(parents=True)
    problem = find_unsaved(config)
    assert problem is not None and "step 7 is done, and the newest checkpoint is of step 5" in problem
    assert find_unsaved(load([*words, "--checkpoint.no-enable"])) is None
    (tmp_path / "checkpoint" / "step-7").mkdir()
    assert find_unsaved(config) is None
