"""How long a graph takes, and how much of its communication nothing hides: an estimate, from shapes alone.

Note [Estimate]
A node takes as long as its products at the device's peak or its bytes through memory, whichever is longer, and no less
than a launch. A collective takes a hop's latency for each doubling of its group, and its bytes over the slower of two
ways: within machines, and between them, where each rank of the group in a machine has a port of its own. Of all peaks
a fixed share is reached. Collectives of one group run one after another, beside the arithmetic, from where they start;
a `wait_tensor` stands still until its own is done. Not seen: a host that is slower than its GPU, kernels that
collectives slow down, ranks that are late, experts that get more rows than others, the way to the host's memory.
No figure depends on the rank: what is placed by it stands in the same order on all of them.
"""

from __future__ import annotations

import collections
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.device import RATES, Rates
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import is_view, value
from torchtitan_graph.graph.flops import attention_flops, matmul_flops
from torchtitan_graph.graph.traffic import group_of, is_permutation, kind_of, num_bytes, received

WAIT = torch.ops._c10d_functional.wait_tensor.default

# The share of a peak that is reached, and what starts cost in seconds.
PRODUCTS, MEMORY, WIRE = 0.6, 0.8, 0.75
LAUNCH, NEAR_HOP, FAR_HOP = 4e-6, 6e-6, 12e-6

# They read no more of their first argument than they give.
_SELECT = (torch.ops.aten.embedding.default, torch.ops.aten.index_select.default, torch.ops.aten.gather.default)


class Link(NamedTuple):
    """The ranks of a group: along which axis, how many, and how many of them share a machine."""

    axis: str
    degree: int
    near: int


@dataclass(frozen=True)
class Estimate:
    """Seconds of a run of a graph: in all, of communication by axis, and what of it nothing hides."""

    seconds: float
    sent: Mapping[str, float]
    exposed: Mapping[str, float]

    def __add__(self, other: Estimate) -> Estimate:
        """Run one after the other."""
        sent, exposed = (
            collections.Counter(a) + collections.Counter(b)
            for a, b in ((self.sent, other.sent), (self.exposed, other.exposed))
        )
        return Estimate(self.seconds + other.seconds, sent, exposed)

    def __str__(self) -> str:
        axes = [f"{axis} {_ms(self.exposed.get(axis, 0.0))} of {_ms(sent)}" for axis, sent in self.sent.items()]
        shares = f" ({', '.join(axes)})" if len(axes) > 1 else f" over {', '.join(self.sent)}"
        exposed, sent = sum(self.exposed.values()), sum(self.sent.values())
        return f"{_ms(exposed)} of {_ms(sent)} ms exposed{shares}, of {_ms(self.seconds)} ms in all"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


@dataclass(frozen=True)
class Costs:
    """What nodes take on a kind of device, with the groups' links by name. See Note [Estimate]."""

    rates: Rates = RATES["CPU"]
    links: Mapping[str, Link] = field(default_factory=dict)

    def seconds(self, node: Node) -> float:
        """Give how long a node takes; of a collective, on its own stream. Attention counts as causal."""
        link = self.link(node)
        return self.sending(node, link) if link else self.computing(node)

    def computing(self, node: Node) -> float:
        """Give how long a node takes that is no collective."""
        if node.op != "call_function" or node.target in (WAIT, operator.getitem) or is_view(node):
            return 0.0
        operations = operations_of(node)
        peak = self.rates.half if _dtype(node).itemsize <= 2 else self.rates.full
        return max(LAUNCH, operations / (peak * PRODUCTS), touched(node) / (self.rates.memory * MEMORY))

    def link(self, node: Node) -> Link | None:
        """Give a collective's link; None of other nodes, and of groups that are no axis."""
        group = group_of(node)
        return self.links.get(group) if group is not None else None

    def sending(self, node: Node, link: Link) -> float:
        """Give how long a collective takes over a link."""
        size, (_, degree, near) = received(node, link.degree), link
        hop = NEAR_HOP if near == degree else FAR_HOP
        if is_permutation(node):  # all wait for those that send to another machine
            return hop + size / (self.rates.near if near == degree else self.rates.far) / WIRE
        if "all_to_all" in kind_of(node) or kind_of(node) == "exchange":
            within, between = size * (near - 1) / max(degree - 1, 1), size * (degree - near) / max(degree - 1, 1)
        else:  # a ring, or several, through each machine: all bytes come in once, over the ports of all that are there
            within, between = size * (near > 1), size / near * (near < degree)
        wire = max(within / self.rates.near, between / self.rates.far) / WIRE
        return hop * math.ceil(math.log2(degree)) + wire


def operations_of(node: Node) -> float:
    """Count a node's operations, attention's as causal; of a compiled region those that it was made of."""
    return meta.operations(node) or matmul_flops(node) or attention_flops(node) / 2


def _dtype(node: Node) -> torch.dtype:
    tensors = [value(x) for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)]
    return min((x.dtype for x in tensors if x.is_floating_point()), key=lambda d: d.itemsize, default=torch.float32)


def touched(node: Node) -> int:
    """Give the bytes that a node reads and writes, as Note [Estimate] has it."""
    made = num_bytes(node.meta.get("val"))  # an operator may give nothing: an optimizer's writes in place
    if node.target in _SELECT:
        return 2 * made
    return made + sum(num_bytes(x.meta.get("val")) for x in node.all_input_nodes)


class Clock:
    """Time as the nodes of a graph go by, in the order in which they are told."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self.now = costs, 0.0
        self.sent: dict[str, float] = collections.defaultdict(float)
        self.exposed: dict[str, float] = collections.defaultdict(float)
        self._free: dict[str, float] = collections.defaultdict(float)  # when a group's stream has nothing more to do
        self._done: dict[Node, tuple[str, float]] = {}  # a collective -> its axis, and when it is there

    def left(self, wait: Node) -> float:
        """Give how long a wait would stand still now."""
        _, done = self._done.get(wait.all_input_nodes[0], ("", 0.0))
        return max(0.0, done - self.now)

    def tell(self, node: Node) -> None:
        """Let a node run, or start, or be waited for."""
        if node.target is WAIT:
            if left := self.left(node):
                self.exposed[self._done[node.all_input_nodes[0]][0]] += left
                self.now += left
        elif link := self.costs.link(node):
            group, seconds = str(group_of(node)), self.costs.sending(node, link)
            self._free[group] = max(self.now, self._free[group]) + seconds
            self._done[node] = link.axis, self._free[group]
            self.sent[link.axis] += seconds
        else:
            self.now += self.costs.computing(node)


def estimate(gm: GraphModule, costs: Costs) -> Estimate:
    """Estimate a run of a graph."""
    clock = Clock(costs)
    for node in gm.graph.nodes:
        clock.tell(node)
    return Estimate(clock.now, dict(clock.sent), dict(clock.exposed))
