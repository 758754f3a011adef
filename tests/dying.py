"""A process that is killed amid its work on files."""

import itertools
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "os.utime")


def die_at(number: int, folder: Path, torn: bool, log: Path) -> None:
    """Make this process kill itself in place of its `number`-th change to a file of `folder`.

    Where `torn`, of what it wrote last and didn't flush to the disk, the second half is missing then. Each change is a
    line of `log`.
    """
    record = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    numbers, last, flush = itertools.count(1), ("", 0), os.fsync

    def die_if_now(change: str) -> None:
        mine = next(numbers)  # several threads come here
        os.write(record, f"{change}\n".encode())
        if mine == number:
            if torn:
                _cut(*last)
            os.kill(os.getpid(), signal.SIGKILL)

    def look(event: str, args: tuple[Any, ...]) -> None:
        nonlocal last
        if event not in ("open", *CHANGES) or not isinstance(args[0], (str, os.PathLike)):
            return
        path = os.fspath(args[0])
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if path.startswith(str(folder)):
            die_if_now(f"{event} {path.removeprefix(str(folder)).lstrip('/')}")
        elif event in ("os.remove", "os.rmdir") and not os.path.isabs(path):
            die_if_now(f"{event} (of a tree) {path}")
        if event == "open":
            last = (path, os.path.getsize(path) if os.path.exists(path) and not args[2] & os.O_TRUNC else 0)

    def flush_and_know(descriptor: int) -> None:
        nonlocal last
        if last[0]:
            die_if_now(f"fsync {last[0].removeprefix(str(folder)).lstrip('/')}")
        flush(descriptor)
        last = ("", 0)

    os.fsync = flush_and_know
    sys.addaudithook(look)


def _cut(path: str, begin: int) -> None:
    if os.path.isfile(path):
        os.truncate(path, (begin + os.path.getsize(path)) // 2)


def run_in_a_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked process; return the signal that ended it, or 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside torch's idle threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, "it failed by itself"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
