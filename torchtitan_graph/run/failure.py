"""Why a rank failed: a file per rank in the run's folder, for who reads it and for the decision to start again."""

import os
import time
import traceback
from pathlib import Path
from typing import Any

from torchtitan_graph.run.files import read_json, write_json
from torchtitan_graph.run.identity import identity

FOLDER = "failures"
# Exit codes of the trainer and of the preflight.
FAULT, CONFIGURATION, NON_FINITE, BAD_NODE = 1, 2, 3, 4


def write_failure(dump_folder: Path, error: BaseException, code: int) -> None:
    """Say why this rank ends.

    A mistake that is found before anything has started leaves no folder behind; only under SLURM, where the decision
    to start again reads it, the folder is made for it.
    """
    if dump_folder.exists() or "SLURM_JOB_ID" in os.environ:
        _write(
            dump_folder,
            f"rank{os.environ.get('RANK', '0')}",
            host=identity()["host"],
            code=BAD_NODE if code == FAULT and _blames_device(error) else code,
            lost_peer=code == FAULT and _blames_peer(error),
            message=f"{type(error).__name__}: {error}",
            traceback="".join(traceback.format_exception(error)),
        )


def write_bad_node(dump_folder: Path, host: str, why: str) -> None:
    """Say that a node failed the preflight."""
    _write(dump_folder, host, host=host, code=BAD_NODE, lost_peer=False, message=why, traceback="")


def read_failures(dump_folder: Path) -> list[dict[str, Any]]:
    """Return this job attempt's failures, the cause first: the earliest that is not merely the loss of a peer."""
    records = [read_json(path) for path in (dump_folder / FOLDER).glob(f"{_prefix()}-*.json")]
    return sorted(filter(None, records), key=lambda record: (record["lost_peer"], record["time"]))


def _write(dump_folder: Path, name: str, **record: Any) -> None:
    folder = dump_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{_prefix()}-{name}.json", {"time": time.time(), **record})


def _prefix() -> str:
    """Name a job attempt: SLURM's; attempts within it by torchrun overwrite each other's files."""
    return f"{os.environ.get('SLURM_JOB_ID', 'local')}.{os.environ.get('SLURM_RESTART_COUNT') or 0}"


def _blames_device(error: BaseException) -> bool:
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)


def _blames_peer(error: BaseException) -> bool:
    """Return whether an error says no more than that another rank ended, or did not come in time."""
    text = str(error).lower()
    words = ("closed by peer", "connection reset", "connection closed", "timed out", "timeout", "broken pipe", "nccl")
    return isinstance(error, RuntimeError) and any(word in text for word in words)
