"""Run what each of several ranks does, in a process of its own on the null GPU, under torch's NCCL group; and say
whether what they send meets."""

import collections
import functools
import itertools
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from null_gpu import Message

from torchtitan_graph.check import matrix
from torchtitan_graph.parallel.join import LOOPBACK, host_store, join

Event = tuple[str, Any]  # a group's name, and what its ranks do in it


def run_on(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `fn(*args)` on every rank of an NCCL group, `matrix` on the GPU; give the results in the ranks' order.

    `fn` is a function of a module; its arguments and results can be pickled.
    """
    store = host_store(timedelta(minutes=10))
    context = multiprocessing.get_context("forkserver")  # they import torch once, and CUDA begins in each
    context.set_forkserver_preload(["torchtitan_graph.check.matrix"])
    pipes = [context.Pipe() for _ in range(world_size)]
    work = functools.partial(fn, *args)
    processes = [
        context.Process(target=_be_rank, args=(rank, world_size, store.port, theirs, work))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    try:
        results = [ours.recv() for ours, _ in pipes]
        failed = [f"rank {rank}:\n{result}" for rank, (succeeded, result) in enumerate(results) if not succeeded]
        assert not failed, "\n".join(failed)
        return [result for _, result in results]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _be_rank(rank: int, world_size: int, port: int, answer: Connection, work: Callable[[], Any]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}  # each has a GPU of its own
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    matrix.DEVICE = torch.device("cuda", 0)
    try:
        join("nccl")
        answer.send((True, work()))
    except BaseException:
        answer.send((False, traceback.format_exc()))
    dist.destroy_process_group() if dist.is_initialized() else None
    os._exit(0)


def members(by_rank: Sequence[Iterable[Message]]) -> dict[str, dict[int, int]]:
    """Give which process each rank of every group is, by the group's name."""
    found: dict[str, dict[int, int]] = collections.defaultdict(dict)
    for process, messages in enumerate(by_rank):
        for message in messages:
            found[message.group][message.rank] = process
    return found


def that_do_not_meet(by_rank: Sequence[Sequence[Message]]) -> list[str]:
    """Name the pairs of ranks that would wait for each other for ever, or mix up tensors.

    What two ranks do together, in whichever group, both of them start in the same order, of the same kind, dtype and
    size; what one of them sends the other receives.
    """
    groups = members(by_rank)
    found = []
    for one, other in itertools.combinations(range(len(by_rank)), 2):
        first, second = (_between(by_rank[a], groups, b) for a, b in ((one, other), (other, one)))
        swapped = [(group, _swapped(what)) for group, what in second]
        if first != swapped:
            place = next((i for i, (x, y) in enumerate(zip(first, swapped, strict=False)) if x != y), None)
            where = f"lengths {len(first)}, {len(swapped)}" if place is None else f"{first[place]}, {swapped[place]}"
            found.append(f"ranks {one} and {other}: {where}")
    return found


def _between(messages: Iterable[Message], groups: dict[str, dict[int, int]], other: int) -> list[Event]:
    """Give what a rank does together with another one, in order; what NCCL takes together has no order in it."""
    events: list[Event] = []
    for _, batch in itertools.groupby(messages, key=lambda message: message.batch):
        sent: dict[str, list[tuple[str, str, int]]] = collections.defaultdict(list)
        for message in batch:
            what = message.kind, message.dtype, message.number
            if message.peer >= 0:
                if groups[message.group][message.peer] == other:
                    sent[message.group].append(what)
            elif other in groups[message.group].values():
                events.append((message.group, what))
        events += [(group, sorted(whats)) for group, whats in sent.items()]
    return events


def _swapped(what: Any) -> Any:
    names = {"send": "receive", "receive": "send"}
    return sorted((names[kind], *rest) for kind, *rest in what) if isinstance(what, list) else what
