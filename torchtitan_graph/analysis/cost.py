"""How long a graph takes, and how much of its communication nothing hides: an estimate, from shapes alone.

Note [Estimate]
A kernel takes as long as its products at the device's peak or its bytes through memory, whichever is longer, and never
less than the least that a kernel takes; it starts when the host has got so far. A collective takes a hop's latency for
each doubling of its group, and its bytes over the slower of two ways: within machines, and between them, where each
rank of the group in a machine has a port of its own. Of all peaks a share is reached. Collectives of one group run one
after another, beside the arithmetic, from where they start; a `wait_tensor` stands still until its own is done. So do
copies to the host's memory, and from it. The figures are a device's `Rates`, each with its source. Not seen: kernels
that collectives slow down, ranks that are late, experts that get more rows than others. No figure depends on the rank:
what is placed by it stands in the same order on all of them.
"""

from __future__ import annotations

import collections
import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

import torchtitan_graph.ops  # noqa: F401 (registers the operators)
from torchtitan_graph.analysis.flops import VARLEN, attention_flops, matmul_flops, runs_backward
from torchtitan_graph.analysis.traffic import group_of, is_permutation, kind_of, num_bytes, received, stored_bytes
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.graph.edit import is_view, value
from torchtitan_graph.rates import RATES, Rates

aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default
_OWN = torch.ops.torchtitan_graph
# Copies beside the arithmetic, by the way they take; and what waits for them, or lets the host wait.
_COPIES: Mapping[object, str] = {_OWN.offload.default: "to the host", _OWN.reload.default: "from the host"}
_ARRIVED, _LANDED = _OWN.arrived.default, _OWN.landed.default
# What tells the host how many rows are exchanged, and what waits until the host knows.
_ROW_SPLITS, _EXCHANGE = _OWN.row_splits.default, _OWN.exchange.default

# They go through the logits some rows at a time, in several kernels each: bytes of fp32 that these read and write for
# each logit, beside the logits and results themselves. Logits in fp32 are not cast, which saves _CAST of them. A part
# is larger than a GPU's caches. See row_loss.py.
_BY_ROWS: Mapping[object, int] = {
    _OWN.cross_entropy.default: 12,
    _OWN.cross_entropy_backward_.default: 32,
    _OWN.exponentials.default: 16,
    _OWN.sharded_cross_entropy_backward_.default: 56,
}
_CAST = 8

_VIEW = aten._unsafe_view.default  # it says of itself that it is none

# They read no more of their first argument than they give.
_SELECT = (aten.embedding.default, aten.index_select.default, aten.gather.default)

# They read nothing of their first argument: they overwrite it, or take its shape alone.
_UNREAD = (
    *(aten.copy_.default, aten.copy.default, aten.fill_.Scalar, aten.zero_.default),
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
)

# Bytes that pass through memory for each byte of a trained parameter: Adam reads it, its gradient and two moments, and
# writes three of them; the norm reads gradients, clipping reads and writes them; a sum reads two and writes one.
_UPDATE, _CLIP, _ACCUMULATE = 7, 3, 3

PRODUCT, ATTENTION, OTHER = "products", "attention", "other"
COMPUTE, MEMORY, LAUNCH = "compute", "memory", "launch"  # what a kernel's time is


class Work(NamedTuple):
    """What a kernel asks of a device.

    kind        PRODUCT, ATTENTION or OTHER
    operations  of products; attention's for the pairs that its kernel looks at, scores computed again included
    num_bytes   read and written
    least       the same if all neighbours that are compiled with it were fused; else as many
    width       bytes of each number that is multiplied, of the narrower operand
    """

    kind: str
    operations: float
    num_bytes: float
    least: float
    width: int


class Kernel(NamedTuple):
    """A kernel: the nodes that it computes, in their order, and what it asks for."""

    nodes: Sequence[Node]
    work: Work


class Link(NamedTuple):
    """The ranks of a group: along which axis, how many, and how many of them share a machine."""

    axis: str
    degree: int
    near: int


