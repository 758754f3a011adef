"""An estimate of a graph's time and its exposed communication, from shapes alone.

Note [Estimate]
A kernel takes the time of its products at the device's peak or of its bytes through memory, whichever is longer, and at
least a kernel's minimum; it starts when the host has launched it. A collective takes a hop's latency for each doubling
of its group, and its bytes over the slower of two ways: within machines, and between them, where each rank of the group
in a machine has a port of its own. All peaks are multiplied by the share that is reached. Collectives of one group run
one after another, concurrently with the arithmetic, from where they start; a `wait_tensor` blocks until its own is
done. So do copies to the host's memory, and from it. A collective is itself a kernel: while one runs, `message_share`
of the device's arithmetic is not there for products and attention; kernels that are bound by memory are not slowed. The
figures are a device's `Rates`, each with its source. Not modelled: ranks that are late, experts that get more rows than
others. No figure depends on the rank: passes that use a rank's estimate to order nodes choose the same order on all.
"""

from __future__ import annotations

import collections
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.flops import attention_flops, matmul_flops
from torchtitan_graph.analysis.traffic import collective_of, group_of, is_permutation, received
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.graph.edit import fact, is_view, value
from torchtitan_graph.ops.operator import ALL_REDUCE, num_bytes, operator_of
from torchtitan_graph.rates import RATES, Rates

aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default
_VIEW = aten._unsafe_view.default  # a view whose schema states no alias

# Bytes of memory traffic for each byte of a trained parameter: Adam reads it, its gradient and two moments, and writes
# three of them; the norm reads gradients, clipping reads and writes them; a sum reads two and writes one.
_UPDATE, _CLIP, _ACCUMULATE = 7, 3, 3

_HOST_LEAD = 8  # operators that the host launches ahead of the device
_ANY_WIDTH = 4  # of a kernel that multiplies nothing: only a product's time depends on the width

PRODUCT, ATTENTION, OTHER = "products", "attention", "other"
COMPUTE, MEMORY, LAUNCH = "compute", "memory", "launch"  # the terms of a kernel's time


class Work(NamedTuple):
    """A kernel's work.

    kind        PRODUCT, ATTENTION or OTHER
    operations  FLOPs of products; attention's for the pairs that its kernel computes, recomputed scores included
    num_bytes   read and written
    least       the same if all neighbours in its compiled region were fused; else `num_bytes`
    width       bytes of each multiplied number, of the narrower operand; any where nothing is multiplied
    """

    kind: str
    operations: float
    num_bytes: float
    least: float
    width: int


class Kernel(NamedTuple):
    """A kernel: its nodes, in order, and its work."""

    nodes: Sequence[Node]
    work: Work


class Link(NamedTuple):
    """The ranks of a group: its axis, its size, and how many of them share a machine."""

    axis: str
    degree: int
    near: int


@dataclass(frozen=True)
class Estimate:
    """Seconds of a run of a graph: total, of communication by axis, its exposed part by axis, and of kernels by kind.
    The rest of the total the device waits for the host."""

    seconds: float
    sent: Mapping[str, float]
    exposed: Mapping[str, float]
    computed: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: Estimate) -> Estimate:
        """Add estimates of graphs that run one after the other."""
        pairs = ((self.sent, other.sent), (self.exposed, other.exposed), (self.computed, other.computed))
        sums = ({key: a.get(key, 0.0) + b.get(key, 0.0) for key in {**a, **b}} for a, b in pairs)
        return Estimate(self.seconds + other.seconds, *sums)

    def beyond(self, other: Estimate) -> Estimate:
        """Return what this estimate has more than another; exposed is at most what is sent."""
        pairs = ((self.sent, other.sent), (self.exposed, other.exposed), (self.computed, other.computed))
        sent, exposed, computed = ({key: max(0.0, x - b.get(key, 0.0)) for key, x in a.items()} for a, b in pairs)
        exposed = {axis: min(x, sent.get(axis, 0.0)) for axis, x in exposed.items()}
        return Estimate(max(0.0, self.seconds - other.seconds), sent, exposed, computed)

    def __mul__(self, times: float) -> Estimate:
        """Multiply by a number of runs."""
        each = (self.sent, self.exposed, self.computed)
        return Estimate(self.seconds * times, *({key: x * times for key, x in by.items()} for by in each))

    def __str__(self) -> str:
        axes = [f"{axis} {_ms(self.exposed.get(axis, 0.0))} of {_ms(sent)}" for axis, sent in self.sent.items()]
        shares = f" ({', '.join(axes)})" if len(axes) > 1 else f" over {', '.join(self.sent)}"
        exposed, sent = sum(self.exposed.values()), sum(self.sent.values())
        return f"{_ms(exposed)} of {_ms(sent)} ms exposed{shares}, of {_ms(self.seconds)} ms in all"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


