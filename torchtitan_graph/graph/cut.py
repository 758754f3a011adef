"""The cheapest cut of a small network, and what it says of values: which to keep, and which to compute again."""

from __future__ import annotations

import functools
from typing import NamedTuple


class Value(NamedTuple):
    """A value that may be kept, computed again from others, or neither.

    keep    what it costs to keep; None: it can't be, it is a view of another
    again   what it costs to compute again; None: it can't be
    inputs  what it is computed from: places in the list of values
    wanted  whether it is asked for
    """

    keep: int | None
    again: int | None
    inputs: tuple[int, ...]
    wanted: bool


@functools.lru_cache(maxsize=256)  # a model's blocks are alike
def computed_again(values: tuple[Value, ...]) -> frozenset[int]:
    """Give the places of the values that are computed again where keeping and computing cost least in all.

    Each value is two vertices, asked for (2 i) and computed (2 i + 1): to keep it is to cut the edge between them, to
    compute it is to cut that from the second to the sink, and a computed value asks for its inputs. (A network of this
    kind is in "Checkmate", Jain et al. 2020, and in torch's own partitioner.)
    """
    source, sink, endless = 2 * len(values), 2 * len(values) + 1, 1 << 60
    network: list[dict[int, int]] = [{} for _ in range(sink + 1)]  # vertex -> next vertex -> capacity that is left

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


def _fill(network: list[dict[int, int]], source: int, sink: int) -> set[int]:
    """Send as much as goes from source to sink, by shortest ways (Edmonds and Karp 1972); give what the source still
    reaches then."""
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