@dataclass(frozen=True)
class Estimate:
    """Seconds of a run of a graph: in all, of communication by axis, what of it nothing hides, and of kernels by their
    kind. What is left of all seconds the device waits for the host."""

    seconds: float
    sent: Mapping[str, float]
    exposed: Mapping[str, float]
    computed: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: Estimate) -> Estimate:
        """Run one after the other."""
        sent, exposed, computed = (
            {key: a.get(key, 0.0) + b.get(key, 0.0) for key in {**a, **b}}
            for a, b in (
                (self.sent, other.sent),
                (self.exposed, other.exposed),
                (self.computed, other.computed),
            )
        )
        return Estimate(self.seconds + other.seconds, sent, exposed, computed)

    def __mul__(self, times: float) -> Estimate:
        """Run several times."""
        sent, exposed, computed = (
            {key: x * times for key, x in each.items()} for each in (self.sent, self.exposed, self.computed)
        )
        return Estimate(self.seconds * times, sent, exposed, computed)

    def __str__(self) -> str:
        axes = [f"{axis} {_ms(self.exposed.get(axis, 0.0))} of {_ms(sent)}" for axis, sent in self.sent.items()]
        shares = f" ({', '.join(axes)})" if len(axes) > 1 else f" over {', '.join(self.sent)}"
        exposed, sent = sum(self.exposed.values()), sum(self.sent.values())
        return f"{_ms(exposed)} of {_ms(sent)} ms exposed{shares}, of {_ms(self.seconds)} ms in all"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


@dataclass(frozen=True)
class Costs:
    """What nodes take on a kind of device, with the groups' links by name. See Note [Estimate].

    visible  by block the fraction of all pairs of positions that its mask leaves, where it is known
    """

    rates: Rates = RATES["CPU"]
    links: Mapping[str, Link] = field(default_factory=dict)
    visible: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, node: Node) -> float:
        """Give how long a node takes; of a collective or a copy to or from the host, on its own stream."""
        link = self.link(node)
        if node.target in _COPIES:
            return num_bytes(node.meta.get("val")) / self.rates.host
        return self.sending(node, link) if link else self.computing(node)

    def computing(self, node: Node) -> float:
        """Give how long the kernels of a node take that is no collective."""
        return sum(map(self.kernel, self.works(node)))

    def works(self, node: Node) -> Sequence[Work]:
        """Give what a node's kernels ask for: none of views and collectives, several of a compiled region."""
        return meta.works(node) if meta.region(node) else works_of(node, self.visible)

    def kernel(self, work: Work) -> float:
        """Give how long a kernel takes."""
        return max(self.terms(work).values())

    def terms(self, work: Work) -> dict[str, float]:
        """Give how long a kernel's arithmetic takes alone, its bytes, and the least that a kernel takes: by COMPUTE,
        MEMORY and LAUNCH."""
        rates = self.rates
        share = rates.attention_share
        if work.kind != ATTENTION:
            share = rates.fp8_share if work.width < 2 else rates.product_share
        return {
            COMPUTE: work.operations / (rates.peak(work.width) * share),
            MEMORY: self.moving(self.moved(work)),
            LAUNCH: rates.kernel,
        }

    def moved(self, work: Work) -> float:
        """Give the bytes that a kernel reads and writes, where it is fused as far as a compiler does that."""
        return work.num_bytes - self.rates.fusion_share * (work.num_bytes - work.least)

    def moving(self, num_bytes: float) -> float:
        """Give how long bytes take that are read or written of the device's memory."""
        return num_bytes / (self.rates.memory * self.rates.memory_share)

    def starting(self, node: Node) -> float:
        """Give how long a collective keeps the arithmetic waiting where it starts: a part of its own time."""
        return 0.0

    def optimizer(self, trained: int, on_host: bool = False) -> float:
        """Give how long clipping and Adam's step take for so many bytes of parameters."""
        moved = update_bytes(trained)
        return moved / self.rates.host_memory if on_host else self.moving(moved)

    def accumulating(self, trained: int, on_host: bool = False) -> float:
        """Give how long it takes to add a microbatch's gradients of so many bytes to those of others."""
        moved = sum_bytes(trained)
        return moved / self.rates.host_memory if on_host else self.moving(moved)

    def link(self, node: Node) -> Link | None:
        """Give a collective's link; None of other nodes, and of groups that are no axis."""
        group = group_of(node)
        return self.links.get(group) if group is not None else None

    def sending(self, node: Node, link: Link) -> float:
        """Give how long a collective takes over a link."""
        size, (_, degree, near) = received(node, link.degree), link
        hop = self.rates.near_hop if near == degree else self.rates.far_hop
        if is_permutation(node):  # all wait for those that send to another machine
            return self.message(size, near == degree)
        if "all_to_all" in kind_of(node) or kind_of(node) == "exchange":
            within, between = size * (near - 1) / max(degree - 1, 1), size * (degree - near) / max(degree - 1, 1)
        else:  # a ring, or several, through each machine: all bytes come in once, over the ports of all that are there
            within, between = size * (near > 1), size / near * (near < degree)
        return hop * math.ceil(math.log2(degree)) + max(self._travel(within, True), self._travel(between, False))

    def message(self, size: float, is_near: bool) -> float:
        """Give how long a message takes from one device to another."""
        return (self.rates.near_hop if is_near else self.rates.far_hop) + self._travel(size, is_near)

    def _travel(self, size: float, is_near: bool) -> float:
        return size / (self.rates.near if is_near else self.rates.far) / self.rates.network_share


