"""The calls of a CPU's kernel that attention within segments takes: pieces of segments, several of a length in a call.

Note [Pieces]
A piece has consecutive queries of one segment, and the keys up to the last of them. Where its first query is the
segment's first, the kernel is causal; else a mask hides what is later, or before the window. So a window's segment is
its beginning, as long as the window, and blocks of queries behind it; under context parallelism a piece is a run of a
rank's queries. A piece has a call of its own, for which no query, key or value is copied. Only very short ones, whose
work is less than a call's, are copied and computed several a call.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

LONGEST_GROUPED = 8  # queries of a piece: to copy longer ones takes more time than calls of their own
ROWS_AT_A_TIME = 512  # of keys, in a call of several pieces: their copies stay small

Places = Tensor | slice


class Piece(NamedTuple):
    """Queries [query, query + length) and keys from `key` on; the first query is `offset` keys after the first key."""

    query: int
    length: int
    key: int
    offset: int


class Call(NamedTuple):
    """Pieces of one shape.

    number   of pieces
    length   of each, in queries
    queries  the rows of their queries
    keys     the rows of their keys
    offset   as in `Piece`
    window   the most keys that a query sees
    """

    number: int
    length: int
    queries: Places
    keys: Places
    offset: int
    window: int

    def seen(self) -> Tensor | None:
        """Return which keys a query sees, (Lq, Lk); None if the kernel is causal."""
        if self.offset == 0 and self.length <= self.window:
            return None
        query_L1 = torch.arange(self.offset, self.offset + self.length, device="cpu").unsqueeze(1)
        distance_LL = query_L1 - torch.arange(self.offset + self.length, device="cpu")
        return (distance_LL >= 0) & (distance_LL < self.window)


@functools.lru_cache(maxsize=16)  # all layers of a batch take the same
def calls_of(bounds: tuple[int, ...], window: int, places: tuple[int, ...], L: int) -> tuple[Call, ...]:
    """Return the calls for a batch of rows of L keys.

    Args:
        bounds: the first token of each segment, counted over all rows, and the number of tokens.
        window: the most tokens that a token sees.
        places: the places of the queries in each row; none: one at each place.
    """
    alike, calls = defaultdict[tuple[int, int], list[Piece]](list), []
    for piece in _pieces(bounds, window, places, L):
        if piece.length > LONGEST_GROUPED:
            calls.append(_call([piece], window))
        else:
            alike[piece.length, piece.offset].append(piece)
    for (length, offset), pieces in alike.items():
        most = max(1, ROWS_AT_A_TIME // (length + offset))
        calls += [_call(pieces[begin : begin + most], window) for begin in range(0, len(pieces), most)]
    return tuple(calls)


def _pieces(bounds: Sequence[int], window: int, places: Sequence[int], L: int) -> Iterator[Piece]:
    runs, Lq = list(_runs(places)) if places else [(0, 0, L)], len(places) or L
    block = L if window >= L else min(max(window // 4, 64), 1024)
    for begin, end in pairwise(bounds):
        row, at = divmod(begin, L)
        for place, own, length in runs:
            first, last = max(place, at), min(place + length, at + end - begin)
            while first < last:
                until = min(last, first + (window if first == at else block))
                key = max(at, first - window + 1)
                yield Piece(row * Lq + own + first - place, until - first, row * L + key, first - key)
                first = until


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of consecutive places: the first place, its number among the queries, and the run's length."""
    begins = [i for i in range(len(places)) if i == 0 or places[i] != places[i - 1] + 1]
    for begin, end in pairwise([*begins, len(places)]):
        yield places[begin], begin, end - begin


def _call(pieces: Sequence[Piece], window: int) -> Call:
    _, length, _, offset = pieces[0]
    queries = _places([piece.query for piece in pieces], length)
    keys = _places([piece.key for piece in pieces], offset + length)
    return Call(len(pieces), length, queries, keys, offset, window)


def _places(begins: Sequence[int], length: int) -> Places:
    """Return the `length` places from each beginning on; those of a single one as a slice, which copies nothing."""
    if len(begins) == 1:
        return slice(begins[0], begins[0] + length)
    return (torch.tensor(begins, device="cpu").unsqueeze(1) + torch.arange(length, device="cpu")).flatten()
