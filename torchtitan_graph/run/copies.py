"""One run at a time at checkpoint.remote_folder.

Note [The run of an address]
The file `copies.json` there, and in the run's folder, names the run whose copies these are, and the process that writes
them, which writes the file again every BEAT_S seconds. A run that has checkpoints of its own writes only to the address
with its name. One without goes on from the copies, and takes their name, once no process writes them: that has ended,
is known to be gone, or did not beat for STALE_AFTER_S seconds of watching. No store creates a file only if there is
none, in all of fsspec: of two that begin in one moment the first finds the other's name before its next copy.
"""

import json
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from torchtitan_graph.checkpoint.remote import Remote
from torchtitan_graph.errors import FolderLost, UserError
from torchtitan_graph.log import logger
from torchtitan_graph.patience import retry_io
from torchtitan_graph.run.files import read_record, write_json
from torchtitan_graph.run.identity import describe, identity, processes
from torchtitan_graph.run.lock import STALE_AFTER_S, Holder, why_gone
from torchtitan_graph.small_files import BadFile, Count, parse_json

NAME = "copies.json"
BEAT_S, LOOK_EVERY_S = 30.0, 5.0


class Writer(Holder):
    """Who writes the copies. `run` is one name for all starts of a run; `folder` its folder; `token` is "" once this
    process has ended."""

    run: str
    folder: str
    beats: Count


class Copying:
    """The right to write copies to an address, held until `release`. See Note [The run of an address].

    Args:
        address: of checkpoint.remote_folder.
        folder: the run's, whose lock this process has.
        has_steps: whether it has checkpoints.
        is_new: as in `retry_io`.
        wait: sleeps for a number of seconds.

    Raises UserError if another run writes there, or the copies are another run's than the checkpoints.
    """

    def __init__(
        self, address: str, folder: Path, has_steps: bool, is_new: bool, wait: Callable[[float], object] = time.sleep
    ) -> None:
        self._remote, self._wait, self._mutex = Remote(address, is_new), wait, threading.Lock()
        there, here = retry_io(self._read, is_new, address), read_record(folder / NAME, Writer)
        self._me: Writer = {
            **identity(),
            "processes": processes(),
            "token": secrets.token_hex(16),
            "run": secrets.token_hex(8),
            "folder": str(folder.absolute()),
            "beats": 0,
        }
        if here is not None:
            self._me["run"] = here["run"]
        if there is not None and there["run"] != self._me["run"]:
            if has_steps:
                raise self._refused(there, "has copies of another run's checkpoints")
            logger.info(f"{address} has copies of the run in {_place(there)}: this run goes on from them")
            self._me["run"] = there["run"]
        mine = None if here is None else (self._me["folder"], here["token"])  # the folder may be a copy of another
        if there is not None and _start(there) != mine:
            self._watch(there)
        write_json(folder / NAME, self._me)
        self._remote.put(folder, [NAME])
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat of copies", daemon=True)
        self._heart.start()

    def check(self) -> None:
        """Look at the file, and raise FolderLost if another run has taken the address."""
        there = self._read()
        if there is not None and _start(there) != _start(self._me):
            raise FolderLost(f"{self._remote.address} is written by the run in {_place(there)}, not by this one")

    def release(self) -> None:
        """Write that no process writes there, unless another one does; an error is a warning."""
        self._ended.set()
        self._beat_once({**self._me, "token": ""})

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S) and self._beat_once({**self._me, "beats": self._me["beats"] + 1}):
            pass

    def _beat_once(self, content: Writer) -> bool:
        """Write the file; return False if another run has taken the address."""
        try:
            with self._mutex:
                self.check()
                if content["token"] and self._ended.is_set():
                    return False
                self._me = content
                self._remote.write(NAME, json.dumps(content, indent=1).encode())
        except FolderLost as error:
            logger.error(f"{error}; this run ends before it copies its next checkpoint")
            return False
        except Exception as error:  # of any file system: it may be there again at the next copy
            logger.warning(f"no heartbeat in {self._remote.address}: {type(error).__name__}: {error}")
        return True

    def _watch(self, there: Writer) -> None:
        """Return once the process that writes there has ended, or is known to be gone, or after STALE_AFTER_S seconds
        without a heartbeat of it."""
        if not there["token"] or why_gone(there, self._me):
            return
        logger.info(f"watching for up to {STALE_AFTER_S:.0f} s whether the run in {_place(there)} writes copies there")
        deadline = time.monotonic() + STALE_AFTER_S
        while (left := deadline - time.monotonic()) > 0:
            self._wait(min(left, LOOK_EVERY_S))
            now = retry_io(self._read, what=self._remote.address)
            if now is not None and now != there:
                if not now["token"]:
                    return
                raise self._refused(now, "another run copies its checkpoints there")

    def _refused(self, other: Writer, why: str) -> UserError:
        return UserError(
            f"checkpoint.remote_folder = {self._remote.address!r}: {why}, that in {_place(other)}, and this run is in"
            f" {_place(self._me)}: name another address, such as {self._remote.address}-2"
        )

    def _read(self) -> Writer | None:
        """Return what the file says; None if it is not there, or, with a warning, unusable."""
        try:
            content = self._remote.read(NAME)
            return None if content is None else parse_json(content, Writer, f"{self._remote.address}/{NAME}")
        except BadFile as error:  # a write of it that was killed
            logger.warning(f"{error}: it is ignored")
            return None


def _start(writer: Writer) -> tuple[str, str]:
    return writer["folder"], writer["token"]


def _place(writer: Writer) -> str:
    return f"{writer['folder']} ({describe(writer)})"
