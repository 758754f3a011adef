"""Rendezvous of a job's processes; on one machine over loopback alone, with no listener beyond it."""

import datetime
import ipaddress
import os
import socket
import sys

import torch
import torch.distributed as dist

from torchtitan_graph.torch_private.distributed import one_thread_per_gloo_group

LOOPBACK = "127.0.0.1"
_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


def join(backend: str, timeout: datetime.timedelta = datetime.timedelta(minutes=30)) -> None:
    """Start the process group from torchrun's environment variables; without them, this process alone is the group.

    Raises:
        RuntimeError: not all processes joined within `timeout`.
        OSError: the port is in use.
    """
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = connect(rank, timeout, world_size)
    one_thread_per_gloo_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def meet() -> None:
    """Wait until all ranks have called this."""
    # Given its device, NCCL does not warn that it guesses one.
    dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)


def connect(rank: int, timeout: datetime.timedelta, wait_for: int | None = None) -> dist.TCPStore:
    """Return the job's store at MASTER_ADDR:MASTER_PORT, which rank 0 hosts unless torchrun does.

    If that is a loopback address, and all processes are on this machine, gloo and NCCL use the loopback interface too,
    unless the environment names another. `wait_for` is the number of processes the host waits for.

    Raises:
        RuntimeError: nothing answers there within `timeout`.
        OSError: the port is in use.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    world_size = os.environ.get("WORLD_SIZE")
    if not _is_loopback(host) or os.environ.get("LOCAL_WORLD_SIZE", world_size) != world_size:
        return dist.TCPStore(host, port, wait_for, is_host, timeout)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _INTERFACE)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={_INTERFACE}")  # = excludes other interfaces with this prefix
    if is_host:
        return host_store(timeout, host, port, wait_for)
    return dist.TCPStore(host, port, wait_for, False, timeout)


def host_store(
    timeout: datetime.timedelta, host: str = LOOPBACK, port: int = 0, wait_for: int | None = None
) -> dist.TCPStore:
    """Return a store hosted on `host` only; port 0 is a free one. torch itself would listen on every address."""
    listener = socket.create_server((host, port))
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, wait_for, True, timeout, master_listen_fd=listener.detach())


def _is_loopback(host: str) -> bool:
    # Not resolved from a name: many machines map their own hostname to a loopback address, where no other reaches them.
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return host == "localhost"
