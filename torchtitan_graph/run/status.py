"""status.json: whether a run goes on, how far it is, and what its time went into."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchtitan_graph import stop
from torchtitan_graph.run.files import read_json, write_json
from torchtitan_graph.run.identity import identity

NAME = "status.json"
RUNNING, STOPPED, FINISHED, FAILED = "running", "stopped", "finished", "failed"
# What seconds go into. They add up to the time from the run's first start to its last heartbeat: steps that stayed,
# steps that were lost with a process and done again, start-up, checkpoints, validation, and no process at all.
TIMES = ("useful", "lost", "startup", "checkpoint", "validation", "down")


def read_status(folder: Path) -> dict[str, Any]:
    """Return the status of the run in a folder; {} where there is none."""
    return read_json(folder / NAME)


class Status:
    """The status of a run over all its restarts, written by rank 0 at each heartbeat and at the end.

    Between the two it belongs to two threads: the trainer's, which says what it does, and the one of the heartbeat.
    """

    def __init__(self, folder: Path, total_steps: int) -> None:
        self._path = folder / NAME
        self._mutex = threading.Lock()
        before = read_status(folder)
        seconds = before.get("seconds", {})
        self._seconds: dict[str, float] = {name: seconds.get(name, 0.0) for name in TIMES}
        if before:
            self._seconds["down"] += max(0.0, stop.START - before["time"])
        self._before = before
        self._activity, self._since = "startup", stop.START
        self._content = {
            "state": RUNNING,
            "reason": "",
            "step": before.get("step", 0),
            "total_steps": total_steps,
            "restarts": before["restarts"] + 1 if before else 0,
            **identity(),
        }
        self.write()

    def resume(self, step: int) -> None:
        """Say after which step training goes on: later ones of earlier processes are lost, at their mean time."""
        done = self._before.get("step", 0)
        with self._mutex:
            self._count("useful")
            if done > step:
                lost = self._seconds["useful"] * (done - step) / done
                self._seconds["useful"] -= lost
                self._seconds["lost"] += lost
            self._content["step"] = step

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Count the time that is spent inside as `activity`, one of TIMES, and what follows as useful."""
        with self._mutex:
            self._count(activity)
        try:
            yield
        finally:
            with self._mutex:
                self._count("useful")

    def done(self, step: int) -> None:
        """Say that a step is done."""
        self._content["step"] = step

    def write(self, state: str = RUNNING, reason: str = "") -> None:
        """Write the file, with the present time: the heartbeat."""
        with self._mutex:
            self._count(self._activity)
            self._content |= {"state": state, "reason": reason, "time": time.time(), "seconds": self._seconds}
            write_json(self._path, self._content)

    def goodput(self) -> str:
        """Return one line on what the run's time went into."""
        total = sum(self._seconds.values()) or 1.0
        rest = ", ".join(f"{name} {self._seconds[name] / total:.1%}" for name in TIMES[1:])
        return f"goodput {self._seconds['useful'] / total:.1%} of {total:,.0f} s; {rest}"

    def _count(self, next_activity: str) -> None:
        now = time.time()
        self._seconds[self._activity] += max(0.0, now - self._since)  # a clock may be set back
        self._activity, self._since = next_activity, now
