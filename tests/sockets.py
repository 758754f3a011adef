"""Look at what takes connections."""

import contextlib

import psutil


def listening(pid: int) -> set[str]:
    """Return the addresses on which a process and those that it started take connections."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        return set().union(*map(_listening, [parent, *parent.children(recursive=True)]))
    return set()


def _listening(process: psutil.Process) -> set[str]:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        sockets = process.net_connections(kind="inet")
        return {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
    return set()
