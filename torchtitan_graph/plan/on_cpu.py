"""A CPU as a device: its operators by replay, the optimizer's step measured, gloo's collectives by a table.

Note [A rank's core]
A rank has a core, and gloo's thread of it works on the same core: it copies through loopback. So what a collective costs
is taken from the arithmetic, and hardly any of it is hidden; and ranks that are more than the cores take turns.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph import device as devices
from torchtitan_graph.graph.cost import Costs, Link
from torchtitan_graph.graph.liveness import held_memory, size_of
from torchtitan_graph.graph.trace import TracedResult
from torchtitan_graph.graph.traffic import kind_of, received
from torchtitan_graph.optim import clip_grad_norm
from torchtitan_graph.parallel.storage import Storage
from torchtitan_graph.plan.build import Job, Rank
from torchtitan_graph.plan.replay import Replay
from torchtitan_graph.plan.simulate import Prices, optimizer_seconds
from torchtitan_graph.rates import Rates

_SAMPLE_BYTES = 64 << 20  # of parameters, for the optimizer's step: its moments are then more than any cache holds
_MAPPED_BYTES = 32 << 20  # glibc asks the system for as much at once, each time: a replay pays for it too


class Wire(NamedTuple):
    """What a gloo collective takes on each rank: seconds, and bytes/s of those that it receives."""

    latency: float
    rate: float


# Two ranks on a machine of two cores, over loopback, by kind: docs/log.md.
GLOO: Mapping[str, Wire] = {
    "all_gather_into_tensor": Wire(0.3e-3, 1e9),
    "reduce_scatter_tensor": Wire(0.3e-3, 0.6e9),
    "all_reduce": Wire(0.3e-3, 1e9),
    "all_to_all_single": Wire(0.3e-3, 1e9),
    "exchange": Wire(0.3e-3, 1e9),
}


@dataclass(frozen=True)
class ReplayedCosts(Costs):
    """What nodes take on this CPU; `crowding` is how many ranks share a core."""

    replay: Replay = field(default_factory=Replay)
    crowding: float = 1.0
    new_bytes: Mapping[Node, int] = field(default_factory=dict)

    def computing(self, node: Node) -> float:
        fresh = self.new_bytes.get(node, 0) * self.replay.seconds_per_new_byte
        return (self.replay.times(node).at() + fresh) * self.crowding

    def sending(self, node: Node, link: Link) -> float:
        wire = GLOO.get(kind_of(node), GLOO["all_gather_into_tensor"])
        return (wire.latency + received(node, link.degree) / wire.rate) * self.crowding

    def starting(self, node: Node, link: Link) -> float:
        return self.sending(node, link)


class ThisCpu:
    """This machine's CPU as a device, for a job of so many ranks on it. What it measured it keeps."""

    def __init__(self, num_ranks: int) -> None:
        one = 1 if num_ranks > 1 else torch.get_num_threads()
        num_threads = int(os.environ.get("OMP_NUM_THREADS", one))
        self.num_ranks, self.replay = num_ranks, Replay(num_threads)
        self.crowding = max(1.0, num_ranks * num_threads / len(os.sched_getaffinity(0)))
        self._new: dict[GraphModule, Mapping[Node, int]] = {}

    def learn(self, job: Job, progress: Callable[[int, int], None] | None = None) -> int:
        """Run every different operator of a job's ranks; give how many were new."""
        return self.replay.learn(itertools.chain.from_iterable(map(_graphs, job.ranks)), progress)

    def prices(self, rates: Rates) -> Prices:
        """Give what the nodes of a rank's graphs take."""

        def of(rank: Rank) -> Costs:
            new: dict[Node, int] = {}
            for gm in _graphs(rank):
                if gm not in self._new:
                    self._new[gm] = new_bytes(gm)
                new |= self._new[gm]
            return ReplayedCosts(rates, rank.links, rank.visible, self.replay, self.crowding, new)

        return of

    def rates(self, rates: Rates, job: Job) -> Rates:
        """Give a CPU's rates with this machine's memory, and at the speed at which it takes this job's optimizer's
        step."""
        rank = max(job.ranks, key=lambda each: optimizer_seconds(each, rates))
        storages = [each for each in rank.graphs.storages.values() if each.is_trained]
        measured = self._update_s(storages) * self.crowding
        faster = optimizer_seconds(rank, rates) / measured
        memory = devices.memory_total_gib() / self.num_ranks
        return rates._replace(memory=rates.memory * faster, memory_gib=memory)

    def _update_s(self, storages: Iterable[Storage]) -> float:
        """Give the seconds of clipping and of AdamW's step on parameters like these, or on as many as are a sample."""
        sizes = [each.padded_shape.numel() for each in storages]
        whole, taken = sum(sizes), 0
        parameters = []
        for size in sizes:
            if taken * 4 >= _SAMPLE_BYTES:
                break
            parameters.append(torch.nn.Parameter(torch.randn(min(size, _SAMPLE_BYTES // 4))))
            taken += parameters[-1].numel()
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
        times = []
        for _ in range(5):
            begin = self.replay.clock()
            clip_grad_norm(parameters, 1.0)
            optimizer.step()
            times.append(self.replay.clock() - begin)
        return statistics.median(times[1:]) * whole / taken


def _graphs(rank: Rank) -> list[GraphModule]:
    train = rank.graphs.train
    if isinstance(train, TracedResult):
        return [train.gm]
    return [part.gm for stage in train.values() for part in stage.parts.by_name.values()]


def new_bytes(gm: GraphModule) -> dict[Node, int]:
    """Give by node the bytes that the process has not held before in the run of a graph."""
    found, most = {}, 0
    for node, held in held_memory(gm, size_of).items():
        if held > most:
            found[node] = held - most if size_of(node) < _MAPPED_BYTES else 0
            most = held
    return found
