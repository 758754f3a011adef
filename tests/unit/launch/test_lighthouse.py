"""The lighthouse says an address that others reach, and outlives hiccups of the folder where it says it."""

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchtitan_graph.config.job import FaultTolerance
from torchtitan_graph.errors import UserError
from torchtitan_graph.launch import lighthouse
from torchtitan_graph.launch.lighthouse import own_address, serve_in_turn
from torchtitan_graph.log import logger

TABLE = FaultTolerance(enable=True, lighthouse="auto")


@pytest.fixture(autouse=True)
def _log_to_caplog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "propagate", True)


def unresolved(name: str) -> str:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


class NoWay(socket.socket):
    def connect(self, address: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")


class Way(socket.socket):
    def connect(self, address: object) -> None:
        pass

    def getsockname(self) -> tuple[str, int]:
        return "10.1.2.3", 5


@pytest.mark.parametrize("resolve", [lambda name: "127.0.1.1", unresolved], ids=["loopback", "unresolved"])
def test_a_name_that_others_can_not_use_is_not_what_is_written(
    resolve: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.setattr(socket, "socket", Way)
    assert own_address() == "10.1.2.3" and caplog.messages == []
    monkeypatch.setattr(socket, "socket", NoWay)
    assert own_address() == "127.0.0.1"
    assert "this machine has no address that others reach" in caplog.text
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.9.9.9")
    assert own_address() == "10.9.9.9"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of the servers that were started, which have no socket."""
    found: list[str] = []

    def start(table: FaultTolerance, host: str, port: int) -> SimpleNamespace:
        found.append(f"http://{host}:{5000 + len(found)}")
        return SimpleNamespace(address=lambda address=found[-1]: address, shutdown=lambda: found.append("down"))

    monkeypatch.setattr(lighthouse, "start", start)
    monkeypatch.setattr(lighthouse, "own_address", lambda: "10.1.2.3")
    monkeypatch.setattr(lighthouse, "BEAT_S", 0.01)
    return found


@pytest.mark.parametrize("broken", ["utime", "open", "replace"])
def test_an_error_of_the_file_server_does_not_end_it(
    broken: str, served: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    call, errors = getattr(os, broken), iter([OSError(errno.EIO, "Input/output error")] * 2)

    def fail_first(*words: object, **options: object) -> object:
        if "lighthouse" in str(words) and (error := next(errors, None)):
            raise error
        return call(*words, **options)

    monkeypatch.setattr(os, broken, fail_first)
    folder, ended = tmp_path / "lighthouse", threading.Event()
    thread = threading.Thread(target=serve_in_turn, args=(TABLE, folder, ended))
    thread.start()
    while not (folder / "address").exists() and thread.is_alive():
        time.sleep(0.01)
    time.sleep(0.05)
    assert (folder / "address").read_text() == served[-1] == "http://10.1.2.3:5000"
    ended.set()
    thread.join()
    assert served[-1] == "down" and not (folder / "run.lock").exists()
    assert "Input/output error" in caplog.text


def test_a_folder_that_can_not_be_written_is_refused(served: list[str], tmp_path: Path) -> None:
    (tmp_path / "lighthouse").touch()
    with pytest.raises(UserError, match="lighthouse, where the lighthouse says its address, can't be written"):
        serve_in_turn(TABLE, tmp_path / "lighthouse", threading.Event())
