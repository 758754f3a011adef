"""Log lines: what they hold, who names the rank, when they are coloured."""

import io
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_graph.log import init_logging, logger, show_status


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)


def logged(monkeypatch: pytest.MonkeyPatch, level: int, color: bool = True, terminal: bool = False) -> str:
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("NO_COLOR", "" if color else "1")
    init_logging()
    logger.log(level, "loss %.1f", 1.5)
    return stream.getvalue()


def test_a_line_holds_time_level_and_message(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO    loss 1\.5\n", logged(monkeypatch, logging.INFO))


def test_initialising_twice_prints_a_line_once(monkeypatch: pytest.MonkeyPatch) -> None:
    init_logging()
    assert logged(monkeypatch, logging.INFO).count("loss") == 1


def test_the_rank_is_named_when_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert logged(monkeypatch, logging.INFO).startswith("[rank3] ")


@pytest.mark.parametrize(
    ("level", "color", "terminal", "colored"),
    [
        (logging.WARNING, True, True, True),
        (logging.ERROR, True, True, True),
        (logging.INFO, True, True, False),
        (logging.WARNING, False, True, False),
        (logging.WARNING, True, False, False),
    ],
)
def test_only_warnings_on_a_terminal_are_coloured(
    monkeypatch: pytest.MonkeyPatch, level: int, color: bool, terminal: bool, colored: bool
) -> None:
    assert ("\033[" in logged(monkeypatch, level, color, terminal)) is colored


@pytest.mark.parametrize(
    ("tee", "marks"),
    [
        pytest.param(["--tee", "3"], ["[rank0]:", "[rank1]:"], marks=pytest.mark.slow),
        ([], ["[rank0] ", "[rank1] "]),
    ],
    ids=["tee", "plain"],
)
def test_under_torchrun_every_line_names_its_rank_once(tmp_path: Path, tee: list[str], marks: list[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("from torchtitan_graph.log import init_logging, logger\ninit_logging()\nlogger.info('hello')\n")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--role", "rank"]
    endpoint = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0", "--local_addr", "127.0.0.1"]
    result = subprocess.run([*launch, *endpoint, *tee, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = sorted(line for line in (result.stdout + result.stderr).splitlines() if "hello" in line)
    assert len(lines) == 2
    for line, mark in zip(lines, marks, strict=True):
        assert line.startswith(mark)
        assert line.count("rank") == 1


def test_a_status_stays_below_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    init_logging()
    show_status("10%")
    show_status("20%")
    logger.info("a line")
    show_status("")
    shown = re.sub(r"\d{4}-\S+ \S+ INFO    ", "", stream.getvalue())
    clear = "\r\033[K"
    assert shown == f"{clear}10%{clear}20%{clear}a line\n{clear}20%{clear}"


def test_a_status_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    init_logging()
    show_status("10%")
    show_status("")
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_a_terminal_that_was_closed_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(Terminal):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Closed())
    monkeypatch.setattr(logging, "raiseExceptions", False)
    init_logging()
    show_status("10%")
    logger.info("a line")
    show_status("20%")
