"""Run the lighthouse of a job of replica groups: it knows which live, and forms the quorum of each step.

    python -m torchtitan_graph.launch.lighthouse --job.config_file F --fault_tolerance.lighthouse http://HOST:PORT
    python -m torchtitan_graph.launch.lighthouse --job.config_file F --fault_tolerance.lighthouse auto

It keeps nothing: another one may take its place, and the groups connect to that. With `auto` several may be started, on
different machines, for one job: the first listens on a free port of its machine's address, and writes that into the
folder lighthouse/ in the dump folder; the others wait until it is gone. Its page shows the groups and can end them:
whoever reaches the port can do that.
"""

import contextlib
import ipaddress
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
from torchtitan_graph.errors import FolderLost, UserError
from torchtitan_graph.log import init_logging, logger
from torchtitan_graph.parallel.join import LOOPBACK
from torchtitan_graph.patience import is_transient, refuse_unwritable
from torchtitan_graph.replicas.network import ADDRESS, LIGHTHOUSE
from torchtitan_graph.run.failure import CONFIGURATION
from torchtitan_graph.run.lock import FolderHeld, Lock
from torchtitan_graph.small_files import write_text

BEAT_S, STALE_AFTER_S = 2.0, 15.0  # of the lock of the lighthouse that serves
ELSEWHERE = ("192.0.2.1", 9)  # an address of no machine (RFC 5737): the way there is that to any other network


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
    """Serve while this process has the lock of `folder`; wait for it while another has, until a signal.

    Raises UserError if the folder can't be written, for a reason that does not pass.
    """
    host, is_told = own_address(), False
    while not ended.is_set():
        try:
            with refuse_unwritable(f"{folder}, where the lighthouse says its address,", folder):
                lock = Lock(folder, STALE_AFTER_S, ended.wait)
                try:
                    _serve(table, host, lock, ended)
                finally:
                    lock.release()
        except FolderHeld:
            ended.wait(BEAT_S)
        except OSError as error:  # a file server that is away
            if not is_told:
                logger.warning(f"lighthouse: {folder} can't be used, and is tried again: {error}")
            is_told = True
            ended.wait(BEAT_S)


def _serve(table: FaultTolerance, host: str, lock: Lock, ended: threading.Event) -> None:
    """Serve until a signal, or until the lock is lost."""
    server, is_written = start(table, host, 0), False
    address = f"http://{host}:{server.address().rpartition(':')[2]}"
    try:
        while not ended.is_set():
            try:
                if not lock.beat():
                    logger.warning(f"lighthouse: {lock.path} is lost: {lock.why_lost()}")
                    return
                if not is_written:
                    write_text(lock.path.parent / ADDRESS, address, lock.check)
                    is_written = True
            except FolderLost:
                return
            except OSError as error:  # one that lasts ends the lock's life
                if not is_transient(error):
                    raise
                logger.warning(f"lighthouse: no heartbeat in {lock.path.parent}: {error}")
            ended.wait(BEAT_S)
    finally:
        server.shutdown()


def own_address() -> str:
    """Return this machine's address for other machines: that of its name, unless it has none or that is a loopback
    address, as on many; then that of the way to other networks. A machine without either is warned of."""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        found = socket.gethostbyname(name)
        why = f"its name, {name}, resolves to {found}"
    except OSError as error:
        found, why = LOOPBACK, f"its name, {name}, is not resolved ({error.strerror})"
    if not ipaddress.IPv4Address(found).is_loopback:
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(ELSEWHERE)  # sends nothing
        return str(probe.getsockname()[0])
    logger.warning(
        f"fault_tolerance.lighthouse = 'auto': this machine has no address that others reach: {why}, and it has no way"
        f" to other networks. The lighthouse listens on {LOOPBACK}, for groups on this machine alone; for others set"
        " fault_tolerance.lighthouse to an address"
    )
    return LOOPBACK


if __name__ == "__main__":
    sys.exit(main())
