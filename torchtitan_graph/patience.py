"""Patience with storage: transient errors are retried; a full disk and a missing file are errors at once.

If a transient error persists, the run ends with an exit code of its own, after which launchers start it again.
"""

import contextlib
import difflib
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.transient import causes, in_words, is_missing_bucket, is_transient, is_unknown_host

T = TypeVar("T")

WAIT_S = 300.0
FIRST_S, EVERY_S = 1.0, 10.0  # between two tries: twice as long after each, at most EVERY_S
_WAITED = "has_waited"  # marks an error that was waited for in vain: a caller does not wait again

FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}  # no space: not retried


def find_full_disk(path: Path, error: str) -> str | None:
    """Return a message that the disk of `path` is full if an error's text says so, else None.

    torch's zip writer hides the system's error for a short write: it reports an unexpected position.
    """
    if not any(words in error for words in ("[Errno 28]", "[Errno 122]", "unexpected pos", "os error 28")):
        return None
    place = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    disk = os.statvfs(place)
    if disk.f_files and not disk.f_favail:
        return f"the disk at {place} takes no more files, for all of its {disk.f_files:,} inodes are in use"
    free, total = (blocks * disk.f_frsize / 2**20 for blocks in (disk.f_bavail, disk.f_blocks))
    return f"the disk at {place} is full, or a quota is used up: {free:,.1f} MiB of {total:,.1f} are free"


def why_unwritable(path: Path, error: OSError) -> str:
    """Return why `path` can't be written: a full disk, a file in the place of a folder, or the system's message."""
    if isinstance(error, FileExistsError) and error.filename and not os.path.isdir(error.filename):
        return f"{error.filename} is there, and is not a folder: move it away, or name another place"
    return find_full_disk(path, str(error)) or str(error)


@contextlib.contextmanager
def refuse_unreadable(option: str) -> Iterator[None]:
    """Raise a UserError that begins with `option` for an OSError in reading; transient I/O errors pass through."""
    try:
        yield
    except OSError as error:
        if is_transient(error):
            raise
        raise UserError(f"{option}: can't be read: {error}") from error


@contextlib.contextmanager
def refuse_unwritable(what: str, path: Path) -> Iterator[None]:
    """Raise a UserError that begins with `what` for an OSError in writing `path`; transient I/O errors pass through."""
    try:
        yield
    except OSError as error:
        if is_transient(error):
            raise
        raise UserError(f"{what} can't be written: {why_unwritable(path, error)}") from error


def near_path(path: Path) -> str:
    """Return the end of a message about a path that is not there: what it may have been called."""
    path = path.expanduser()
    there = next(folder for folder in path.absolute().parents if folder.is_dir())
    missing = path.absolute().relative_to(there).parts
    found = difflib.get_close_matches(missing[0], os.listdir(there), n=1)
    if not found and len(missing) == 1:
        found = [name for name in sorted(os.listdir(there)) if Path(name).stem == path.stem][:1]
    if found:
        return f"; did you mean {there / found[0]}?"
    return "" if len(missing) == 1 else f"; there is no {missing[0]} in {there}"


class Patience:
    """Waits for storage, for up to five minutes from the first call of `wait`."""

    def __init__(self) -> None:
        self._deadline, self._pause = 0.0, FIRST_S

    def wait(self, error: BaseException, what: str = "") -> bool:
        """Wait a while for what `error` reports, and return True; False if that took too long already. `what` is named
        in the log."""
        self._deadline = self._deadline or time.monotonic() + WAIT_S
        left = self._deadline - time.monotonic()
        if left <= 0 or any(getattr(each, _WAITED, False) for each in causes(error)):
            error.__dict__[_WAITED] = True
            return False
        named = f"{what}: " if what else ""
        logger.warning(f"storage is unavailable; retrying for {left:.0f} s: {named}{in_words(error)}")
        time.sleep(min(self._pause, left))
        self._pause = min(2 * self._pause, EVERY_S)
        return True


def retry_io(function: Callable[[], T], is_new: bool = False, what: str = "") -> T:
    """Call a function again while it raises transient errors, for up to five minutes from the first of them.

    is_new: whether a run asks its bucket for the first time. A bucket that is missing then, or a host that no name
        server knows, is a mistake in its name, and no waiting helps; one that was there may come back.
    what: is named in the log.
    """
    patience = Patience()
    while True:
        try:
            return function()
        except Exception as error:
            if is_new and (is_missing_bucket(error) or is_unknown_host(error)):
                error.__dict__["transient"] = False
            if not is_transient(error) or not patience.wait(error, what):
                raise


def look_up(fs: Any, path: str) -> dict[str, Any]:
    """Return what a file system of fsspec says of a file or folder; raise FileNotFoundError if it is twice not there.

    s3fs looks for a file, and then for a folder of that name: where a bucket comes back between the two, it finds none.
    """
    found: dict[str, Any]
    try:
        found = fs.info(path)
    except FileNotFoundError as error:
        if is_transient(error):
            raise
        found = fs.info(path)
    return found
