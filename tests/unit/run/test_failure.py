"""What a restarted attempt makes of the failures of the one before it."""

import json
import os
from pathlib import Path

import pytest

from disks import fill, small_disk
from torchtitan_graph.errors import UserError
from torchtitan_graph.run.failure import (
    FAULT,
    NON_FINITE,
    SAVE_FAILED,
    NotTriedAgain,
    read_failures,
    refuse_to_repeat,
    report_to_launcher,
    reserve,
    write_failure,
)


def test_what_would_fail_in_the_same_way_is_not_tried_again_and_keeps_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    write_failure(tmp_path, ValueError("step 4"), NON_FINITE)
    refuse_to_repeat(tmp_path)  # the first attempt may
    for attempt in ("1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        with pytest.raises(UserError) as refused:
            refuse_to_repeat(tmp_path)
        assert isinstance(refused.value, NotTriedAgain) and refused.value.code == NON_FINITE
        assert str(refused.value) == "not tried again: ValueError: step 4"
        write_failure(tmp_path, refused.value, refused.value.code)


def test_a_fault_may_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    write_failure(tmp_path, RuntimeError("no"), FAULT)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    refuse_to_repeat(tmp_path)


def test_a_damaged_failure_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_failure(tmp_path, RuntimeError("no"), FAULT)
    (whole,) = (tmp_path / "failures").iterdir()
    record = json.loads(whole.read_text())
    for number, content in enumerate(("", "[" * 100_000, "{}", json.dumps(record | {"time": "now"}))):
        (tmp_path / "failures" / f"{number}.json").write_text(content)
    os.mkfifo(tmp_path / "failures" / "fifo.json")
    assert [failure["message"] for failure in read_failures(tmp_path)] == ["RuntimeError: no"]
    assert caplog.text.count("is ignored") == 5


def test_a_job_may_be_called_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "../../é \n" * 100)
    write_failure(tmp_path, RuntimeError("no"), FAULT)
    assert len(read_failures(tmp_path)) == 1 and [path.name for path in tmp_path.iterdir()] == ["failures"]


@pytest.mark.parametrize("with_files", [False, True], ids=["no room", "no inodes"])
def test_a_failure_is_written_on_a_full_disk(with_files: bool, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k", inodes=20) as disk:
        reserve(disk)
        fill(disk, with_files)
        with pytest.raises(OSError, match="No space left"):
            (disk / "another").write_bytes(bytes(64))
        (disk / "another").unlink(missing_ok=True)
        write_failure(disk, RuntimeError("no"), SAVE_FAILED)
        assert [failure["code"] for failure in read_failures(disk)] == [SAVE_FAILED]


@pytest.mark.parametrize("what", ["FIFO", "file", "link", "folder of a FIFO", "folder of a link"])
def test_whatever_has_the_reserve_s_name_makes_way(what: str, tmp_path: Path) -> None:
    elsewhere, place = tmp_path / "elsewhere", tmp_path / "run.reserve"
    elsewhere.write_text("another's")
    if what == "FIFO":
        os.mkfifo(place)
    elif what == "file":
        place.write_text("")
    elif what == "link":
        place.symlink_to(tmp_path)
    else:
        place.mkdir()
        os.mkfifo(place / "space") if what.endswith("FIFO") else (place / "space").symlink_to(elsewhere)
    reserve(tmp_path)
    assert (place / "space").stat().st_size == 2**16 and not (place / "space").is_symlink()
    assert elsewhere.read_text() == "another's"


def test_a_launcher_without_room_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHTITAN_GRAPH_LAUNCHER", str(tmp_path / "gone"))
    assert not report_to_launcher(RuntimeError("no"), FAULT)
