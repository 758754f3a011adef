"""Orders of nodes in which one stream computes while another communicates.

Note [Interleaving]
Streams are lists of a graph's nodes, each in its own order. One goes on until the device would stand still, for a
collective or for the host, then another does; one that is far ahead lets others go on. Time is that of the cost model's
clock, by shapes alone: all ranks choose the same order, and start their collectives in it. No value changes.

What backward computes again needs nothing of the backward of the layers above it, so it is a stream of its own; it is
at most one layer ahead of them, lest it fill the memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.cost import Clock, Costs
from torchtitan_graph.graph import meta

_LEAD = 0.02  # of its own time, by which a stream may be further than another that could go on
_BLOCKED, _TOO_EARLY = 1e9, 1e8  # seconds: a node that needs another stream's value; one that would be held for long


def apart(nodes: Sequence[Node]) -> list[list[Node]]:
    """Return backward's nodes in streams: what it computes or gathers again follows the rest, and the reductions, which
    nothing waits for, are last."""
    again = [node for node in nodes if _is_again(node)]
    reduces = [node for node in nodes if meta.role(node) == meta.REDUCE]
    others = set(again) | set(reduces)
    return [stream for stream in ([node for node in nodes if node not in others], again, reduces) if stream]


def _is_again(node: Node) -> bool:
    is_gather = meta.role(node) == meta.GATHER and meta.phase(node) == "backward"
    return is_gather or meta.origin(node) == meta.RECOMPUTED


def interleaved(streams: Sequence[Sequence[Node]], costs: Costs) -> list[Node]:
    """Return the nodes of all streams in one order. A stream that computes again follows, in `streams`, the one that
    reads it."""
    clock, order = Clock(costs), list[Node]()
    left = [list(reversed(stream)) for stream in streams]
    pending = {node for stream in streams for node in stream}
    seconds = {node: 0.0 if costs.link(node) else costs.seconds(node) for node in pending}
    whole = [sum(seconds[node] for node in stream) or 1.0 for stream in streams]
    again = [bool(stream) and _is_again(stream[0]) for stream in streams]
    done, layer, now = [0.0] * len(streams), [math.inf] * len(streams), 0

    def stall(k: int) -> float:
        node = left[k][-1]
        if not pending.isdisjoint(node.all_input_nodes):
            return _BLOCKED
        is_early = again[k] and left[k - 1] and _layer(node, layer[k]) < layer[k - 1] - 1
        return max(clock.stall(node), _TOO_EARLY if is_early else 0.0)

    while pending:
        stalls = {k: stall(k) for k, stream in enumerate(left) if stream}
        if stalls.get(now, 1.0) > 0:
            now = min(stalls, key=lambda k: (stalls[k], k != now))
        else:
            behind = [k for k, of_stream in stalls.items() if not of_stream and done[k] < done[now] - _LEAD]
            now = min(behind, key=done.__getitem__, default=now)
        node = left[now].pop()
        clock.advance(node)
        done[now], layer[now] = done[now] + seconds[node] / whole[now], _layer(node, layer[now])
        pending.discard(node)
        order.append(node)
    return order


def _layer(node: Node, otherwise: float) -> float:
    name, *rest = meta.module(node).split(".")
    return int(rest[0]) if name == "layers" and rest and rest[0].isdigit() and not meta.role(node) else otherwise


def seconds_of(gm: GraphModule, order: Iterable[Node], costs: Costs) -> float:
    """Return the estimated seconds of a graph whose nodes, but for inputs, run in an order."""
    clock = Clock(costs)
    for node in (*gm.graph.find_nodes(op="placeholder"), *order):
        clock.advance(node)
    return clock.now
