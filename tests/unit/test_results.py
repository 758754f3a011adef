"""Files that a command is asked to write."""

import os
from pathlib import Path

import pytest

from torchtitan_graph.command import check_result, write_result
from torchtitan_graph.errors import UserError
from torchtitan_graph.small_files import write_text


def test_what_could_not_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    check_result("--json", tmp_path / "new.json")
    for path, said in (
        (tmp_path, "is a folder; name a file"),
        (tmp_path / "no" / "x.json", f"there is no folder {tmp_path / 'no'}"),
    ):
        with pytest.raises(UserError, match=f"--json {path}: {said}"):
            check_result("--json", path)


def test_a_result_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")
    (tmp_path / "x.json.tmp").mkdir()  # stands in the way
    with pytest.raises(UserError, match="--json .*x.json: can't be written: Is a directory"):
        write_result("--json", path, "new")
    assert path.read_text() == "old"
    (tmp_path / "x.json.tmp").rmdir()
    write_result("--json", path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_told_and_a_device_stays_one() -> None:
    full = Path("/dev/full")
    with pytest.raises(UserError, match="-o /dev/full: can't be written: No space left on device"):
        write_result("-o", full, "x")
    assert full.is_char_device()


def test_new_content_is_on_disk_before_it_replaces_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a crash of the machine may leave the new name with no content."""
    path, flushed = tmp_path / "x.json", []
    path.write_text("old")
    monkeypatch.setattr(
        os, "fsync", lambda _: flushed.append((path.with_name("x.json.tmp").read_text(), path.read_text()))
    )
    write_text(path, "new")
    assert flushed == [("new", "old")] and path.read_text() == "new"
