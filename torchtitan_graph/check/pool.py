"""Worker processes joined by gloo, started once and kept for all calls of a run.

    def total(start):                       # a module-level function
        x = torch.full((), start + dist.get_rank())
        dist.all_reduce(x)
        return x.item()

    assert run_on(2, total, 1.0) == [3.0, 3.0]

Each world size has processes of its own, started when first asked for. A rank that raises, dies or takes too long
fails the call with every rank's traceback; the processes of that world size are then killed, and the next call
starts new ones.
"""

import atexit
import contextlib
import datetime
import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_graph.parallel.join import LOOPBACK, host_store, join

START_TIMEOUT_S = 180.0
AFTER_FAILURE_S = 2.0  # time for the other ranks to report, once one has failed


class PoolFailed(Exception):
    """Error with the state of every rank when a call of `run_on` failed; `first` is the report of the first to fail."""

    def __init__(self, report: str, first: str = "") -> None:
        super().__init__(report)
        self.first = first


def run_on(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `world_size` ranks at once and return their results in rank order.

    `fn` is a module-level function, arguments and results can be pickled (no DTensors). It finds a gloo process group,
    one thread, seed 0, deterministic algorithms and the caller's warning filters. `timeout` is in seconds.
    Raises `PoolFailed`.
    """
    if world_size not in _started:
        _started[world_size] = _Workers(world_size)
    try:
        return _started[world_size].run(fn, args, kwargs, timeout)
    except BaseException:  # also an interrupt: the ranks are still busy with this call
        _started.pop(world_size).kill()
        raise


@functools.cache
def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return the CPU mesh of that shape, made once per worker. Call it inside `fn`, on all ranks alike."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class _Workers:
    """The processes of one world size."""

    def __init__(self, world_size: int) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="pool-")
        # This process hosts the store, as torchrun's agent does: a free port without a race.
        self.store = host_store(datetime.timedelta(seconds=START_TIMEOUT_S))
        self.connections: list[Connection] = []
        self.processes: list[multiprocessing.process.BaseProcess] = []
        context = multiprocessing.get_context("spawn")
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            Path(self._stack_file(rank)).touch()  # it may be read before the worker has written it
            # Not daemons: those may have no children, and a data loader has some.
            process = context.Process(
                target=_serve, args=(rank, world_size, self.store.port, theirs, self._stack_file(rank)), daemon=False
            )
            process.start()
            theirs.close()  # so that the worker's death closes the connection
            self.connections.append(ours)
            self.processes.append(process)
        try:
            self._collect("starting", START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise

    def run(self, fn: Callable[..., Any], args: tuple, kwargs: dict, timeout: float) -> list[Any]:
        call = pickle.dumps((fn, args, kwargs))
        task = pickle.dumps((sys.path, warnings.filters, call))
        for connection in self.connections:
            with contextlib.suppress(BrokenPipeError):  # a worker that died: reported below
                connection.send_bytes(task)
        return self._collect(f"{fn.__module__}.{fn.__qualname__}", timeout)

    def _collect(self, what: str, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}  # in order of arrival
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < len(self.processes) and time.monotonic() < deadline:
            ranks = {c: r for r, c in enumerate(self.connections) if r not in results and r not in failures}
            for connection in wait(list(ranks), max(0.0, deadline - time.monotonic())):
                rank = ranks[connection]  # type: ignore[index]
                returned, value = self._receive(rank)
                (results if returned else failures)[rank] = value
                if not returned:
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
        if len(results) == len(self.processes):
            return [results[rank] for rank in range(len(self.processes))]
        headline = f"rank {next(iter(failures))} failed first" if failures else f"not done after {timeout:g} s"
        report = self._report(results, failures)
        raise PoolFailed(
            f"{what} on {len(self.processes)} ranks: {headline}\n{report}", next(iter(failures.values()), "")
        )

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(self.connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            process = self.processes[rank]
            process.join(5)
            stack = Path(self._stack_file(rank)).read_text()  # a segmentation fault leaves one
            killed = " (killed: was the machine out of memory?)" if process.exitcode == -signal.SIGKILL else ""
            return False, f"the process died with exit code {process.exitcode}{killed}\n{stack}"

    def _report(self, results: dict[int, Any], failures: dict[int, str]) -> str:
        stuck = [rank for rank in range(len(self.processes)) if rank not in results and rank not in failures]
        for rank in stuck:
            os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)  # faulthandler writes the stack, also in C++ code
        time.sleep(0.5 if stuck else 0)
        reports = {rank: "returned" for rank in results} | failures
        reports |= {rank: f"still running, at\n{Path(self._stack_file(rank)).read_text()}" for rank in stuck}
        return "\n".join(f"--- rank {rank}: {reports[rank].rstrip()}" for rank in sorted(reports))

    def _stack_file(self, rank: int) -> str:
        return os.path.join(self.folder.name, f"rank{rank}")

    def close(self) -> None:
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(b"")
        for process in self.processes:
            process.join(10)
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.join()
            process.close()
            connection.close()
        self.folder.cleanup()


_started: dict[int, _Workers] = {}


@atexit.register
def _close_all() -> None:
    while _started:
        _started.popitem()[1].close()


def _serve(rank: int, world_size: int, port: int, connection: Connection, stack_file: str) -> None:
    """Run one rank: join the process group, then answer calls until the parent stops it or is gone."""
    stacks = open(stack_file, "w")  # noqa: SIM115  (open for as long as the process lives)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at a terminal Ctrl-C reaches the workers too: the parent ends them
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    torch.set_num_threads(1)
    connection.send_bytes(_outcome(functools.partial(join, "gloo")))
    with contextlib.suppress(EOFError, BrokenPipeError):
        while task := connection.recv_bytes():
            connection.send_bytes(_outcome(functools.partial(_perform, task)))
        dist.barrier()
        dist.destroy_process_group()
        return
    os._exit(1)  # the parent is gone


def _outcome(work: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps((True, work()))
    except BaseException:  # an exit in a call must not end the worker
        return pickle.dumps((False, traceback.format_exc()))


def _perform(task: bytes) -> Any:
    sys.path, filters, call = pickle.loads(task)  # the path first: the call's module may be found only there
    fn, args, kwargs = pickle.loads(call)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    with warnings.catch_warnings():
        warnings.filters[:] = filters  # type: ignore[index]
        return fn(*args, **kwargs)
