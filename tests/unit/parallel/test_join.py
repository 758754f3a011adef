import datetime
import os
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from pool import run_on
from sockets import listening
from torchtitan_graph.parallel.join import LOOPBACK, _is_loopback, connect, host_store

TIMEOUT = datetime.timedelta(seconds=60)
ALONE = """
import os
import socket
import torch.distributed as dist
from sockets import listening
from torchtitan_graph.parallel.join import join
join("gloo")
print(dist.get_rank(), dist.get_world_size(), *listening(os.getpid()))
"""


def listening_here() -> set[str]:
    return listening(os.getpid())


def test_a_process_without_torchrun_is_a_group_that_listens_on_loopback_only() -> None:
    alone = {name: value for name, value in os.environ.items() if not name.startswith("GLOO_")}
    alone["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", ALONE], env=alone, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"0 1 {LOOPBACK}"], done.stderr


def test_ranks_listen_on_loopback_only() -> None:
    assert run_on(2, listening_here) == [{LOOPBACK}] * 2


def test_a_store_is_hosted_on_loopback_only_and_is_found_there() -> None:
    before = listening_here()
    store = host_store(TIMEOUT)
    assert listening_here() == before | {LOOPBACK}
    dist.TCPStore(LOOPBACK, store.port, timeout=TIMEOUT).set("key", "value")
    assert store.get("key") == b"value"


def test_what_listens_on_every_address_is_seen() -> None:
    """A control of the tests above: a store as torch opens it."""
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    assert listening_here() & {"::", "0.0.0.0"}
    del store


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_loopback(host: str) -> None:
    assert _is_loopback(host)


@pytest.mark.parametrize("host", ["vm", "10.0.0.1", "0.0.0.0"])
def test_what_a_machine_calls_itself_is_not_loopback(host: str) -> None:
    """It may stand for 127.0.1.1 there, and for another address elsewhere."""
    assert not _is_loopback(host)


@pytest.mark.parametrize(("num_here", "interface"), [("2", {"lo", "lo0"}), ("1", {None})])
def test_the_first_of_several_machines_does_not_keep_to_loopback(
    num_here: str, interface: set[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its torchrun may have been given --master_addr localhost."""
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = str(free.getsockname()[1])
    given = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": num_here, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    store = connect(0, TIMEOUT)
    assert os.environ.get("GLOO_SOCKET_IFNAME") in interface
    assert bool(listening_here() & {"::", "0.0.0.0"}) == (num_here == "1")
    del store


def test_a_port_in_use_is_an_error() -> None:
    store = host_store(TIMEOUT)
    with pytest.raises(OSError, match="in use"):
        host_store(TIMEOUT, port=store.port)