@dataclass(frozen=True)
class Costs:
    """Seconds of nodes on a kind of device, with the groups' links by name. See Note [Estimate].

    visible  by block the fraction of all pairs of positions that its mask allows, where it is known
    factor   of a node's seconds, where a rank has more to do than a graph shows
    known    the work of nodes, kept where orders of the same nodes are compared; None: computed each time
    """

    rates: Rates = RATES["CPU"]
    links: Mapping[str, Link] = field(default_factory=dict)
    visible: Mapping[str, float] = field(default_factory=dict)
    factor: Callable[[Node], float] = field(default=lambda node: 1.0, kw_only=True)
    known: dict[Node, Sequence[Work]] | None = field(default=None, kw_only=True, compare=False, repr=False)

    def seconds(self, node: Node) -> float:
        """Return a node's seconds; for a collective or a copy to or from the host, on its own stream."""
        link = self.link(node)
        if operator_of(node.target).copies:
            return num_bytes(node.meta.get("val")) / self.rates.host
        return self.sending(node, link) if link else self.computing(node)

    def computing(self, node: Node) -> float:
        """Return the seconds of a node's kernels; of a node that is not a collective."""
        works = self.works(node)
        return sum(map(self.kernel, works)) * self.factor(node) if works else 0.0

    def beside_messages(self, node: Node) -> float:
        """Return the same while collectives run, which are kernels too."""
        left = 1 - self.rates.message_share
        slowed = (max(terms[COMPUTE] / left, *terms.values()) for terms in map(self.terms, self.works(node)))
        return sum(slowed) * self.factor(node)

    def works(self, node: Node) -> Sequence[Work]:
        """Return the work of a node's kernels: none for views and collectives, several for a compiled region."""
        if self.known is not None and node in self.known:
            return self.known[node]
        works = meta.works(node) if meta.region(node) else works_of(node, self.visible)
        if self.known is not None:
            self.known[node] = works
        return works

    def kernel(self, work: Work) -> float:
        """Return a kernel's seconds."""
        return max(self.terms(work).values())

    def terms(self, work: Work) -> dict[str, float]:
        """Return the seconds of a kernel's arithmetic alone, of its bytes, and a kernel's minimum: by COMPUTE, MEMORY
        and LAUNCH."""
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
        """Return the bytes that a kernel reads and writes, at the share of fusion that a compiler reaches."""
        return work.num_bytes - self.rates.fusion_share * (work.num_bytes - work.least)

    def moving(self, num_bytes: float) -> float:
        """Return the seconds of reading or writing bytes of the device's memory."""
        return num_bytes / (self.rates.memory * self.rates.memory_share)

    def starting(self, node: Node) -> float:
        """Return the seconds that starting a collective blocks the arithmetic: a part of its own time."""
        return 0.0

    def optimizer(self, trained: int, on_host: bool = False) -> float:
        """Return the seconds of clipping and Adam's step for so many bytes of parameters."""
        moved = update_bytes(trained)
        return moved / self.rates.host_memory if on_host else self.moving(moved)

    def accumulating(self, trained: int, on_host: bool = False) -> float:
        """Return the seconds of accumulating a microbatch's gradients of so many bytes."""
        moved = sum_bytes(trained)
        return moved / self.rates.host_memory if on_host else self.moving(moved)

    def link(self, node: Node) -> Link | None:
        """Return a collective's link; None for other nodes, and for groups that are no axis."""
        group = group_of(node)
        return self.links.get(group) if group is not None else None

    def sending(self, node: Node, link: Link) -> float:
        """Return a collective's seconds over a link."""
        size, (_, degree, near) = received(node, link.degree), link
        if is_permutation(node):  # all wait for the ranks that send to another machine
            return self.message(size, near == degree) * self.factor(node)
        if collective_of(node).is_pairwise:
            within, between = size * (near - 1) / max(degree - 1, 1), size * (degree - near) / max(degree - 1, 1)
            return self._collective(within, between, link) * self.factor(node)
        return self._in_rings(size, link) * self.factor(node)

    def all_reduce(self, num_bytes: int, link: Link) -> float:
        """Return the seconds of an all-reduce of so many bytes over a link."""
        return self._in_rings(ALL_REDUCE.received(num_bytes, link.degree), link)

    def _in_rings(self, size: float, link: Link) -> float:
        """Return the seconds to receive bytes in rings through each machine: all bytes enter it once, over all ports of
        its ranks."""
        return self._collective(size * (link.near > 1), size / link.near * (link.near < link.degree), link)

    def _collective(self, within: float, between: float, link: Link) -> float:
        hop = self.rates.near_hop if link.near == link.degree else self.rates.far_hop
        return hop * math.ceil(math.log2(link.degree)) + max(self._travel(within, True), self._travel(between, False))

    def message(self, size: float, is_near: bool) -> float:
        """Return the seconds of a message between two devices."""
        return (self.rates.near_hop if is_near else self.rates.far_hop) + self._travel(size, is_near)

    def _travel(self, size: float, is_near: bool) -> float:
        return size / (self.rates.near if is_near else self.rates.far) / self.rates.network_share


