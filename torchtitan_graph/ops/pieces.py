"""The calls of a CPU's kernel that attention within segments takes: pieces of segments, several of a length in a call.

Note [Pieces]
A piece has consecutive queries of one segment, and the keys up to the last of them. Where its first query is the
segment's first, the kernel is causal; else a mask hides what is later, or before the window. So a window's segment is
its beginning, as long as the window, and blocks of queries behind it; under context parallelism a piece is a run of a
rank's queries. Short pieces are rounded up to a common length, by queries and keys of the tokens that follow: those
keys are later than all queries of the piece, and the results of those queries are dropped.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

LONGEST_ROUNDED = 128  # queries of a piece; longer ones keep the kernel busy alone
ROWS_AT_A_TIME = 2048  # of keys, in a call of several pieces: their copies stay small

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
    queries  the rows of their queries, and of those that round them up
    keys     the rows of their keys
    own      the rows of the pieces' own queries
    real     where those are among `queries`; all without rounding
    offset   as in `Piece`
    window   the most keys that a query sees
    """

    number: int
    length: int
    queries: Places
    keys: Places
    own: Places
    real: Places
    offset: int
    window: int

    def seen(self) -> Tensor | None:
        """Return which keys a query sees, (Lq, Lk); None if the kernel is causal."""
        if self.offset == 0:
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
    alike = defaultdict[tuple[int, int], list[Piece]](list)
    for piece in _pieces(bounds, window, places, L):
        alike[_rounded(piece.length), piece.offset].append(piece)
    num_keys, num_queries = bounds[-1], bounds[-1] // L * (len(places) or L)
    calls = []
    for (length, offset), pieces in alike.items():
        most = max(1, ROWS_AT_A_TIME // (length + offset))
        for begin in range(0, len(pieces), most):
            calls.append(_call(pieces[begin : begin + most], length, offset, window, num_queries, num_keys))
    return tuple(calls)


def _rounded(length: int) -> int:
    """Return a length rounded up to three significant bits."""
    if length > LONGEST_ROUNDED:
        return length
    step = 1 << max(0, (length - 1).bit_length() - 3)
    return -(-length // step) * step


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


def _call(pieces: Sequence[Piece], length: int, offset: int, window: int, num_queries: int, num_keys: int) -> Call:
    query_P, length_P, key_P = (torch.tensor(x, device="cpu").unsqueeze(1) for x in list(zip(*pieces, strict=True))[:3])
    own_L = torch.arange(length, device="cpu")
    queries = (query_P + own_L).clamp(max=num_queries - 1).flatten()
    keys = (key_P + torch.arange(length + offset, device="cpu")).clamp(max=num_keys - 1).flatten()
    real = (own_L < length_P).flatten().nonzero().squeeze(1)
    places = [_as_slice(x) for x in (queries, keys, queries[real], real)]
    return Call(len(pieces), length, places[0], places[1], places[2], places[3], offset, window)


def _as_slice(places: Tensor) -> Places:
    """Return consecutive places as a slice, of which nothing is copied."""
    first = int(places[0])
    is_run = torch.equal(places, torch.arange(first, first + len(places), device="cpu"))
    return slice(first, first + len(places)) if is_run else places