def update_bytes(trained: int) -> int:
    """Give the bytes that clipping and Adam's step read and write for so many bytes of parameters."""
    return (_UPDATE + _CLIP) * trained


def sum_bytes(trained: int) -> int:
    """Give the bytes that are read and written to add gradients of so many bytes to others."""
    return _ACCUMULATE * trained


def works_of(node: Node, visible: Mapping[str, float] | None = None) -> Sequence[Work]:
    """Give what a node asks of a device that is no compiled region. Of attention whose kernel leaves out what the
    mask does, flex and varlen, the part `visible` of its block counts, else what a causal mask leaves."""
    is_call = node.op == "call_function" and node.target not in (WAIT, operator.getitem, _ARRIVED, _LANDED)
    if not is_call or node.target in _COPIES or is_view(node) or node.target is _VIEW:
        return ()
    kind, operations = OTHER, float(matmul_flops(node))
    if operations:
        kind = PRODUCT
    elif all_pairs := attention_flops(node):
        # Backward's kernels compute the scores again, one product more than the four that count.
        kind, operations = ATTENTION, all_pairs * _pairs(node, visible or {}) * (1.25 if runs_backward(node) else 1.0)
    moved = float(touched(node))
    return (Work(kind, operations, moved, moved, _dtype(node).itemsize),)


def _pairs(node: Node, visible: Mapping[str, float]) -> float:
    """Give the part of all pairs of positions that an attention's kernel looks at."""
    if node.target in VARLEN or not isinstance(node.target, torch._ops.OpOverload):
        return visible.get(block_of(node, visible) or "", 0.5)
    names = [argument.name for argument in node.target._schema.arguments]
    place = names.index("is_causal")
    is_causal = node.args[place] if place < len(node.args) else node.kwargs.get("is_causal", False)
    return 0.5 if is_causal else 1.0  # a mask of its own is added to every score


def fused_kernels(
    nodes: Iterable[Node],
    owner: Mapping[Node, Node],
    readers: Mapping[Node, Set[Node]],
    visible: Mapping[str, float] | None = None,
) -> list[Kernel]:
    """Give the kernels of nodes that are compiled together, in their order: products and attention are kernels of their
    own; what stands between two of them is one, which reads and writes at least what enters and leaves it.

    Args:
        owner: tells in whose memory a value lies.
        readers: tells who reads each memory.
        visible: as of `works_of`.
    """
    found: list[Kernel | list[Node]] = [[]]
    for node in nodes:
        for work in works_of(node, visible):
            if work.kind != OTHER:
                found += [Kernel((node,), work), []]
            else:
                found[-1].append(node)  # type: ignore[union-attr]
    each = (part if isinstance(part, Kernel) else Kernel(part, _fused(part, owner, readers)) for part in found)
    return [kernel for kernel in each if kernel.work.num_bytes]


def _fused(nodes: Sequence[Node], owner: Mapping[Node, Node], readers: Mapping[Node, Set[Node]]) -> Work:
    inside, made = set(nodes), {owner[node] for node in nodes}
    enters = {owner[x] for node in nodes for x in _read(node)} - inside
    leaves = {x for x in made if not readers.get(x, set()) <= inside}
    least = sum(num_bytes(x.meta.get("val")) for x in (*enters, *leaves))  # what is written in place is in both
    moved = sum(map(touched, nodes))
    return Work(OTHER, 0.0, float(moved), float(min(least, moved)), 4)


