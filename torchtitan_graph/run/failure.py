"""Why a rank failed: a file per rank in the run's folder, for who reads it and for the decision to start again."""

import os
import socket
import time
import traceback
from pathlib import Path
from typing import Any

from torchtitan_graph.run.files import read_json, write_json

FOLDER = "failures"
CONFIGURATION, NON_FINITE, NODE = 2, 3, 4  # exit codes: something to change, bad numbers, a bad node


def write_failure(dump_folder: Path, error: BaseException, code: int) -> None:
    """Say why this rank ends.

    A mistake that is found before anything has started leaves no folder behind; only under SLURM, where the decision
    to start again reads it, the folder is made for it.
    """
    if not dump_folder.exists() and "SLURM_JOB_ID" not in os.environ:
        return
    rank = int(os.environ.get("RANK", "0"))
    folder = dump_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "time": time.time(),
        "rank": rank,
        "host": socket.gethostname(),
        "code": code,
        "lost_peer": is_lost_peer(error),
        "message": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
    }
    write_json(folder / f"{_prefix()}-rank{rank}.json", record)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error says no more than that another rank ended, or did not come in time."""
    text = str(error).lower()
    words = ("connection closed by peer", "connection reset", "timed out", "timeout", "broken pipe", "nccl", "gloo")
    return isinstance(error, RuntimeError) and any(word in text for word in words)


def read_failures(dump_folder: Path) -> list[dict[str, Any]]:
    """Return this job attempt's failures, the cause first: the earliest that is not merely the loss of a peer."""
    records = [read_json(path) for path in (dump_folder / FOLDER).glob(f"{_prefix()}-*.json")]
    return sorted(filter(None, records), key=lambda record: (record["lost_peer"], record["time"]))


def _prefix() -> str:
    """Name a job attempt: SLURM's; attempts within it by torchrun overwrite each other's files."""
    return f"{os.environ.get('SLURM_JOB_ID', 'local')}.{os.environ.get('SLURM_RESTART_COUNT') or 0}"
