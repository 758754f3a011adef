"""The status says how a run is, and accounts for all of its time, over its restarts."""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disks import fill, small_disk
from torchtitan_graph import stop
from torchtitan_graph.plan.ranks import load_dry
from torchtitan_graph.run.status import FINISHED, STOPPED, TIMES, Status, activity_of, read_status


def written(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text())


def test_every_second_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 1000.0
    monkeypatch.setattr(time, "time", lambda: clock)
    monkeypatch.setattr(stop, "START", clock)

    def wait(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    first = Status(tmp_path, total_steps=100)
    wait(5)
    first.resume(0, 100)
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

    wait(30)  # the process was killed, and nothing ran; for up to ten seconds it may still have
    monkeypatch.setattr(stop, "START", clock)
    second = Status(tmp_path, total_steps=100)
    wait(4)
    second.resume(8, 100)  # two steps of four seconds are done again
    wait(10)
    second.done(10)
    second.write(STOPPED, "SIGUSR1")
    status = read_status(tmp_path)
    assert status["seconds"] == {
        "useful": 42, "lost": 18, "startup": 9, "checkpoint": 3, "validation": 2, "waiting": 0,
        "restarting": 0, "idle": 20,
    }  # fmt: skip
    assert (status["state"], status["reason"], status["step"], status["restarts"]) == ("stopped", "SIGUSR1", 10, 1)
    assert second.goodput() == (
        "goodput 44.7% of 94 s "
        "(lost 19.1%, startup 9.6%, checkpoint 3.2%, validation 2.1%, waiting 0.0%, restarting 0.0%, idle 21.3%)"
    )


@pytest.mark.parametrize(
    ("job", "state", "restarting", "idle"),
    [("7", STOPPED, 100, 0), ("8", STOPPED, 0, 100), ("7", "running", 90, 0), (None, "running", 0, 90)],
    ids=["its job starts it again", "another job", "its job, killed", "by hand, killed"],
)
def test_no_process_is_told_by_who_starts_the_next(
    job: str | None, state: str, restarting: float, idle: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_job(job: str | None) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", job) if job else monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    monkeypatch.setattr(time, "time", lambda: 1000.0)
    monkeypatch.setattr(stop, "START", 1000.0)
    as_job(job and "7")
    Status(tmp_path, total_steps=1).write(state)
    as_job(job)
    monkeypatch.setattr(time, "time", lambda: 1100.0)
    monkeypatch.setattr(stop, "START", 1100.0)
    Status(tmp_path, total_steps=1)
    seconds = read_status(tmp_path)["seconds"]
    assert (seconds["restarting"], seconds["idle"]) == (restarting, idle)
    assert sum(seconds.values()) == 100


def test_what_a_person_looks_for_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 1_800_000_000.0
    monkeypatch.setattr(time, "time", lambda: clock)
    monkeypatch.setattr(stop, "START", clock)
    status = Status(tmp_path, total_steps=100)
    status.resume(20, 100)
    assert written(tmp_path)["time_left"] is None
    clock += 400
    status.done(40, loss=2.5)
    status.write()
    found = written(tmp_path)
    assert (found["step"], found["loss"], found["seconds_left"], found["time_left"]) == (40, 2.5, 1200, "0:20:00")
    assert (found["time_utc"], found["times"]["useful"]) == ("2027-01-15 08:06:40+00:00", "0:06:40")
    status.write(FINISHED)
    assert written(tmp_path)["time_left"] is None


def test_a_run_whose_heart_has_missed_three_beats_does_nothing(tmp_path: Path) -> None:
    """By the clock of the file server, whatever the time that it writes."""
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
        Status(tmp_path / name, total_steps=1)
    now = (tmp_path / "mine" / "status.json").stat().st_mtime
    for age, found in ((29, "startup"), (31, None), (-1000, "startup")):
        os.utime(tmp_path / "other" / "status.json", (now - age, now - age))
        assert activity_of(tmp_path / "other", tmp_path / "mine") == found
    assert activity_of(tmp_path / "none", tmp_path / "mine") is None


def test_no_more_is_lost_than_was_useful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 1000.0
    monkeypatch.setattr(time, "time", lambda: clock)
    monkeypatch.setattr(stop, "START", clock)
    status = Status(tmp_path, total_steps=100)
    status.resume(0, 100)
    clock += 4
    status.lose(6)  # of a step that began before
    status.write()
    seconds = written(tmp_path)["seconds"]
    assert (seconds["useful"], seconds["lost"]) == (0, 4)


def test_torn_or_missing_status_counts_as_none(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    Status(tmp_path, total_steps=1).write(FINISHED)
    (tmp_path / "status.json").write_text(json.dumps(written(tmp_path))[:-5])
    assert read_status(tmp_path) is None
    assert Status(tmp_path, total_steps=1)
    assert read_status(tmp_path)["restarts"] == 0


def without(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda status: json.dumps({name: value for name, value in status.items() if name != key})


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: "[" * 100_000,
        lambda _: "[]",
        without("time"),
        without("attempt"),
        lambda status: json.dumps(status | {"step": "5"}),
        lambda status: json.dumps(status | {"time": float("inf")}),
        lambda status: json.dumps(status | {"time": float("nan")}),
        lambda status: json.dumps(status | {"seconds": {"useful": -1e300}}),
        lambda status: json.dumps(status | {"seconds": [1]}),
        lambda status: json.dumps(status | {"restarts": 2**70}),
    ],
)
def test_a_damaged_status_is_ignored_with_a_warning(
    damage: Callable[[dict[str, Any]], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Status(tmp_path, total_steps=1).write(FINISHED)
    (tmp_path / "status.json").write_text(damage(written(tmp_path)))
    again = Status(tmp_path, total_steps=1)
    assert "status.json" in caplog.text and "is ignored" in caplog.text
    again.resume(0, 100)
    again.write(FINISHED)
    assert written(tmp_path)["restarts"] == 0 and again.goodput()


def test_a_fifo_and_a_giant_are_no_status(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "status.json")
    assert read_status(tmp_path) is None and "a FIFO" in caplog.text
    os.mkfifo(tmp_path / "status.json.tmp")
    Status(tmp_path, total_steps=1)
    os.truncate(tmp_path / "status.json", 2**40)
    assert read_status(tmp_path) is None and "1,099,511,627,776 bytes" in caplog.text


def test_steps_that_take_for_ever_are_told(tmp_path: Path) -> None:
    status = Status(tmp_path, total_steps=2**62)
    status.resume(0, 2**62)
    status.done(1)
    time.sleep(1e-3)
    status.write()
    assert "days" in written(tmp_path)["time_left"]


def test_a_full_disk_keeps_no_status_from_being_written(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        status = Status(disk, total_steps=1)
        fill(disk)
        status.write("failed", "é" * 10_000)
        assert written(disk)["state"] == "failed" and len(written(disk)["reason"]) < 600
        assert not (disk / "status.json.tmp").exists()


def test_a_dry_run_of_a_run_is_for_the_device_that_it_was_on(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[model]\nattn = "varlen"\n')
    words = ["--job.config_file", str(tmp_path)]
    assert load_dry(words).comm.fake_device == "H100"
    Status(tmp_path, total_steps=2)
    assert load_dry(words).comm.fake_device == "CPU"
    assert load_dry([*words, "--comm.fake_device", "A100"]).comm.fake_device == "A100"


def test_a_loss_that_is_no_number_is_written_as_json_has_it(tmp_path: Path) -> None:
    status = Status(tmp_path, total_steps=3)
    status.done(1, math.nan)
    status.write()
    found = json.loads((tmp_path / "status.json").read_text(), parse_constant=pytest.fail)
    assert found["loss"] is None and found["not_finite"] == {"loss": "nan"}
