"""Run the lighthouse of a job of replica groups: it knows which live, and forms the quorum of each step.

    python -m torchtitan_graph.launch.lighthouse --job.config_file F --fault_tolerance.lighthouse http://HOST:PORT

It listens on the address in fault_tolerance.lighthouse, and no other. It keeps nothing: started again on the same
address, it goes on. Its page there shows the groups, and can end them: whoever reaches the port can do that.
"""

import os
import signal
import sys
import threading
import urllib.parse
from collections.abc import Sequence

from torchtitan_graph.config import load
from torchtitan_graph.config.fault_tolerance import check_package
from torchtitan_graph.config.job import FaultTolerance
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import init_logging, logger
from torchtitan_graph.run.failure import CONFIGURATION


def main(argv: Sequence[str] | None = None) -> int:
    """Run the lighthouse until a signal, and return the exit code."""
    init_logging()
    try:
        table = load(sys.argv[1:] if argv is None else argv).fault_tolerance
        if table.lighthouse is None:
            raise UserError(
                "fault_tolerance.lighthouse is not set: the address to listen on, such as http://HOST:29510"
            )
        check_package()
        return serve(table)
    except UserError as error:
        logger.error(str(error))
        return CONFIGURATION


def serve(table: FaultTolerance) -> int:
    """Listen on fault_tolerance.lighthouse until a signal.

    Raises UserError if that address can't be listened on.
    """
    os.environ.setdefault("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer

    parts = urllib.parse.urlsplit(table.lighthouse or "")
    try:
        server = LighthouseServer(
            bind=f"{parts.hostname}:{parts.port}",
            min_replicas=table.min_replicas,
            join_timeout_ms=1000 * table.join_timeout_seconds,
            heartbeat_timeout_ms=1000 * table.heartbeat_timeout_seconds,
        )
    except RuntimeError as error:
        raise UserError(f"fault_tolerance.lighthouse = {table.lighthouse!r}: can't listen there: {error}") from error
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: ended.set())
    logger.info(f"lighthouse: {table.lighthouse}, for {table.replicas} replicas")
    ended.wait()
    server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
