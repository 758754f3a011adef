"""Why a rank failed: a file per rank in the run's folder, for who reads it and for the decision to start again."""

import os
import time
import traceback
from pathlib import Path
from typing import Any

from torchtitan_graph.errors import UserError
from torchtitan_graph.run.files import read_json, write_json
from torchtitan_graph.run.identity import identity
from torchtitan_graph.run.lock import FolderHeld
from torchtitan_graph.stop import LAUNCHER

FOLDER = "failures"
# Exit codes of the trainer and of the preflight.
FAULT, CONFIGURATION, NON_FINITE, SAVE_FAILED, BAD_NODE, STORAGE_AWAY = 1, 2, 3, 4, 5, 6
FINAL = (CONFIGURATION, NON_FINITE, SAVE_FAILED)  # another attempt would fail in the same way


def write_failure(dump_folder: Path, error: BaseException, code: int) -> None:
    """Say why this rank ends.

    A mistake that is found before anything has started leaves no folder behind; only under SLURM, where the decision
    to start again reads it, the folder is made for it. In a folder that another run has, nothing is written.
    """
    if isinstance(error, FolderHeld):
        return
    if dump_folder.exists() or "SLURM_JOB_ID" in os.environ:
        _write(dump_folder, f"rank{os.environ.get('RANK', '0')}", **_describe(error, code))


def tell_launcher(error: BaseException, code: int) -> bool:
    """Say why this rank ends to the launcher that started it, which tells the user; False if there is none."""
    folder = os.environ.get(LAUNCHER)
    if not folder:
        return False
    me, rank = identity(), os.environ.get("RANK", "0")
    record = {**me, "time": time.time(), "rank": int(rank), **_describe(error, code)}
    write_json(Path(folder, f"{me['attempt'][1]}.{rank}.json"), record)
    return True


def write_bad_node(dump_folder: Path, node: str, why: str) -> None:
    """Say that a node failed the preflight."""
    _write(dump_folder, node, host=node, code=BAD_NODE, lost_peer=False, message=why, traceback="")


def read_failures(dump_folder: Path) -> list[dict[str, Any]]:
    """Return the failures of this job since SLURM (re)started it; of torchrun's attempts only the last one's.

    The cause comes first: the earliest that is not merely the loss of a peer.
    """
    me = identity()
    records = [read_json(path) for path in (dump_folder / FOLDER).glob("*.json")]
    records = [r for r in records if r.get("job_id") == me["job_id"] and r["attempt"][0] == me["attempt"][0]]
    last = max((record["attempt"][1] for record in records), default=0)
    records = [record for record in records if record["attempt"][1] == last]
    return sorted(records, key=lambda record: (record["lost_peer"], record["time"]))


class NotTriedAgain(UserError):
    """An attempt would end as the one before it did, with this exit code."""

    def __init__(self, failure: dict[str, Any]) -> None:
        said = failure["message"].removeprefix("NotTriedAgain: not tried again: ")  # by a peer, or an attempt between
        super().__init__(f"not tried again: {said}")
        self.code: int = failure["code"]


def refuse_to_repeat(dump_folder: Path) -> None:
    """Raise the error that torchrun's attempt before this one ended with, if this one would end so too."""
    me = identity()
    if me["job_id"] is None or me["attempt"][1] == 0:
        return
    for failure in read_failures(dump_folder):
        if failure["code"] in FINAL:
            raise NotTriedAgain(failure)


def _describe(error: BaseException, code: int) -> dict[str, Any]:
    return {
        "code": BAD_NODE if code == FAULT and _blames_device(error) else code,
        "lost_peer": code == FAULT and _blames_peer(error),
        "message": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
    }


def _write(dump_folder: Path, name: str, **record: Any) -> None:
    folder = dump_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    me = identity()
    job = (me["job_id"] or "local").replace("/", "_").replace(" ", "_")
    attempt = ".".join(map(str, me["attempt"]))
    write_json(folder / f"{job}.{attempt}-{name}.json", {**me, "time": time.time(), **record})


def _blames_device(error: BaseException) -> bool:
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)


def _blames_peer(error: BaseException) -> bool:
    """Return whether an error says no more than that another rank ended, or did not come in time."""
    text = str(error).lower()
    words = ("closed by peer", "connection reset", "connection closed", "timed out", "timeout", "broken pipe", "nccl")
    return isinstance(error, RuntimeError) and any(word in text for word in words)
