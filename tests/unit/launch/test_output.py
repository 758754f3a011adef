"""A child never waits for those who read what it prints."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from torchtitan_graph.launch import output as output_module
from torchtitan_graph.launch.output import Output
from torchtitan_graph.log import logger

PRINTS = "for number in range(20_000): print(number, 'x' * 100)"


@pytest.fixture(autouse=True)
def _log_to_caplog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "propagate", True)


def printed(path: Path | None, shown: bool = False) -> int:
    """Run a child that prints 2 MB, with its output in a file; return its exit code."""
    with subprocess.Popen([sys.executable, "-c", PRINTS], stdout=-1) as child:
        assert child.stdout is not None
        output = Output("the child", child.stdout, path, shown)
        code = child.wait(60)
        output.finish()
    return code


def test_all_that_a_child_prints_is_added_to_a_file(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    assert printed(tmp_path / "log") == 0
    before, *lines = (tmp_path / "log").read_text().splitlines()
    assert before == "before" and [line.split()[0] for line in lines] == [str(number) for number in range(20_000)]


@pytest.mark.parametrize("path", ["/dev/full", "/nowhere/log"])
def test_a_child_whose_file_can_not_be_written_goes_on_which_is_told_once(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert printed(Path(path)) == 0
    (told,) = caplog.messages
    assert told.startswith(f"{path}: the output of the child is left out in part ([Errno")


def test_a_file_that_took_nothing_for_a_while_is_waited_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_module, "MOST_LINES", 1)
    monkeypatch.setattr(output_module, "PATIENCE_S", 0.01)
    path, may_open = tmp_path / "log", threading.Event()

    def open_then() -> IO[bytes]:
        may_open.wait()
        return path.open("ab", 0)

    copy = output_module._Copy("the output", open_then)
    while not copy._is_stalled:
        copy.add(b"x")
    may_open.set()
    while not copy._lines.empty():
        time.sleep(0.001)
    copy.add(b"y")
    copy.finish()
    assert not copy._is_stalled and path.read_bytes().strip(b"x") == b"y"


def test_a_child_whose_terminal_is_paused_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(output_module, "END_S", 0.1)
    monkeypatch.setattr(output_module, "PATIENCE_S", 0.1)
    read, write = os.pipe()  # which nobody reads
    with open(write, "wb", 0) as paused:
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(buffer=paused))
        assert printed(tmp_path / "log", shown=True) == 0
        os.close(read)  # what waits ends
    assert "stderr: the output of the child is left out in part (it is not taken in time)" in caplog.text
    assert (tmp_path / "log").read_text().endswith(f"19999 {'x' * 100}\n")
