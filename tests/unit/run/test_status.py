"""The status says how a run is, and accounts for all of its time, over its restarts."""

import json
import time
from pathlib import Path

import pytest

from torchtitan_graph import stop
from torchtitan_graph.run.status import FINISHED, STOPPED, TIMES, Status, read_status


def test_every_second_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 1000.0
    monkeypatch.setattr(time, "time", lambda: clock)
    monkeypatch.setattr(stop, "START", clock)

    def wait(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    first = Status(tmp_path, total_steps=100)
    wait(5)
    first.resume(0)
    wait(40)
    first.done(10)
    with first.during("checkpoint"):
        wait(3)
    with first.during("validation"):
        wait(2)
    first.write()
    assert read_status(tmp_path)["seconds"] == {
        **dict.fromkeys(TIMES, 0.0), "startup": 5, "useful": 40, "checkpoint": 3, "validation": 2
    }  # fmt: skip

    wait(30)  # the process was killed, and nothing ran
    monkeypatch.setattr(stop, "START", clock)
    second = Status(tmp_path, total_steps=100)
    wait(4)
    second.resume(8)  # two steps of four seconds are done again
    wait(10)
    second.done(10)
    second.write(STOPPED, "SIGUSR1")
    status = read_status(tmp_path)
    assert status["seconds"] == {
        "useful": 42, "lost": 8, "startup": 9, "checkpoint": 3, "validation": 2, "down": 30
    }  # fmt: skip
    assert (status["state"], status["reason"], status["step"], status["restarts"]) == ("stopped", "SIGUSR1", 10, 1)
    assert second.goodput() == (
        "goodput 44.7% of 94 s; lost 8.5%, startup 9.6%, checkpoint 3.2%, validation 2.1%, down 31.9%"
    )


def test_torn_or_missing_status_counts_as_none(tmp_path: Path) -> None:
    assert read_status(tmp_path) == {}
    Status(tmp_path, total_steps=1).write(FINISHED)
    (tmp_path / "status.json").write_text(json.dumps(read_status(tmp_path))[:-5])
    assert read_status(tmp_path) == {}
    assert Status(tmp_path, total_steps=1)
    assert read_status(tmp_path)["restarts"] == 0
