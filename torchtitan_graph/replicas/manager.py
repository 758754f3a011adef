"""torchft's manager and its process groups, set up as this package needs them. Its private names are here, and in
`rounds`.

torchft 0.2.0: the manager's server listens on every address, and a gloo group has several threads (see
`one_thread_per_gloo_group`) and the interface of the host's name. After the loss of the lighthouse a request for a
quorum ends with its timeout alone, and new quorums get the numbers of old ones, by which groups find each other: so a
manager, with a store of its own, lives as long as its lighthouse.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torchft.manager
from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

from torchtitan_graph.replicas.network import CONNECT_WITHIN_S
from torchtitan_graph.replicas.transport import Transport

for _name in ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # what matters is logged by `Replicas`


class _Manager(Manager):
    """torchft's, with the time to wait for a vote's other ranks, which may notice a loss late."""

    vote_timeout = timedelta(seconds=60)

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Return the vote of this group's ranks. With an error, others wait no longer for this rank's messages: they
        may not notice the loss of another replica."""
        if self.errored() is not None:
            self._pg.abort()
        return bool(super().should_commit(timeout or self.vote_timeout))


class _KnowsMembers:
    """Of a group that is made again for each quorum: the numbers of the replicas in it, and whether it was not used."""

    _timeout: timedelta

    members: tuple[int, ...] = ()
    is_new = False

    def configure(self, *arguments: Any) -> None:
        store, *_, group_size, global_ranks = arguments
        host, _, port = store.partition("/")[0].rpartition(":")
        # A store that has died with its group: torch's client would try again for up to three times its timeout.
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_WITHIN_S).close()
        self.members, self.is_new = tuple(rank // group_size for rank in global_ranks), True
        super().configure(*arguments)  # type: ignore[misc]

    def allow(self, timeout: timedelta) -> None:
        """Set the time that the next messages may take, where their own options don't count."""


class GlooOverReplicas(_KnowsMembers, ProcessGroupGloo):
    """A gloo group on one address, with one thread."""

    _pg: Any  # of the quorum of now

    def __init__(self, host: str, connect: timedelta, timeout: timedelta) -> None:
        """Make a group that listens on the address `host`; connecting may take `connect`, a message whose options
        don't say `timeout`."""
        super().__init__(connect)
        self._host, self._of_message = host, timeout

    def abort(self, errored: bool = True) -> None:
        """Leave the group: its connections are closed, in a thread, for that waits for a message that hangs."""
        old, self._pg = [self._pg], None
        threading.Thread(target=old.clear, name="old group", daemon=True).start()

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._host)]
        options._threads = 1
        options._timeout = self._timeout
        backend = gloo(store, rank, world_size, options)
        backend._set_default_timeout(self._of_message)
        backend._set_sequence_number_for_group()
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return group


class NCCLOverReplicas(_KnowsMembers, ProcessGroupNCCL):
    """An NCCL group; torchft's takes its own time in place of that in a message's options."""

    def allow(self, timeout: timedelta) -> None:
        self._timeout = timeout


def group_over_replicas(
    device: torch.device, host: str, connect: timedelta, timeout: timedelta
) -> GlooOverReplicas | NCCLOverReplicas:
    """Return the group of the same rank of all replicas that live, made again for each quorum."""
    return NCCLOverReplicas(timeout) if device.type == "cuda" else GlooOverReplicas(host, connect, timeout)


def new_manager(
    group: GlooOverReplicas | NCCLOverReplicas,
    transport: Transport,
    take: Callable[[Any], None],
    give: Callable[[], Any],
    *,
    replica_id: int,
    min_replicas: int,
    lighthouse: str,
    host: str,
    store: tuple[str, int],
    timeout: timedelta,
    quorum_timeout: timedelta,
    connect_timeout: timedelta,
    vote_timeout: timedelta,
) -> Manager:
    """Return a manager; all ranks of the replica group call this together. Its heartbeats begin here.

    Its quorum is synchronous, for who lives has to be known before a step's rows are dealt, and all replicas make the
    same first parameters.
    """
    with _server_on(host):
        manager = _Manager(
            group,
            take,
            give,
            min_replica_size=min_replicas,
            use_async_quorum=False,
            init_sync=False,
            timeout=timeout,
            quorum_timeout=quorum_timeout,
            connect_timeout=connect_timeout,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            store_addr=store[0],
            store_port=store[1],
            lighthouse_addr=lighthouse,
            replica_id=f"{replica_id:06d}",  # torchft orders replicas by these as texts
            hostname=host,
            checkpoint_transport=transport,
        )
    manager.vote_timeout, manager._executor = vote_timeout, _InDaemons()
    return manager


class _InDaemons:
    """Runs functions in threads that a process does not wait for when it ends: a request for a quorum may take long."""

    def submit(self, function: Callable[..., Any], **given: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function(**given))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="async_quorum", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True) -> None:
        """Do nothing."""


def end(manager: Manager) -> None:
    """End a manager: its heartbeats, and on rank 0 its server with the requests of all ranks.

    `Manager.shutdown` alone lets requests to the lighthouse go on. A rank's request may still be answered, in a thread
    that waits for it: without its group the manager does nothing then.
    """
    manager.shutdown(wait=False)
    manager._manager = manager._pg = None  # with the first ends its runtime


def forget_quorum(manager: Manager) -> None:
    """Forget a quorum that has failed: the next one would raise its error again."""
    manager._quorum_future = None


@contextlib.contextmanager
def _server_on(host: str) -> Iterator[None]:
    """Have the manager's server listen on one address; torchft has no argument for that."""
    start = torchft.manager.ManagerServer

    def start_there(**given: Any) -> Any:
        return start(**{**given, "bind": f"{host}:0"})

    with mock.patch.object(torchft.manager, "ManagerServer", start_there):
        yield
