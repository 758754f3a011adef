"""Minimum cuts of small networks of values: which to save, and which to recompute."""

from __future__ import annotations

import functools
from collections.abc import Container, Sequence
from typing import NamedTuple


class Value(NamedTuple):
    """A value that may be saved, recomputed from others, or neither.

    keep    the cost of saving it; None: it can't be saved, it is a view of another
    again   the cost of recomputing it; None: it can't be recomputed
    inputs  indices of its inputs in the list of values
    wanted  whether backward reads it
    """

    keep: int | None
    again: int | None
    inputs: tuple[int, ...]
    wanted: bool


@functools.lru_cache(maxsize=256)  # a model's blocks are alike
def computed_again(values: tuple[Value, ...]) -> frozenset[int]:
    """Return the indices of the values that are recomputed where saving and recomputing cost least in all: a minimum
    cut.

    Each value is two vertices, needed (2 i) and computed (2 i + 1): saving it cuts the edge between them, recomputing
    it cuts the edge from the second to the sink, and a computed value needs its inputs. (A network of this kind is in
    "Checkmate", Jain et al. 2020, and in torch's own partitioner.)
    """
    source, sink = 2 * len(values), 2 * len(values) + 1
    endless = 1 + sum((value.keep or 0) + (value.again or 0) for value in values)
    network: list[dict[int, int]] = [{} for _ in range(sink + 1)]  # vertex -> next vertex -> residual capacity

    def edge(a: int, b: int, capacity: int | None) -> None:
        network[a][b] = endless if capacity is None else capacity
        network[b].setdefault(a, 0)

    for i, value in enumerate(values):
        edge(2 * i, 2 * i + 1, value.keep)
        edge(2 * i + 1, sink, value.again)
        for j in value.inputs:
            edge(2 * i + 1, 2 * j, None)
        if value.wanted:
            edge(source, 2 * i, None)
    reached = _fill(network, source, sink)
    return frozenset(i for i in range(len(values)) if 2 * i + 1 in reached)


@functools.lru_cache(maxsize=256)
def hull(values: tuple[Value, ...]) -> list[frozenset[int]]:
    """Return the sets of recomputed values on the lower convex hull of bytes and work, those that save most first.

    `keep` is in bytes, `again` in work. Each set is a minimum cut at some price of a byte in work, and none is missed:
    between two neighbours the price is tried at which both cost the same.
    """

    def cut(byte: int, work: int) -> _Choice:
        # Of sets with equal cost, the one that saves fewer bytes: each byte costs slightly more.
        byte, work = (byte << 24) + 2, (work << 24) + 1
        priced = (v._replace(keep=v.keep and v.keep * byte, again=v.again and v.again * work) for v in values)
        again = computed_again(tuple(priced))
        return _Choice(kept(values, again), sum(values[i].again or 0 for i in again), again)

    def between(more: _Choice, less: _Choice) -> list[_Choice]:
        byte, work = less.work - more.work, more.kept - less.kept  # prices at which both cost the same
        if byte <= 0 or work <= 0:
            return []
        found = cut(byte, work)
        if found.kept * byte + found.work * work >= more.kept * byte + more.work * work:
            return []
        return [*between(more, found), found, *between(found, less)]

    first, last = cut(0, 1), cut(1, 0)
    return [choice.again for choice in (first, *between(first, last), last)]


class _Choice(NamedTuple):
    kept: int
    work: int
    again: frozenset[int]


def kept(values: Sequence[Value], again: Container[int]) -> int:
    """Return the total `keep` of the saved values, if the values in `again` are recomputed."""
    asked: set[int] = set()
    pending = [i for i, value in enumerate(values) if value.wanted]
    while pending:
        i = pending.pop()
        if i not in asked:
            asked.add(i)
            pending += values[i].inputs if i in again else ()
    return sum(values[i].keep or 0 for i in asked if i not in again)


def _fill(network: list[dict[int, int]], source: int, sink: int) -> set[int]:
    """Compute a maximum flow by shortest augmenting paths (Edmonds and Karp 1972); return the vertices that the source
    still reaches."""
    while True:
        before, queue = {source: source}, [source]
        for a in queue:
            found = [b for b, left in network[a].items() if left and b not in before]
            before.update(dict.fromkeys(found, a))
            queue += found
        if sink not in before:
            return set(before)
        way = [sink]
        while way[-1] != source:
            way.append(before[way[-1]])
        steps = list(zip(way[1:], way, strict=False))
        flow = min(network[a][b] for a, b in steps)
        for a, b in steps:
            network[a][b] -= flow
            network[b][a] += flow
