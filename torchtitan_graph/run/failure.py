"""Failure records: a file per rank in the run's folder, for people and for the decision to restart."""

import contextlib
import os
import re
import shutil
import time
import traceback
from pathlib import Path
from typing import Any, TypedDict

from torchtitan_graph.errors import UserError, without_secrets
from torchtitan_graph.patience import FULL
from torchtitan_graph.run.files import read_record, write_json
from torchtitan_graph.run.identity import Identity, Seconds, identity
from torchtitan_graph.run.lock import FolderHeld
from torchtitan_graph.small_files import Count
from torchtitan_graph.stop import write_record
from torchtitan_graph.transient import in_words, is_lost_peer

FOLDER = "failures"
RESERVE, RESERVED = "run.reserve", 64 * 2**10  # a folder with a file of so many bytes, for failures on a full disk
# Exit codes of the trainer and of the preflight.
FAULT, CONFIGURATION, NON_FINITE, SAVE_FAILED, BAD_NODE, STORAGE_UNAVAILABLE, FOLDER_LOST = 1, 2, 3, 4, 5, 6, 7
FINAL = (CONFIGURATION, NON_FINITE, SAVE_FAILED)  # another attempt would fail the same way


class Cause(TypedDict):
    """Cause of a failure. `lost_peer`: the error reports no more than the loss of another rank."""

    time: Seconds
    code: int
    lost_peer: bool
    message: str
    traceback: str


class Failure(Identity, Cause):
    """Failure record of a rank, or a node, in the run's folder."""


class RankFailure(Cause):
    """Failure record of a rank, for its launcher."""

    rank: Count


def reserve(dump_folder: Path) -> None:
    """Write a file that reserves disk space for the failure record, should the disk be full when the run ends."""
    release_reserve(dump_folder)  # of an earlier run that was killed
    (dump_folder / RESERVE).mkdir()
    with (dump_folder / RESERVE / "space").open("xb") as file:
        file.write(os.urandom(RESERVED))  # random, so that no file system compresses it
        file.flush()
        os.fsync(file.fileno())


def release_reserve(dump_folder: Path) -> None:
    """Delete the reserved file, to free its space."""
    path = dump_folder / RESERVE
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def write_failure(dump_folder: Path, error: BaseException, code: int) -> None:
    """Write this rank's failure record, unless another run holds the folder.

    A folder is made for it only under SLURM, where the decision to start again reads it.
    """
    if isinstance(error, FolderHeld):
        return
    if dump_folder.exists() or "SLURM_JOB_ID" in os.environ:
        _write(dump_folder, f"rank{os.environ.get('RANK', '0')}", **_describe(error, code))


def report_to_launcher(error: BaseException, code: int) -> bool:
    """Write this rank's failure record for the launcher that started it, which shows it; return whether that worked."""
    return write_record(**_describe(error, code))


def write_bad_node(dump_folder: Path, node: str, why: str) -> None:
    """Write a failure record for a node that failed the preflight."""
    _write(dump_folder, node, host=node, code=BAD_NODE, lost_peer=False, message=why, traceback="")


def read_failures(dump_folder: Path) -> list[Failure]:
    """Return the failures of this job since SLURM (re)started it; of torchrun's attempts only the last one's.

    The cause comes first: the earliest that is not merely the loss of a peer.
    """
    me = identity()
    found = [read_record(path, Failure) for path in (dump_folder / FOLDER).glob("*.json")]
    records = [r for r in found if r and r["job_id"] == me["job_id"] and r["attempt"][0] == me["attempt"][0]]
    last = max((record["attempt"][1] for record in records), default=0)
    records = [record for record in records if record["attempt"][1] == last]
    return sorted(records, key=lambda record: (record["lost_peer"], record["time"]))


class NotTriedAgain(UserError):
    """Error: this attempt would fail like the one before it, with the exit code `code`."""

    def __init__(self, failure: Failure) -> None:
        message = failure["message"].removeprefix("NotTriedAgain: not tried again: ")  # of a peer
        super().__init__(f"not tried again: {message}")
        self.code: int = failure["code"]


def refuse_to_repeat(dump_folder: Path) -> None:
    """Raise the error that ended torchrun's previous attempt, if it would end this one too."""
    me = identity()
    if me["job_id"] is None or me["attempt"][1] == 0:
        return
    for failure in read_failures(dump_folder):
        if failure["code"] in FINAL:
            raise NotTriedAgain(failure)


def _describe(error: BaseException, code: int) -> dict[str, Any]:
    return {
        "code": BAD_NODE if code == FAULT and _blames_device(error) else code,
        "lost_peer": code == FAULT and is_lost_peer(error),
        "message": without_secrets(in_words(error)),
        "traceback": without_secrets("".join(traceback.format_exception(error))),
    }


def _write(dump_folder: Path, name: str, **record: Any) -> None:
    me = identity()
    job = re.sub(r"[^\w.-]", "_", me["job_id"] or "local", flags=re.ASCII)[:100]
    attempt = ".".join(map(str, me["attempt"]))
    path = dump_folder / FOLDER / f"{job}.{attempt}-{name}.json"

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**me, "time": time.time(), **record})

    try:
        write()
    except OSError as error:
        if error.errno not in FULL:
            raise
        release_reserve(dump_folder)
        write()


def _blames_device(error: BaseException) -> bool:
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)
