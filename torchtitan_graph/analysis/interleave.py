"""Orders of nodes in which one stream computes while another communicates.

Note [Interleaving]
Streams are lists of a graph's nodes, each in its own order. One goes on until the device would stand still, for a
collective or for the host, then another does; one that is far ahead lets others go on. Time is that of the cost model's
clock, by shapes alone: all ranks choose the same order, and start their collectives in it. No value changes.

What backward computes again needs nothing of the backward of the layers above it, so it may run earlier: at most one
layer, and where there is a limit to memory, only as far as its values fit alongside all that runs until they were due.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.cost import Clock, Costs
from torchtitan_graph.graph import meta

_LEAD = 0.02  # of its own time, by which a stream may be further than another that could go on
_BLOCKED, _TOO_EARLY = 1e9, 1e8  # seconds: a node that needs another stream's value; one that would be held for long


class Stream(NamedTuple):
    """Nodes in their order.

    nodes  those that stay in this order
    early  those that may run earlier: computed again, or gathered again
    due    of these, how many of `nodes` run before each when none does
    """

    nodes: Sequence[Node]
    early: Sequence[Node] = ()
    due: Sequence[int] = ()


def stream_of(nodes: Iterable[Node]) -> Stream:
    """Return nodes as a stream, with what backward computes and gathers again as `early`."""
    rest: list[Node] = []
    early: list[Node] = []
    due: list[int] = []
    for node in nodes:
        if meta.origin(node) == meta.RECOMPUTED or (meta.role(node) == meta.GATHER and meta.phase(node) == "backward"):
            early.append(node)
            due.append(len(rest))
        else:
            rest.append(node)
    return Stream(rest, early, due)


class Room:
    """The limit to memory alongside a stream's nodes.

    Args:
        held: by node the bytes held while it runs when nothing is early.
        most: by node the bytes that may be.
        sizes: by node the bytes that it allocates.
    """

    def __init__(
        self, stream: Stream, held: Mapping[Node, int], most: Mapping[Node, int], sizes: Mapping[Node, int]
    ) -> None:
        self._left = [most[node] - held[node] for node in stream.nodes]
        self.sizes = [sizes[node] for node in stream.early]
        self._known: dict[tuple[int, int], int] = {}

    def between(self, begin: int, end: int) -> int:
        """Return the bytes that may be held more, from one of the stream's nodes to another."""
        if (begin, end) not in self._known:
            self._known[begin, end] = min(self._left[begin:end], default=0)
        return self._known[begin, end]


class _Lane:
    """A stream's nodes, or its early ones, and how far they are."""

    def __init__(self, nodes: Sequence[Node], costs: Costs) -> None:
        self.nodes, self.place, self.done, self.layer = nodes, 0, 0.0, math.inf
        self.seconds = [0.0 if costs.link(node) else costs.seconds(node) for node in nodes]
        self._whole = sum(self.seconds) or 1.0

    @property
    def next(self) -> Node:
        return self.nodes[self.place]

    def advance(self) -> Node:
        node, seconds = self.nodes[self.place], self.seconds[self.place]
        self.place, self.done, self.layer = self.place + 1, self.done + seconds / self._whole, self.layer_of(node)
        return node

    def layer_of(self, node: Node) -> float:
        """Return the number of the layer that a node is of; of others, that of the one before it."""
        name, *rest = meta.module(node).split(".")
        is_of_layer = name == "layers" and rest and rest[0].isdigit() and not meta.role(node)
        return int(rest[0]) if is_of_layer else self.layer


def interleaved(
    streams: Sequence[Stream], costs: Costs, before: Iterable[Node] = (), room: Room | None = None
) -> list[Node]:
    """Return the nodes of all streams in one order, which run after the nodes `before`; `room` is the limit to memory
    alongside a single stream."""
    clock, order = Clock(costs), list[Node]()
    for node in before:
        clock.advance(node)
    pending = {node for stream in streams for node in (*stream.nodes, *stream.early)}
    missing = {node: sum(source in pending for source in node.all_input_nodes) for node in pending}  # inputs to come
    lanes: list[_Lane] = []
    may_run: list[Callable[[], bool]] = []
    for stream in streams:
        rest, early = _Lane(stream.nodes, costs), _Lane(stream.early, costs)
        lanes += [rest, early]
        may_run += [partial(_all_due_ran, stream, rest, early), partial(_in_time, stream, rest, early, room)]

    def stall(k: int) -> float:
        node = lanes[k].next
        if missing[node]:
            return _BLOCKED
        return clock.stall(node) if may_run[k]() else _TOO_EARLY

    now = 0
    while len(order) < len(missing):
        stalls = {k: stall(k) for k, lane in enumerate(lanes) if lane.place < len(lane.nodes)}
        if stalls.get(now, 1.0) > 0:
            now = min(stalls, key=lambda k: (stalls[k], k != now))
        else:
            behind = [k for k, seconds in stalls.items() if not seconds and lanes[k].done < lanes[now].done - _LEAD]
            now = min(behind, key=lambda k: lanes[k].done, default=now)
        node = lanes[now].advance()
        clock.advance(node)
        order.append(node)
        for user in node.users:
            if user in missing:
                missing[user] -= 1
    return order


def _all_due_ran(stream: Stream, rest: _Lane, early: _Lane) -> bool:
    """Return whether all that is due before the next node has run: it is never late."""
    return early.place >= bisect.bisect_right(stream.due, rest.place)


def _in_time(stream: Stream, rest: _Lane, early: _Lane, room: Room | None) -> bool:
    """Return whether the next early node is not too early."""
    due = stream.due[early.place]
    if due <= rest.place:
        return True
    if rest.layer - early.layer_of(early.next) > 1:
        return False
    if room is None:
        return True
    first = bisect.bisect_right(stream.due, rest.place)  # of those that are early and still held
    return sum(room.sizes[first : early.place + 1]) <= room.between(rest.place, due)


def seconds_of(gm: GraphModule, order: Iterable[Node], costs: Costs) -> float:
    """Return the estimated seconds of a graph whose nodes, but for inputs, run in an order."""
    clock = Clock(costs)
    for node in (*gm.graph.find_nodes(op="placeholder"), *order):
        clock.advance(node)
    return clock.now