def update_bytes(trained: int) -> int:
    """Return the bytes that clipping and Adam's step read and write for so many bytes of parameters."""
    return (_UPDATE + _CLIP) * trained


def sum_bytes(trained: int) -> int:
    """Return the bytes that accumulating gradients of so many bytes reads and writes."""
    return _ACCUMULATE * trained


def works_of(node: Node, visible: Mapping[str, float] | None = None) -> Sequence[Work]:
    """Return the work of a node that is not a compiled region. Where attention's kernel skips masked pairs, in flex and
    varlen, the fraction `visible` of its block counts, else that of a causal mask."""
    is_call = node.op == "call_function" and node.target not in (WAIT, operator.getitem)
    if not is_call or operator_of(node.target).copies or is_view(node) or node.target is _VIEW:
        return ()
    kind, operations = OTHER, float(matmul_flops(node))
    if operations:
        kind = PRODUCT
    elif attention := operator_of(node.target).attention:
        # Backward's kernels recompute the scores, one product more than the four that count.
        again = 1.25 if attention.is_backward else 1.0
        kind, operations = ATTENTION, attention_flops(node) * _pairs(node, visible or {}) * again
    moved, width = float(touched(node)), _dtype(node).itemsize if operations else _ANY_WIDTH
    return (Work(kind, operations, moved, moved, width),)


def _pairs(node: Node, visible: Mapping[str, float]) -> float:
    """Return the fraction of all pairs of positions that an attention's kernel computes."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if "is_causal" not in names:
        return visible.get(block_of(node, visible) or "", 0.5)
    place = names.index("is_causal")
    is_causal = node.args[place] if place < len(node.args) else node.kwargs.get("is_causal", False)
    return 0.5 if is_causal else 1.0  # an explicit mask is added to every score


def fused_kernels(
    nodes: Iterable[Node],
    owner: Mapping[Node, Node],
    readers: Mapping[Node, Set[Node]],
    visible: Mapping[str, float] | None = None,
) -> list[Kernel]:
    """Return the kernels of nodes that are compiled together, in their order: each product and attention is a kernel of
    its own; the nodes between two of them are one, which reads and writes at least its inputs and outputs.

    Args:
        owner: the node that owns a value's memory.
        readers: the nodes that read each memory.
        visible: as in `works_of`.
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
    least = sum(num_bytes(x.meta.get("val")) for x in (*enters, *leaves))  # values written in place are in both
    moved = sum(map(touched, nodes))
    return Work(OTHER, 0.0, float(moved), float(min(least, moved)), _ANY_WIDTH)


def _dtype(node: Node) -> torch.dtype:
    tensors = [value(x) for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)]
    return min((x.dtype for x in tensors if x.is_floating_point()), key=lambda d: d.itemsize, default=torch.float32)


def touched(node: Node) -> int:
    """Return the bytes that a node reads and writes."""
    if (declared := operator_of(node.target).num_bytes) is not None:
        return int(fact(declared, node))
    made = num_bytes(node.meta.get("val"))  # an operator may return nothing: an optimizer's writes in place
    return made + sum(stored_bytes(x.meta.get("val")) for x in _read(node))


def stored_bytes(values: Any) -> int:
    """Return the bytes of memory of a node's value: an expanded dimension counts once."""
    if isinstance(values, torch.Tensor):
        # A stride that differs from call to call is not an int, and never 0.
        steps = values.stride()
        if not any(type(step) is int and step == 0 for step in steps):
            return num_bytes(values)
        sizes = [size for size, step in zip(values.shape, steps, strict=True) if type(step) is not int or step]
        return math.prod(sizes) * values.element_size()
    return sum(map(stored_bytes, values)) if isinstance(values, (tuple, list)) else 0


