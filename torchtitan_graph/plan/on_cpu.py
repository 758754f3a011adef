"""A CPU as a device: its operators by replay, its optimizer's step measured, gloo's collectives by a table.

Note [A rank's core]
A rank has a core, and gloo's thread of it works on the same core: it copies through loopback. So a collective's time is
added to the arithmetic, and none of it is hidden; and more ranks than cores take turns.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph import device as devices
from torchtitan_graph.analysis.cost import OTHER, Costs, Link, Work
from torchtitan_graph.analysis.liveness import held_memory, size_of
from torchtitan_graph.analysis.traffic import collective_of, is_permutation, received
from torchtitan_graph.ops.operator import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Collective
from torchtitan_graph.optim import clip_grad_norm
from torchtitan_graph.plan.operator_times import Replay, is_run
from torchtitan_graph.plan.ranks import BuiltJob, Rank
from torchtitan_graph.plan.simulate import Prices
from torchtitan_graph.rates import Rates

_MAPPED_BYTES = 32 << 20  # glibc maps allocations of this size again each time: a replay pays for that too
_ON_THE_HOST = Work(OTHER, 0.0, 0.0, 0.0, 4)  # a view, which takes only Python's time


class Wire(NamedTuple):
    """The time of a gloo collective, of ranks with a core each: seconds for each doubling of the group, and bytes/s of
    received bytes."""

    latency: float
    rate: float


# By kind, over loopback: measured with two and four ranks, docs/log/forecasts.md.
_SUM, _MESSAGE = Wire(1.0e-3, 1.0e9), Wire(0.14e-3, 3.0e9)
GLOO: Mapping[Collective, Wire] = {
    ALL_GATHER: Wire(0.8e-3, 0.65e9),
    REDUCE_SCATTER: Wire(0.9e-3, 0.4e9),  # gloo sums all of it, and returns a shard
    ALL_TO_ALL: Wire(0.45e-3, 1.0e9),
}


@dataclass(frozen=True)
class ReplayedCosts(Costs):
    """The cost model of nodes on this CPU.

    crowding   how many ranks share a core
    new_bytes  bytes above the process's memory so far in a run of its graph, by node
    """

    replay: Replay = field(default_factory=Replay)
    crowding: float = 1.0
    new_bytes: Mapping[Node, int] = field(default_factory=dict)

    def computing(self, node: Node) -> float:
        fresh = self.new_bytes.get(node, 0) * self.replay.seconds_per_new_byte
        return (self.replay.times(node).at() + fresh) * self.crowding * self.factor(node)

    def works(self, node: Node) -> Sequence[Work]:
        return super().works(node) or (_ON_THE_HOST,) * is_run(node)

    def sending(self, node: Node, link: Link) -> float:
        wire = _MESSAGE if is_permutation(node) else GLOO.get(collective_of(node), _SUM)
        return self._on(wire, received(node, link.degree), link) * self.factor(node)

    def all_reduce(self, num_bytes: int, link: Link) -> float:
        return self._on(_SUM, ALL_REDUCE.received(num_bytes, link.degree), link)

    def _on(self, wire: Wire, size: float, link: Link) -> float:
        return (wire.latency * math.ceil(math.log2(link.degree)) + size / wire.rate) * self.crowding

    def starting(self, node: Node) -> float:
        return self.seconds(node)

    def message(self, size: float, is_near: bool) -> float:
        return (_MESSAGE.latency + size / _MESSAGE.rate) * self.crowding

    def moving(self, num_bytes: float) -> float:
        return num_bytes * self.replay.seconds_per_byte * self.crowding

    def optimizer(self, trained: int, on_host: bool = False) -> float:
        return trained * seconds_of_update(self.replay) * self.crowding


class ThisCpu:
    """This machine's CPU as a device, for a job of so many ranks on it. Measurements are kept."""

    def __init__(self, num_ranks: int) -> None:
        """Set up for ranks that are all on this machine."""
        one = 1 if num_ranks > 1 else torch.get_num_threads()
        given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # OpenMP ignores other words, too
        num_threads = max(1, int(given)) if given.isdecimal() and len(given) < 6 else one
        num_cores = os.cpu_count() or 1
        self.num_ranks = num_ranks
        self.replay = Replay(num_threads, min(num_ranks, max(1, num_cores // num_threads)) - 1)
        self.crowding = max(1.0, num_ranks * num_threads / num_cores)
        self._new: dict[GraphModule, Mapping[Node, int]] = {}

    def learn(self, job: BuiltJob, progress: Callable[[int, int], None] | None = None) -> int:
        """Run every different operator of a job's ranks; return the number of new ones."""
        return self.replay.learn(itertools.chain.from_iterable(rank.modules for rank in job.ranks), progress)

    def prices(self, rates: Rates) -> Prices:
        """Return the cost model of a rank's graphs."""

        def of(rank: Rank) -> Costs:
            new: dict[Node, int] = {}
            for gm in rank.modules:
                if gm not in self._new:
                    self._new[gm] = _new_bytes(gm)
                new |= self._new[gm]
            return ReplayedCosts(rates, rank.links, rank.visible, self.replay, self.crowding, new)

        return of

    def rates(self, rates: Rates) -> Rates:
        """Return a CPU's rates with a rank's share of this machine's memory."""
        return rates._replace(memory_gib=devices.memory_total_gib() / self.num_ranks)


@functools.lru_cache(maxsize=4)
def seconds_of_update(replay: Replay) -> float:
    """Return the seconds of clipping and AdamW's step for each byte of parameters, measured on many large ones."""
    update, num_bytes = _update()
    with replay.company(lambda: _update()[0]):
        times = []
        for _ in range(5):
            begin = replay.clock()
            update()
            times.append(replay.clock() - begin)
    return statistics.median(times[1:]) / num_bytes


def _update() -> tuple[Callable[[], object], int]:
    """Return an optimizer's step, and the bytes of its parameters."""
    parameters = [torch.nn.Parameter(torch.randn(2**18)) for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)

    def update() -> None:
        clip_grad_norm(parameters, 1.0)
        optimizer.step()

    return update, sum(p.nbytes for p in parameters)


def _new_bytes(gm: GraphModule) -> dict[Node, int]:
    """Return by node the bytes by which its memory exceeds all before in a run of a graph."""
    found, most = {}, 0
    for node, held in held_memory(gm, size_of).items():
        if held > most:
            found[node] = held - most if size_of(node) < _MAPPED_BYTES else 0
            most = held
    return found
