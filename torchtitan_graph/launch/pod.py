"""Start the launcher in a pod of an Indexed Job, as the manifests of `kubernetes.py` do.

    python -m torchtitan_graph.launch.pod TORCHRUN'S OPTIONS -- --table.key value ...

It adds what only the pod knows, and decides whether the pod has succeeded: a run that was stopped by a signal, as when
a node is drained, has saved a checkpoint and ends with 0, but Kubernetes has to start it again.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_graph import stop
from torchtitan_graph.config import load
from torchtitan_graph.errors import UserError
from torchtitan_graph.launch.__main__ import main as launch
from torchtitan_graph.log import init_logging, logger
from torchtitan_graph.run.failure import CONFIGURATION
from torchtitan_graph.run.status import STOPPED, read_status

# Other pods may have to be scheduled, and to pull the image, before all are there.
MEET_WITHIN_S = 1800
FINISHED, AGAIN = 0, 128 + signal.SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher, and return its exit code; 143 in place of 0 where the run has to be started again."""
    stop.install()
    init_logging()
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else 0
    try:
        folder = Path(load(words[at + 1 :]).job.dump_folder)
        added = of_this_pod(folder)
    except UserError as error:
        logger.error(str(error))
        return CONFIGURATION
    # See launch/__main__.py: restarted workers must not find their predecessors in the store.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return exit_code(launch([*words[:at], *added, *words[at:]]), folder)


def of_this_pod(folder: Path) -> list[str]:
    """Return torchrun's options that differ between pods, and those of logs; output is kept in `folder`.

    Raises:
        UserError: this is no pod of such a Job.
    """
    names = ("JOB_COMPLETION_INDEX", "JOBSET_RESTART_ATTEMPT", "POD_IP")
    if missing := [name for name in names if not os.environ.get(name)]:
        raise UserError(
            f"{missing[0]} is not set: this command runs in a pod of the manifest that python -m "
            "torchtitan_graph.launch --kubernetes writes; start python -m torchtitan_graph.launch elsewhere"
        )
    index, attempt, address = (os.environ[name] for name in names)
    # torch would compare names with addresses to find the host, and the name may not be published yet.
    is_host = str(index == "0").lower()
    rendezvous = f"is_host={is_host},read_timeout={MEET_WITHIN_S},join_timeout={MEET_WITHIN_S}"
    logs = str(folder / "logs" / attempt / f"node-{index}")
    return [
        *["--rdzv-backend", "c10d", "--rdzv-conf", rendezvous, "--local-addr", address],
        *["--role", "rank", "--log-dir", logs, "--redirects", "3", "--tee", "3", "--local-ranks-filter", "0"],
    ]


def exit_code(code: int, folder: Path) -> int:
    """Return the exit code of the pod, by that of the launcher and the status of the run in `folder`."""
    status = read_status(folder) if code == FINISHED else None
    if status is None or status["state"] != STOPPED:
        return code
    logger.warning(f"{status['reason']}: the run is not finished, and this pod ends with {AGAIN} to be started again")
    return AGAIN


if __name__ == "__main__":
    sys.exit(main())
