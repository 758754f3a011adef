"""One run at a time in a folder, also where the folder is shared by several hosts.

The lock is a file that only one process can create (O_EXCL). Its content says who holds it, its modification time
is a heartbeat. Locks of the kernel (flock) would need no heartbeat, but many shared file systems don't have them.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.run.files import read_json
from torchtitan_graph.run.identity import describe, identity

NAME = "run.lock"
STALE_AFTER_S = 120  # a holder touches the file every ten seconds; a file server may be busy for a while


class FolderHeld(UserError):
    """Another run has the folder: nothing is written there."""


class Lock:
    """Hold the lock of a folder, until `release`.

    A lock is stale, and taken over, when its heartbeat is old, when its process was on this host and is gone, and when
    this process belongs to a later attempt of the holder's job: SLURM and torchrun end one attempt before the next.

    Raises:
        FolderHeld: another run holds it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME
        self.me = identity()
        if self._create():
            return
        holder = read_json(self.path)
        if why := self._stale(holder):
            logger.warning(f"taking over the lock of {folder} from {describe(holder)}: {why}")
            self._remove(holder)
            if self._create():
                return
            holder = read_json(self.path)
        raise FolderHeld(
            f"job.dump_folder = {str(folder)!r}: a run is going on in it, {describe(holder)}; stop that run, or give "
            f"this one a folder of its own. If nothing runs, this one can start {STALE_AFTER_S} s after the other's "
            f"last heartbeat, or at once if you delete {self.path}"
        )

    def beat(self) -> bool:
        """Say that the holder lives; False if another run has taken the lock over."""
        if read_json(self.path) != self.me:
            return False
        os.utime(self.path)
        return True

    def release(self) -> None:
        """Let others have it."""
        if read_json(self.path) == self.me:
            self.path.unlink()

    def _create(self) -> bool:
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(self.me, file)
        except OSError:  # a full disk: an empty lock would be nobody's
            self.path.unlink()
            raise
        return True

    def _stale(self, holder: dict[str, Any]) -> str | None:
        """Say why the holder is no more, or None if it may live."""
        if holder.get("host") == self.me["host"] and not _alive(holder["pid"]):
            return "that process is gone"
        same_job = self.me["job_id"] is not None and holder.get("job_id") == self.me["job_id"]
        if same_job and holder["attempt"] < self.me["attempt"]:
            return "it is an earlier attempt of this job"
        age = self._now() - self.path.stat().st_mtime
        return f"its last heartbeat was {age:.0f} s ago" if age > STALE_AFTER_S else None

    def _now(self) -> float:
        """Return the file server's time: hosts' clocks may differ from it, and from each other's."""
        probe = self.path.with_name(f"{NAME}.{self.me['host']}.{self.me['pid']}")
        probe.touch()
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink()

    def _remove(self, holder: dict[str, Any]) -> None:
        """Remove the stale lock; put it back if it turns out that another process has just taken it over."""
        aside = self.path.with_name(f"{NAME}.{self.me['host']}.{self.me['pid']}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:  # another process was faster
            return
        if read_json(aside) != holder:
            os.link(aside, self.path)
        aside.unlink()


def is_held_by_another(folder: Path, job_id: str) -> bool:
    """Return whether a run that is not of this job has the folder, for who does not want it for itself."""
    holder = read_json(folder / NAME)
    if not holder or holder.get("job_id") == job_id:
        return False
    if holder.get("host") == identity()["host"] and not _alive(holder["pid"]):
        return False
    return time.time() - (folder / NAME).stat().st_mtime <= STALE_AFTER_S


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except OSError:  # another user's, or no Linux
        return True
    return state not in ("Z", "X")  # ended, and its parent has not asked yet
