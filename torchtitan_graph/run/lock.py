"""One run at a time in a folder, also where the folder is shared by several hosts.

The lock is a file whose name only one process can create: by a hard link, which is atomic. Its content names the
holder, its modification time is a heartbeat. Locks of the kernel (flock) would need no heartbeat, but many shared file
systems don't have them.
"""

import contextlib
import glob
import json
import os
import time
from pathlib import Path

from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.run.identity import Identity, describe, identity
from torchtitan_graph.small_files import BadFile, parse_json, read_small

NAME = "run.lock"
STALE_AFTER_S = 120  # a holder touches the file every ten seconds; a file server may be busy for a while


class FolderHeld(UserError):
    """Error: another run holds the folder, and nothing may be written there."""


class Lock:
    """The lock of a folder, held until `release`.

    A lock is stale, and taken over, when its heartbeat is old, when its process was on this host and is gone, and when
    this process belongs to a later attempt of the holder's job: SLURM and torchrun end one attempt before the next.

    Raises FolderHeld if another run holds it, or an unknown process.
    """

    def __init__(self, folder: Path, stale_after_s: float = STALE_AFTER_S) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._stale_after_s = stale_after_s
        self.path = folder / NAME
        self.me = identity()
        self._content = json.dumps(self.me).encode()
        # For the lock before it is linked, a stale one during removal, and a file with the server's time.
        self._tmp = folder / f"{NAME}.{self.me['host']}.{self.me['pid']}"
        while not self._create():
            with contextlib.suppress(FileNotFoundError):  # it was released meanwhile
                self._remove_if_stale()
        self._clean_up()

    def beat(self) -> bool:
        """Touch the lock as a heartbeat; return False if another run has taken it over."""
        if not self._is_mine():
            return False
        os.utime(self.path)
        return True

    def release(self) -> None:
        """Remove the lock, unless another run has taken it over."""
        if self._is_mine():
            self.path.unlink()

    def _is_mine(self) -> bool:
        try:
            return read_small(self.path) == self._content
        except (FileNotFoundError, BadFile):
            return False

    def _create(self) -> bool:
        """Create the lock and return True; False if there is one. A kill leaves no partial lock."""
        try:
            self._tmp.unlink(missing_ok=True)  # a FIFO or a link of that name is not written to
            with self._tmp.open("xb") as file:
                file.write(self._content)
                file.flush()
                os.fsync(file.fileno())
            os.link(self._tmp, self.path)
        except FileExistsError:
            return self._tmp.stat().st_nlink == 2  # a file server has linked it, and its answer was lost
        except OSError:  # not every file system has links; another cause fails again there
            return self._create_without_link()
        finally:
            self._tmp.unlink(missing_ok=True)
        return True

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
        """Remove the lock that is there if it is stale; else raise FolderHeld."""
        option = f"job.dump_folder = {str(self.path.parent)!r}"
        holder: Identity | None = None
        try:
            content = read_small(self.path)
        except BadFile as error:
            raise FolderHeld(f"{option}: {error}; no run makes such a lock: if nothing runs here, delete it") from error
        except FileNotFoundError:
            if not self.path.is_symlink():
                raise
            raise FolderHeld(
                f"{option}: {self.path} is a link to nothing; no run makes such a lock: delete it"
            ) from None
        try:
            holder = parse_json(content, Identity, self.path)
            said = f"a run holds it, {describe(holder)}; stop that run, or name another folder"
        except BadFile as error:
            why = str(error) if content else f"{self.path}: is empty"
            said = f"its holder is unknown ({why}); stop the run in it, or name another folder"
        if (stale := self._stale(holder)) is None:
            raise FolderHeld(
                f"{option}: {said}. If nothing runs, this one can start {self._stale_after_s:.0f} s after the other's"
                f" last heartbeat, or at once if you delete {self.path}"
            )
        who = describe(holder) if holder else "an unknown process"
        logger.warning(f"taking over the lock of {self.path.parent} from {who}: {stale}")
        self._unlink(content)

    def _stale(self, holder: Identity | None) -> str | None:
        """Return why the holder is gone, or None if it may be alive."""
        if holder and holder["host"] == self.me["host"] and not _alive(holder["pid"]):
            return "that process is gone"
        same_job = holder and self.me["job_id"] is not None and holder["job_id"] == self.me["job_id"]
        if holder and same_job and holder["attempt"] < self.me["attempt"]:
            return "it is an earlier attempt of this job"
        age = self._now() - self.path.stat().st_mtime
        return f"its last heartbeat was {age:.0f} s ago" if age > self._stale_after_s else None

    def _now(self) -> float:
        """Return the file server's time: hosts' clocks may differ from it, and from each other's."""
        self._tmp.touch()
        try:
            return self._tmp.stat().st_mtime
        finally:
            self._tmp.unlink()

    def _unlink(self, content: bytes) -> None:
        """Remove the stale lock; restore it if another process has just taken it over."""
        if read_small(self.path) != content:
            return
        os.rename(self.path, self._tmp)
        try:
            if read_small(self._tmp) != content:
                with contextlib.suppress(FileExistsError):  # a third process has it
                    os.link(self._tmp, self.path)
        finally:
            self._tmp.unlink()

    def _clean_up(self) -> None:
        """Remove temporary files of this host's processes that were killed while taking the lock."""
        for path in self.path.parent.glob(f"{NAME}.{glob.escape(self.me['host'])}.*"):
            pid = path.name.rpartition(".")[2]
            if pid.isdecimal() and len(pid) < 10 and not _alive(int(pid)) and not path.is_dir():
                path.unlink(missing_ok=True)


def is_held_by_another(folder: Path, job_id: str) -> bool:
    """Return whether a run of another job holds the folder; the lock is left alone."""
    path = folder / NAME
    try:
        holder, touched = parse_json(read_small(path), Identity, path), path.stat().st_mtime
    except FileNotFoundError:
        return False
    except BadFile as error:  # the trainer checks again
        logger.warning(f"{error}: it is ignored")
        return False
    if holder["job_id"] == job_id or (holder["host"] == identity()["host"] and not _alive(holder["pid"])):
        return False
    return time.time() - touched <= STALE_AFTER_S


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except OSError:  # another user's, or no Linux
        return True
    return state not in ("Z", "X")  # ended, and its parent has not asked yet
