"""The identity of a process, as a lock, a status and a failure record it."""

import os
import socket
import sys
from pathlib import Path
from typing import Annotated, TypedDict

from msgspec import Meta

from torchtitan_graph.errors import printable
from torchtitan_graph.small_files import Count

Seconds = Annotated[float, Meta(ge=0, le=1e12)]


class Identity(TypedDict):
    """A process of a job.

    `job_id` is SLURM's, or torchrun's rendezvous id, or None. `attempt` counts the restarts of that job by SLURM or by
    Kubernetes, and those by torchrun within the last of them.
    """

    host: str
    pid: Annotated[int, Meta(gt=0, lt=2**31)]
    job_id: str | None
    attempt: Annotated[list[Count], Meta(min_length=2, max_length=2)]


def identity() -> Identity:
    """Return this process's identity."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    elastic = None if run_id in (None, "none") else f"torchrun {run_id}"  # "none" is every unnamed torchrun's id
    restarts = os.environ.get("SLURM_RESTART_COUNT") or os.environ.get("JOBSET_RESTART_ATTEMPT") or 0
    return {
        "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "pid": os.getpid(),
        "job_id": os.environ.get("SLURM_JOB_ID") or elastic,
        "attempt": [
            int(restarts),
            int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
        ],
    }


def processes() -> str:
    """Return a name for the processes among which a process id means the same one as it does here: those of one boot of
    one machine, in one namespace, such as a container's; "" if that is not known."""
    if sys.platform != "linux":
        return sys.platform  # it has no namespaces
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # /proc is another namespace's
            return ""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"boot {boot}, {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def describe(who: Identity) -> str:
    """Return an identity as text for a message."""
    job = f", job {who['job_id']}" if who["job_id"] else ""
    return printable(f"process {who['pid']} on {who['host']}{job}")
