"""Run the lighthouse of a job of replica groups: it knows which live, and forms the quorum of each step.

    python -m torchtitan_graph.launch.lighthouse --job.config_file F --fault_tolerance.lighthouse http://HOST:PORT
    python -m torchtitan_graph.launch.lighthouse --job.config_file F --fault_tolerance.lighthouse auto

It keeps nothing: another one may take its place, and the groups connect to that. With `auto` several may be started, on
different machines, for one job: the first listens on a free port of its machine's address, and writes that into the
folder lighthouse/ in the dump folder; the others wait until it is gone. Its page shows the groups and can end them:
whoever reaches the port can do that.
"""

import os
import signal
import socket
import sys
import threading
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_graph import stop
from torchtitan_graph.config import load
from torchtitan_graph.config.fault_tolerance import AUTO, check_package
from torchtitan_graph.config.job import FaultTolerance
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import init_logging, logger
from torchtitan_graph.replicas.network import ADDRESS, LIGHTHOUSE
from torchtitan_graph.run.failure import CONFIGURATION
from torchtitan_graph.run.lock import FolderHeld, Lock
from torchtitan_graph.small_files import write_text

BEAT_S, STALE_AFTER_S = 2.0, 15.0  # of the lock of the lighthouse that serves


def main(argv: Sequence[str] | None = None) -> int:
    """Run the lighthouse until a signal, and return the exit code; for a job without replica groups, return at once."""
    stop.die_with_parent()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: ended.set())
    init_logging()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[-1:] in (["--help"], ["-h"]):
        print(__doc__, flush=True)  # the options of a run follow
    try:
        config = load(words)
        table = config.fault_tolerance
        if not table.enable:
            return 0
        check_package()
        if table.lighthouse is None:
            raise UserError("fault_tolerance.lighthouse is not set: auto, or the address to listen on")
        if table.lighthouse == AUTO:
            serve_in_turn(table, Path(config.job.dump_folder) / LIGHTHOUSE, ended)
        else:
            parts = urllib.parse.urlsplit(table.lighthouse)
            server = start(table, parts.hostname or "", parts.port or 0)
            ended.wait()
            server.shutdown()
    except UserError as error:
        logger.error(str(error))
        return CONFIGURATION
    return 0


def start(table: FaultTolerance, host: str, port: int) -> Any:
    """Return a server on that address; port 0 is a free one. Raises UserError if it can't listen there."""
    os.environ.setdefault("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer

    try:
        server = LighthouseServer(
            bind=f"{host}:{port}",
            min_replicas=table.min_replicas,
            join_timeout_ms=1000 * table.join_timeout_seconds,
            heartbeat_timeout_ms=1000 * table.heartbeat_timeout_seconds,
        )
    except RuntimeError as error:
        raise UserError(
            f"fault_tolerance.lighthouse = {table.lighthouse!r}: can't listen on {host}:{port}: {error}"
        ) from error
    logger.info(f"lighthouse: {host}:{server.address().rpartition(':')[2]}, for {table.replicas} replicas")
    return server


def serve_in_turn(table: FaultTolerance, folder: Path, ended: threading.Event) -> None:
    """Serve while this process has the lock of `folder`; wait for it while another has, until a signal."""
    host = socket.gethostbyname(os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    while not ended.is_set():
        try:
            lock = Lock(folder, STALE_AFTER_S)
        except FolderHeld:
            ended.wait(BEAT_S)
            continue
        server = start(table, host, 0)
        write_text(folder / ADDRESS, f"http://{host}:{server.address().rpartition(':')[2]}")
        while lock.beat() and not ended.wait(BEAT_S):
            pass
        server.shutdown()
        lock.release()


if __name__ == "__main__":
    sys.exit(main())
