"""Who this process is: what a lock, a status and a failure say of the one that wrote them."""

import os
import socket
from typing import Any


def identity() -> dict[str, Any]:
    """Return host, process id, job id and attempt of this process, as JSON has them.

    `job_id` is SLURM's, or torchrun's rendezvous id, or None. `attempt` counts how often that job was started again:
    by SLURM, and within it by torchrun; of two attempts of one job the larger is the later.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    elastic = None if run_id in (None, "none") else f"torchrun {run_id}"  # "none" is every unnamed torchrun's id
    return {
        "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "pid": os.getpid(),
        "job_id": os.environ.get("SLURM_JOB_ID") or elastic,
        "attempt": [
            int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
        ],
    }


def describe(who: dict[str, Any]) -> str:
    """Return an identity for a message."""
    job = f", job {who['job_id']}" if who.get("job_id") else ""
    return f"process {who.get('pid')} on {who.get('host')}{job}"