def _read(node: Node) -> list[Node]:
    """Return the inputs whose data a node reads, not only their shape."""
    reads_first = operator_of(node.target).reads_first
    return [x for x in node.all_input_nodes if reads_first or x is not node.args[0]]


class Clock:
    """A simulated clock, advanced node by node in the graph's order."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self.now = costs, 0.0
        self.sent: dict[str, float] = collections.defaultdict(float)
        self.exposed: dict[str, float] = collections.defaultdict(float)
        self.computed: dict[str, float] = collections.defaultdict(float)
        self._host = 0.0  # when the host has launched all nodes so far
        self._messages = 0.0  # when the last collective is done
        self._ends: dict[Node, float] = {}  # when the device has run each node
        # When a stream is free; and when it would be, if the host had launched all at once.
        self._free: dict[str, tuple[float, float]] = collections.defaultdict(lambda: (0.0, 0.0))
        self._done: dict[Node, tuple[str, float, float]] = {}  # a collective -> its axis, and both times of its end

    def left(self, wait: Node) -> float:
        """Return the seconds that a wait would block now."""
        _, done, _ = self._done.get(wait.all_input_nodes[0], ("", 0.0, 0.0))
        return max(0.0, done - self.now)

    def stall(self, node: Node) -> float:
        """Return the seconds that the device would stand still now: for a collective, or for the host, which waits for
        a number that the device computes and then launches what follows."""
        op = operator_of(node.target)
        if op.waits:
            return self.left(node)
        if op.host_reads is None:
            return 0.0
        known = self._ends.get(node.args[op.host_reads], 0.0)  # type: ignore[arg-type]
        return max(0.0, known + _HOST_LEAD * self.costs.rates.launch - self.now)

    def advance(self, node: Node) -> None:
        """Advance the clock by a node: a kernel, the start of a collective or copy, or a wait."""
        op = operator_of(node.target)
        if op.host_reads is not None:
            self._host = max(self._host, self._ends.get(node.args[op.host_reads], 0.0))  # type: ignore[arg-type]
        if op.waits:
            if left := self.left(node):
                axis, _, alone = self._done[node.all_input_nodes[0]]
                self.exposed[axis] += max(0.0, alone - self.now)  # the rest waits for the host
                self.now += left
        elif op.collective is not None and (link := self.costs.link(node)):
            self._start(node, str(group_of(node)), link.axis)
        elif op.copies:
            self._start(node, op.copies, op.copies)
        else:
            works = self.costs.works(node)
            self._host += self.costs.rates.launch * len(works)
            if works:
                self.now = max(self.now, self._host)
                seconds = self._computing(node)
                self.now += seconds
                kernels = [self.costs.kernel(work) for work in works] if len(works) > 1 else [1.0]
                whole = sum(kernels) or 1.0
                for work, part in zip(works, kernels, strict=True):
                    self.computed[work.kind] += part * seconds / whole
        self._ends[node] = self.now

    def _computing(self, node: Node) -> float:
        """Return the seconds of a node's kernels from now on: slower until the last collective is done."""
        alone, beside = self.costs.computing(node), self._messages - self.now
        if beside <= 0 or not self.costs.rates.message_share:
            return alone
        slowed = self.costs.beside_messages(node)
        return slowed if slowed <= beside else beside + alone * (1 - beside / slowed)

    def _start(self, node: Node, stream: str, axis: str) -> None:
        seconds = self.costs.seconds(node)
        self._host += self.costs.rates.launch
        self.now += (taken := self.costs.starting(node))
        self.exposed[axis] += taken
        free, alone = self._free[stream]
        self._free[stream] = max(self.now, self._host, free) + seconds - taken, max(self.now, alone) + seconds - taken
        self._done[node] = (axis, *self._free[stream])
        if not operator_of(node.target).copies:
            self._messages = max(self._messages, self._free[stream][0])
        self.sent[axis] += seconds


def estimate(gm: GraphModule, costs: Costs) -> Estimate:
    """Estimate a run of a graph."""
    clock = Clock(replace(costs, known={}))
    for node in gm.graph.nodes:
        clock.advance(node)
    return Estimate(clock.now, dict(clock.sent), dict(clock.exposed), dict(clock.computed))