def _dtype(node: Node) -> torch.dtype:
    tensors = [value(x) for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)]
    return min((x.dtype for x in tensors if x.is_floating_point()), key=lambda d: d.itemsize, default=torch.float32)


def touched(node: Node) -> int:
    """Give the bytes that a node reads and writes."""
    made = num_bytes(node.meta.get("val"))  # an operator may give nothing: an optimizer's writes in place
    if node.target in _SELECT:
        return 2 * made
    moved = made + sum(stored_bytes(x.meta.get("val")) for x in _read(node))
    if node.target in _BY_ROWS:
        logits_TV = value(node.args[0])  # type: ignore[arg-type]
        moved += (_BY_ROWS[node.target] - _CAST * (logits_TV.itemsize >= 4)) * logits_TV.numel()
    return moved


def _read(node: Node) -> list[Node]:
    """Give the inputs of which a node reads more than their shape."""
    return [x for x in node.all_input_nodes if node.target not in _UNREAD or x is not node.args[0]]


class Clock:
    """Time as the nodes of a graph go by, in the order in which they are told."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self.now = costs, 0.0
        self.sent: dict[str, float] = collections.defaultdict(float)
        self.exposed: dict[str, float] = collections.defaultdict(float)
        self.computed: dict[str, float] = collections.defaultdict(float)
        self._host = 0.0  # when the host has started all that was told so far
        self._told: dict[Node, float] = {}  # when the host can know the rows of an exchange
        # When a stream has nothing more to do; and when it would have, if the host had started all at once.
        self._free: dict[str, tuple[float, float]] = collections.defaultdict(lambda: (0.0, 0.0))
        self._done: dict[Node, tuple[str, float, float]] = {}  # a collective -> its axis, and both of its end

    def left(self, wait: Node) -> float:
        """Give how long a wait would stand still now."""
        _, done, _ = self._done.get(wait.all_input_nodes[0], ("", 0.0, 0.0))
        return max(0.0, done - self.now)

    def tell(self, node: Node) -> None:
        """Let a node run, or start, or be waited for."""
        if node.target is _EXCHANGE:
            self._host = max(self._host, self._told.get(node.args[1], 0.0))  # type: ignore[arg-type]
        if node.target is WAIT or node.target is _ARRIVED:
            if left := self.left(node):
                axis, _, alone = self._done[node.all_input_nodes[0]]
                self.exposed[axis] += max(0.0, alone - self.now)  # the rest is for the host
                self.now += left
        elif link := self.costs.link(node):
            self._start(node, str(group_of(node)), link.axis)
        elif way := _COPIES.get(node.target):
            self._start(node, way, way)
        else:
            works = self.costs.works(node)
            self._host += self.costs.rates.launch * len(works)
            if works:
                self.now = max(self.now, self._host)
                seconds, kernels = self.costs.computing(node), [self.costs.kernel(work) for work in works]
                self.now += seconds
                for work, part in zip(works, kernels, strict=True):
                    self.computed[work.kind] += part * seconds / (sum(kernels) or 1.0)
        if node.target is _ROW_SPLITS:
            self._told[node] = self.now
        if node.target is _LANDED:
            self._host = max(self._host, self.now)

    def _start(self, node: Node, stream: str, axis: str) -> None:
        seconds = self.costs.seconds(node)
        self._host += self.costs.rates.launch
        self.now += (taken := self.costs.starting(node))
        self.exposed[axis] += taken
        free, alone = self._free[stream]
        self._free[stream] = max(self.now, self._host, free) + seconds - taken, max(self.now, alone) + seconds - taken
        self._done[node] = (axis, *self._free[stream])
        self.sent[axis] += seconds


def estimate(gm: GraphModule, costs: Costs) -> Estimate:
    """Estimate a run of a graph."""
    clock = Clock(costs)
    for node in gm.graph.nodes:
        clock.tell(node)
    return Estimate(clock.now, dict(clock.sent), dict(clock.exposed), dict(clock.computed))
