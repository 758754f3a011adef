"""status.json: a run's state, its progress, and a breakdown of its time."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypedDict

from torchtitan_graph import stop
from torchtitan_graph.device import rates
from torchtitan_graph.rates import RATES
from torchtitan_graph.run.files import read_record, write_json
from torchtitan_graph.run.identity import Identity, Seconds, identity
from torchtitan_graph.small_files import Count

NAME = "status.json"
RUNNING, STOPPED, FINISHED, FAILED = "running", "stopped", "finished", "failed"
HEARTBEAT_S = 10
# Categories of time. They add up to the time from the run's first start to its last heartbeat: steps that stayed, work
# lost with a process and done again, start-up, checkpoints, validation, the wait for other replica groups, no process
# while the same job restarts, and no process since nobody had started one.
STARTUP, WAITING = "startup", "waiting"
TIMES = ("useful", "lost", STARTUP, "checkpoint", "validation", WAITING, "restarting", "idle")

MAX_REASON = 500  # characters: the file fits into a block, and can be overwritten on a full disk


class Written(Identity):
    """Fields of status.json that are read again; the others are for people."""

    state: str
    reason: str
    step: Count
    restarts: Count
    time: Seconds
    seconds: dict[str, Seconds]


class Ran(TypedDict):
    """The device that a run was on, as comm.fake_device names it; an earlier release's status has none."""

    device: str


class Activity(TypedDict):
    """Fields of status.json that tell what a run is doing; an earlier release's has not all of them."""

    state: str
    activity: str


def activity_of(folder: Path, mine: Path) -> str | None:
    """Return what a run in a folder does, one of TIMES; None if it is not alive: its status was last written three
    heartbeats before that in `mine`, by the clock of the file server, for those of machines may be hours apart."""
    status = read_record(folder / NAME, Activity)
    if status is None or status["state"] != RUNNING:
        return None
    age = (mine / NAME).stat().st_mtime - (folder / NAME).stat().st_mtime
    return None if age > 3 * HEARTBEAT_S else status["activity"]


def device_of(folder: Path) -> str | None:
    """Return the device that the run in a folder was on, one of RATES; None where that is not known."""
    status = read_record(folder / NAME, Ran)
    return status["device"] if status is not None and status["device"] in RATES else None


def read_status(folder: Path) -> Written | None:
    """Return the status of the run in a folder; None where there is no usable one."""
    return read_record(folder / NAME, Written)


class Status:
    """The status of a run over all its restarts, written by rank 0 at each heartbeat and at the end.

    Two threads use it: the trainer's, which records its progress, and the heartbeat's. `check` is called before each
    replacement of the file, and raises where nothing may be written any more.
    """

    def __init__(self, folder: Path, total_steps: int, check: Callable[[], None] = lambda: None) -> None:
        self._path, self._check = folder / NAME, check
        self._mutex = threading.Lock()
        before = read_status(folder)
        seconds = before["seconds"] if before else {}
        self._seconds: dict[str, float] = {name: seconds.get(name, 0.0) for name in TIMES}
        self._seconds["idle"] += seconds.get("down", 0.0)  # of a release that had one name for both
        if before:
            self._count_gap(before)
        self._before = before
        self._activity, self._since = STARTUP, stop.START
        self._first_step, self._first_at = 0, stop.START
        self._content: dict[str, Any] = {
            "state": RUNNING,
            "activity": self._activity,
            "reason": "",
            "step": before["step"] if before else 0,
            "total_steps": total_steps,
            "loss": None,
            "restarts": before["restarts"] + 1 if before else 0,
            "device": rates().name.partition(",")[0],
            **identity(),
        }
        self.write()

    def _count_gap(self, before: Written) -> None:
        """Count the time since the last heartbeat. A killed process still ran for a part of the next interval."""
        gap = max(0.0, stop.START - before["time"])
        killed = min(gap, HEARTBEAT_S) if before["state"] == RUNNING else 0.0
        job_id = identity()["job_id"]
        same_job = job_id is not None and job_id == before["job_id"]
        self._seconds["lost"] += killed
        self._seconds["restarting" if same_job else "idle"] += gap - killed

    def resume(self, step: int, num_steps: int) -> None:
        """Record the number of steps, and the one after which training resumes: the time of later ones, at their
        mean, is counted as lost."""
        done = self._before["step"] if self._before else 0
        with self._mutex:
            self._count("useful")
            if done > step:
                lost = self._seconds["useful"] * (done - step) / done
                self._seconds["useful"] -= lost
                self._seconds["lost"] += lost
            self._content |= {"step": step, "total_steps": num_steps}
            self._first_step, self._first_at = step, time.time()

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Count the time in the context as `activity`, one of TIMES, and the time after it as useful."""
        with self._mutex:
            self._count(activity)
        try:
            yield
        finally:
            with self._mutex:
                self._count("useful")

    def done(self, step: int, loss: float | None = None, replicas: dict[str, Any] | None = None) -> None:
        """Record a finished step, its loss, and the state of the replica groups, where there are any."""
        with self._mutex:
            self._content |= {"step": step, "loss": loss, **({} if replicas is None else {"replicas": replicas})}

    def lose(self, seconds: float) -> None:
        """Count the last `seconds` as lost, because a step is repeated."""
        with self._mutex:
            self._count(self._activity)
            seconds = min(seconds, self._seconds["useful"])
            self._seconds["useful"] -= seconds
            self._seconds["lost"] += seconds

    def write(self, state: str = RUNNING, reason: str = "") -> None:
        """Write the file, with the present time: the heartbeat."""
        with self._mutex:
            self._count(self._activity)
            now, left = time.time(), self._seconds_left() if state == RUNNING else None
            self._content |= {
                "state": state,
                "activity": self._activity,
                "reason": reason if len(reason) <= MAX_REASON else reason[:MAX_REASON] + "...",
                "time": now,
                "time_utc": datetime.fromtimestamp(now, timezone.utc).isoformat(" ", "seconds"),
                "seconds_left": left,
                "time_left": None if left is None else _readable(left),
                "seconds": self._seconds,
                "times": {name: _readable(seconds) for name, seconds in self._seconds.items()},
            }
            write_json(self._path, self._content, self._check)

    def _seconds_left(self) -> float | None:
        """Return the seconds left, at this process's mean seconds per step, saves and validations included."""
        done = self._content["step"] - self._first_step
        if done <= 0:
            return None
        return (self._content["total_steps"] - self._content["step"]) * (time.time() - self._first_at) / done

    @property
    def has_steps(self) -> bool:
        """Whether this process has finished a step."""
        return bool(self._content["step"] > self._first_step)

    def goodput(self) -> str:
        """Return the share of the run's time that was useful, and what the rest went into, in words."""
        total = sum(self._seconds.values()) or 1.0
        rest = ", ".join(f"{name} {self._seconds[name] / total:.1%}" for name in TIMES[1:])
        return f"goodput {self._seconds['useful'] / total:.1%} of {total:,.0f} s ({rest})"

    def _count(self, next_activity: str) -> None:
        now = time.time()
        self._seconds[self._activity] += max(0.0, now - self._since)  # a clock may be set back
        self._activity, self._since = next_activity, now


def _readable(seconds: float) -> str:
    return str(timedelta(seconds=min(round(seconds), 10**13)))  # the most that Python can show; 300,000 years
