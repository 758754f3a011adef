"""Messages between replicas that hang, over real gloo groups."""

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllreduceOptions

pytest.importorskip("torchft", reason="replica groups need torchft")

from torchtitan_graph.replicas.manager import GlooOverReplicas
from torchtitan_graph.replicas.replicas import Replicas

LONG, SHORT = timedelta(hours=1), timedelta(seconds=2)


@pytest.fixture
def pair() -> Iterator[list[GlooOverReplicas]]:
    """The same rank of two replicas, in two threads' groups."""
    groups, store = [GlooOverReplicas("127.0.0.1", LONG, SHORT) for _ in range(2)], dist.HashStore()

    def connect(rank: int) -> None:
        groups[rank]._pg = groups[rank]._create_pg(store, rank, 2)

    other = threading.Thread(target=connect, args=(1,))
    other.start()
    connect(0)
    other.join()
    yield groups
    for group in groups:
        group.abort()


def test_a_store_that_has_died_with_its_group_is_not_waited_for() -> None:
    """torch's own client would try for an hour here, and then again."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group, place = GlooOverReplicas("127.0.0.1", LONG, SHORT), f"127.0.0.1:{store.port}/torchft/7/0"
    group.configure(place, "replica", 0, 1, 7, 0, 2, [4])
    assert group.members == (2,) and sum_of(group, torch.ones(1)).wait()
    group.abort()
    del store
    with pytest.raises(ConnectionRefusedError):
        group.configure(place, "replica", 0, 2, 8, 0, 2, [2, 4])


def sum_of(group: GlooOverReplicas, x: torch.Tensor, timeout: timedelta = LONG) -> dist.Work:
    options = AllreduceOptions()
    options.timeout = timeout
    return group.allreduce([x], options)


def waiting(store: dist.Store) -> Replicas:
    replicas = Replicas.__new__(Replicas)
    replicas._store, replicas._device, replicas._num_quorums = store, torch.device("cpu"), 3
    return replicas


def test_a_message_that_comes_is_waited_for(pair: list[GlooOverReplicas]) -> None:
    mine, theirs = torch.ones(3), 2 * torch.ones(3)
    works = [sum_of(pair[0], mine), sum_of(pair[1], theirs)]
    for work in works:
        waiting(dist.HashStore())._wait(work)
    assert mine.tolist() == theirs.tolist() == [3.0, 3.0, 3.0]


def test_another_rank_that_has_noticed_a_loss_ends_the_wait_and_the_group_is_left_at_once(
    pair: list[GlooOverReplicas],
) -> None:
    """The peer never answers, and the message may take an hour: only what the other rank says ends the wait."""
    store = dist.HashStore()
    replicas, work = waiting(store), sum_of(pair[0], torch.ones(3))
    store.set("loss 2", "")  # of a step before
    threading.Timer(1.5, store.set, (replicas._loss(), "")).start()
    with pytest.raises(RuntimeError, match="another rank of this group has noticed it"):
        replicas._wait(work)
    assert not work.is_completed()
    pair[0].abort()  # does not wait for the message
    assert pair[0]._pg is None


def test_else_the_wait_ends_with_the_time_that_the_message_may_take(pair: list[GlooOverReplicas]) -> None:
    with pytest.raises(RuntimeError, match="(?i)timed out"):
        waiting(dist.HashStore())._wait(sum_of(pair[0], torch.ones(3), SHORT))


def test_a_message_whose_options_do_not_say_takes_as_long_as_one_may_and_not_as_connecting(
    pair: list[GlooOverReplicas],
) -> None:
    """As torchft's own messages, of LocalSGD and DiLoCo."""
    with pytest.raises(RuntimeError, match="(?i)timed out"):
        pair[0].allreduce([torch.ones(3)], AllreduceOptions()).wait()
