"""One run at a time in a folder, also where several machines or containers share it.

Note [The lock of a folder]
The lock is a file whose name only one process can create: by a hard link, which is atomic. Its content names the
holder, and has a token that no other lock has; the holder touches it every few seconds, the heartbeat. Locks of the
kernel (flock) would need no heartbeat, but many shared file systems don't have them.

Who finds a lock takes it over if its process is known to be gone, if it is of an earlier attempt of the same job, or if
no heartbeat came for `stale_after_s` seconds of watching, by the watcher's own clock. Times of files are compared for
equality alone: the clocks of machines and of file servers may be hours apart.

The holder has lost the lock once another token is in it, or once its last heartbeat is older than three quarters of
that time, by its own clock: others may take it over soon. A lock that is lost is never renewed, so two processes never
both believe that they have it, also where one was stopped, or its file server did not answer for a while.
"""

import contextlib
import json
import os
import secrets
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torchtitan_graph.errors import FolderLost, UserError
from torchtitan_graph.log import logger
from torchtitan_graph.run.identity import Identity, describe, identity, processes
from torchtitan_graph.small_files import BadFile, open_small, parse_json, read_small

NAME = "run.lock"
STALE_AFTER_S = 180.0  # a file server that restarts may be away for two minutes
LOOK_EVERY_S, SEEN_WITHIN_S = 1.0, 30.0  # of watching another's lock; for its heartbeat, which comes every ten
QUIET_S = 3.0  # of watching, until that is logged
LEFT_AFTER_S = 86_400.0  # of temporary files


class FolderHeld(UserError):
    """Error: another run holds the folder, and nothing may be written there."""


class Holder(Identity, total=False):
    """The content of a lock: its holder, and a `token` of its own. `processes` is as the function of that name. Locks
    of earlier releases have neither."""

    processes: str
    token: str


class _Seen(NamedTuple):
    """A lock's content and times, as a process that watches it sees them."""

    content: bytes
    touched: int
    inode: int


