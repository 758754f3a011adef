"""The secret of a job's replica groups, and the address on which its members listen."""

import contextlib
import os
import re
import secrets
import socket
import urllib.parse
from pathlib import Path

from torchtitan_graph.config.fault_tolerance import AUTO
from torchtitan_graph.errors import UserError
from torchtitan_graph.small_files import read_text

TOKEN = "replicas.token"
LIGHTHOUSE, ADDRESS = "lighthouse", "address"  # the lighthouse's folder, and a file in it
CONNECT_WITHIN_S = 5.0


def job_token(folder: Path) -> str:
    """Return the secret of the job in `folder`, from a file there that only its user can read; the first that asks
    makes it. Raises UserError if others could read it."""
    path = folder / TOKEN
    folder.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(path):
        tmp = path.with_name(f"{TOKEN}.{secrets.token_hex(8)}")  # containers on a host may have the same process id
        with os.fdopen(os.open(tmp, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(tmp, path)
        tmp.unlink()
    try:
        about = path.stat()
    except OSError as error:
        raise UserError(f"{path}, the secret of this job's replicas, can't be read ({error}): delete it") from error
    if about.st_mode & 0o077 or about.st_uid != os.geteuid():
        raise UserError(
            f"{path}, the secret of this job's replicas, can be read by others, or is another user's: delete it"
        )
    if not re.fullmatch(r"[0-9a-f]{64}", token := read_text(path).strip()):
        raise UserError(f"{path} is to hold the secret of this job's replicas, 64 hexadecimal digits: delete it")
    return token


class Connection:
    """A connection to the lighthouse, by which its loss is noticed: nothing is sent."""

    def __init__(self, lighthouse: str) -> None:
        """Connect. Raises OSError."""
        parts = urllib.parse.urlsplit(lighthouse)
        self._socket = socket.create_connection((parts.hostname, parts.port or 80), timeout=CONNECT_WITHIN_S)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):  # on Linux
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)

    def is_open(self) -> bool:
        try:
            return self._socket.recv(1) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        self._socket.close()


def lighthouse_address(lighthouse: str, folder: Path) -> str | None:
    """Return the address of the lighthouse of the job in `folder`; None if it is not known yet."""
    if lighthouse != AUTO:
        return lighthouse
    path = folder / LIGHTHOUSE / ADDRESS
    found = read_text(path).strip() if path.exists() else ""
    return found if is_address(found) else None


def is_address(text: str) -> bool:
    """Return whether a text is http://HOST:PORT."""
    parts = re.fullmatch(r"http://[A-Za-z0-9_-][A-Za-z0-9_.-]*:([0-9]{1,5})", text)
    return parts is not None and ".." not in text and 0 < int(parts[1]) < 2**16


def address_towards(lighthouse: str) -> str:
    """Return this machine's address on the way to the lighthouse: loopback, if the lighthouse is there."""
    parts = urllib.parse.urlsplit(lighthouse)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parts.hostname, parts.port))  # sends nothing
        except OSError as error:
            raise UserError(f"fault_tolerance.lighthouse = {lighthouse!r}: no way to that host ({error})") from error
        return str(probe.getsockname()[0])
