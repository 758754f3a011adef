"""Whatever tests start ends with them, however pytest ends: by Ctrl-C, by a kill, or by itself.

Processes that pytest starts have a mark in their environment, and so have those that they start in turn, also in a
session of their own. A watcher process kills all that have it once pytest has ended. Only on Linux.
"""

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

MARK = "TORCHTITAN_GRAPH_TESTS"


def watch_over() -> None:
    """Mark what this process starts from now on, and start the watcher."""
    if sys.platform == "linux":
        os.environ[MARK] = f"{os.getpid()}.{time.time_ns()}"
        command = [sys.executable, "-S", __file__, str(os.getpid()), os.environ[MARK]]
        nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
        # Ctrl-C in a terminal is for all of a session: not for the watcher.
        os.posix_spawn(sys.executable, command, os.environ, file_actions=nowhere, setsid=True)


def marked(name: str, value: str) -> list[int]:
    """Return the processes, this one apart, that were started with a variable of that value in their environment."""
    found, entry = [], f"{name}={value}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if entry in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def _watch(tests: int, mark: str) -> None:
    with contextlib.suppress(ProcessLookupError):  # they have ended already
        ended = select.poll()
        ended.register(os.pidfd_open(tests), select.POLLIN)
        ended.poll()
    while left := marked(MARK, mark):  # again for those that were started meanwhile
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