class Lock:
    """The lock of a folder, held until `release`, or until it is lost. See Note [The lock of a folder].

    Args:
        folder: made if it is not there.
        stale_after_s: seconds without a heartbeat after which others take the lock over; the same for all of them.
        wait: sleeps for a number of seconds before the next look at another's lock; returns true to stop looking.

    Raises:
        FolderHeld: another process has the lock, or `wait` returned true.
        OSError: the folder can't be written, or its file system takes no heartbeat.
    """

    def __init__(
        self, folder: Path, stale_after_s: float = STALE_AFTER_S, wait: Callable[[float], object] = time.sleep
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._stale_after_s, self._wait = stale_after_s, wait
        self.path = folder / NAME
        token = secrets.token_hex(16)
        self.me: Holder = {**identity(), "processes": processes(), "token": token}
        self._content = json.dumps(self.me).encode()
        # For the lock before it is linked, and a stale one during removal. Its name begins with what tells whether this
        # process lives; the token makes it unique, for containers on one host may have the same process ids.
        among = f"{self.me['host']} {self.me['processes']}"
        self._here = f"{NAME}.{zlib.crc32(among.encode()):08x}."
        self._tmp = folder / f"{self._here}{self.me['pid']}.{token}"
        self._why_lost = ""
        while True:
            self._renewed = time.monotonic()
            if self._create():
                break
            with contextlib.suppress(FileNotFoundError):  # it was released meanwhile
                self._remove_if_stale()
        try:
            self.beat()
        except OSError:  # a file system that takes no heartbeat
            with contextlib.suppress(OSError):
                self.path.unlink()
            raise
        self._clean_up()

    def beat(self) -> bool:
        """Touch the lock as a heartbeat; return False if it is lost."""
        begin = time.monotonic()
        if self.why_lost() or not self._is_mine():
            return False
        os.utime(self.path)
        if self.why_lost():  # that took too long
            return False
        self._renewed = begin
        return True

    def why_lost(self) -> str:
        """Return why the lock is lost, "" if it is not, as far as is known without a look at the file."""
        age = time.monotonic() - self._renewed
        if not self._why_lost and age > 0.75 * self._stale_after_s:
            self._why_lost = f"its heartbeat could not be written for {age:.0f} s, and another run may have taken it"
        return self._why_lost

    def check(self) -> None:
        """Look at the file, and raise FolderLost if the lock is lost."""
        if not self.why_lost():
            self._is_mine()
        if why := self.why_lost():  # the look itself may have taken too long
            raise FolderLost(f"{self.path}, the lock of this run's folder, is lost: {why}")

    def release(self) -> None:
        """Remove the lock, unless it is lost."""
        if not self.why_lost() and self._is_mine():
            try:
                self.path.unlink()
            except OSError:  # a file server has removed it, and its answer was lost
                if os.path.lexists(self.path):
                    raise

    def _is_mine(self) -> bool:
        with contextlib.suppress(FileNotFoundError, BadFile):
            if read_small(self.path) == self._content:
                return True
        self._why_lost = self._why_lost or "another run has taken it, or somebody has deleted it"
        return False

    def _create(self) -> bool:
        """Create the lock and return True; False if there is one. A kill leaves no partial lock."""
        try:
            with self._tmp.open("xb") as file:  # an error of a folder that can't be written comes before any wait
                file.write(self._content)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(self._tmp, self.path)
            except OSError as error:  # not every file system has links; another cause fails again there
                if not self._is_linked():
                    return False if isinstance(error, FileExistsError) else self._create_without_link()
        finally:
            with contextlib.suppress(OSError):  # the lock is there, or is not, whatever becomes of this
                self._tmp.unlink()
        return True

    def _is_linked(self) -> bool:
        """Return whether a file server has linked the lock, though its answer was lost."""
        try:
            return self._tmp.stat().st_nlink == 2
        except OSError:
            return False

    def _create_without_link(self) -> bool:
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(self._content)
        except OSError:  # a full disk: an empty lock would name no holder
            self.path.unlink()
            raise
        return True

    def _remove_if_stale(self) -> None:
        """Remove the lock that is there if it is stale; return if it changes hands, and raise FolderHeld if it is
        another's."""
        option = f"job.dump_folder = {str(self.path.parent)!r}"
        try:
            seen = _look(self.path)
        except BadFile as error:
            raise FolderHeld(f"{option}: {error}; no run makes such a lock: if nothing runs here, delete it") from error
        except FileNotFoundError:
            if not self.path.is_symlink():
                raise
            raise FolderHeld(
                f"{option}: {self.path} is a link to nothing; no run makes such a lock: delete it"
            ) from None
        holder: Holder | None = None
        try:
            holder = parse_json(seen.content, Holder, self.path)
            said = f"a run holds it, {describe(holder)}"
        except BadFile as error:
            said = f"its holder is unknown ({str(error) if seen.content else f'{self.path}: is empty'})"
        why = None if holder is None else why_gone(holder, self.me)
        if why is None:
            quiet_s = min(QUIET_S, self._stale_after_s)
            now = _changed(self.path, seen, quiet_s, self._wait)
            if now is None:
                logger.info(
                    f"{option}: {said}; this one watches for up to {self._stale_after_s:.0f} s whether that lives. If"
                    f" nothing runs there, delete {self.path} to go on at once"
                )
                now = _changed(self.path, seen, self._stale_after_s - quiet_s, self._wait)
            if now is not None:
                if now.content != seen.content:
                    return
                raise FolderHeld(f"{option}: {said}; stop that run, or name another folder")
            why = f"no heartbeat came for {self._stale_after_s:.0f} s"
        who = describe(holder) if holder else "an unknown process"
        logger.warning(f"taking over the lock of {self.path.parent} from {who}: {why}")
        self._unlink(seen)

    def _unlink(self, stale: _Seen) -> None:
        """Remove the stale lock; restore it if another process has just taken it over."""
        if _look(self.path) != stale:
            return
        os.rename(self.path, self._tmp)
        try:
            if read_small(self._tmp) != stale.content:
                with contextlib.suppress(FileExistsError):  # a third process has it
                    os.link(self._tmp, self.path)
        finally:
            self._tmp.unlink()

    def _clean_up(self) -> None:
        """Remove temporary files of processes that were killed while taking the lock: known to be gone, or old."""
        for path in self.path.parent.glob(f"{NAME}.*"):
            pid = path.name.removeprefix(self._here).partition(".")[0]
            is_known = self.me["processes"] != "" and pid.isdecimal() and len(pid) < 10
            with contextlib.suppress(OSError):  # it is gone, or is a folder
                if (is_known and not _alive(int(pid))) or time.time() - path.stat().st_mtime > LEFT_AFTER_S:
                    path.unlink()


def is_held_by_another(folder: Path, job_id: str) -> bool:
    """Return whether a run of another job holds the folder: its heartbeat is seen within SEEN_WITHIN_S. The lock is
    left alone."""
    path = folder / NAME
    try:
        seen = _look(path)
        holder = parse_json(seen.content, Holder, path)
        if holder["job_id"] == job_id or _is_gone(holder, {**identity(), "processes": processes()}):
            return False
        return _changed(path, seen, SEEN_WITHIN_S, time.sleep) is not None
    except FileNotFoundError:
        return False
    except BadFile as error:  # the trainer checks again
        logger.warning(f"{error}: it is ignored")
        return False


def _look(path: Path) -> _Seen:
    """Return a lock's content and times. Opening the file has a network file system ask its server."""
    with open_small(path) as file:
        about = os.fstat(file.fileno())
        return _Seen(file.read(), about.st_mtime_ns, about.st_ino)


def _changed(path: Path, seen: _Seen, within_s: float, wait: Callable[[float], object]) -> _Seen | None:
    """Watch a lock for `within_s` seconds of this process's clock; return it as soon as it changes, or `wait` returns
    true, else None."""
    deadline = time.monotonic() + within_s
    while (left := deadline - time.monotonic()) > 0:
        if wait(min(left, LOOK_EVERY_S)):
            return seen
        if (now := _look(path)) != seen:
            return now
    return None


def why_gone(holder: Holder, me: Holder) -> str | None:
    """Return why the holder is gone for certain, or None if it may be alive."""
    if _is_gone(holder, me):
        return "that process is gone"
    is_same_job = me["job_id"] is not None and holder["job_id"] == me["job_id"]
    return "it is an earlier attempt of this job" if is_same_job and holder["attempt"] < me["attempt"] else None


def _is_gone(holder: Holder, me: Holder) -> bool:
    """Return whether the holder's process id is of a process here, and that has ended."""
    is_known = holder["host"] == me["host"] and me["processes"] != "" and holder.get("processes") == me["processes"]
    return is_known and not _alive(holder["pid"])


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except OSError:  # another user's, or no Linux
        return True
    return state not in ("Z", "X")  # ended, and its parent has not asked yet
