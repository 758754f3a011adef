"""Several corpora as one: each row of the global sequence is from one of them, in proportion to the weights."""

import bisect
import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torchtitan_graph.data.corpus import Corpus, Resume
from torchtitan_graph.data.document import Document
from torchtitan_graph.data.hugging_face import StreamedCorpus
from torchtitan_graph.data.lane_order import LaneOrder

# Note [Mixture]
# A row's corpus depends on the weights and the row's number alone, so that every rank and worker knows it without
# communication. The weights are rounded to parts of PERIOD rows, whose order is computed once and repeats: as even as
# possible, so that every step has its share of each corpus to within a row or two. Within a corpus, its rows are
# numbered by themselves, and come from its own lanes in turn (see Note [Lanes]); each repeats by itself. Other weights
# may be used from some row on: `Origin` is that row, and the number of rows of each corpus before it.
PERIOD = 2**14


class Origin(NamedTuple):
    """The row from which the weights are valid, and the number of rows of each corpus before it."""

    row: int
    given: tuple[int, ...]


class Place(NamedTuple):
    """A row's place: the number of the corpus, the lane among all corpora's, and the row's number in it."""

    source: int
    lane: int
    row: int


class Mixture:
    """Corpora by name, with a weight each; its lanes are all of theirs, one corpus' after the other's."""

    def __init__(self, corpora: Mapping[str, Corpus], weights: Sequence[float]) -> None:
        self.names = tuple(corpora)
        self.weights = tuple(weight / sum(weights) for weight in weights)
        self._corpora = list(corpora.values())
        self._number_lanes()
        digests = [f"{name}: {corpus.digest}" for name, corpus in corpora.items()]
        self.digest = self._corpora[0].digest if len(corpora) == 1 else "; ".join(digests)
        self._sources = _deal(self.weights)
        # For each row of a period, the number of earlier rows of the same corpus; and each corpus' number in the whole
        # period.
        self._before, counts = [], [0] * len(corpora)
        for source in self._sources:
            self._before.append(counts[source])
            counts[source] += 1
        self._per_period = counts

    def _number_lanes(self) -> None:
        self._first_lanes = list(itertools.accumulate((corpus.num_lanes for corpus in self._corpora), initial=0))
        self.num_lanes = self._first_lanes.pop()
        self._orders = [LaneOrder([math.inf] * corpus.num_lanes) for corpus in self._corpora]

    def set_lanes(self, number: int) -> None:
        """Distribute the one corpus over another number of lanes."""
        (corpus,) = self._corpora = [copy.copy(each) for each in self._corpora]
        corpus.num_lanes = number
        self._number_lanes()

    def set_lengths(self, rows: Sequence[int]) -> None:
        """End the lanes of the one corpus after so many rows each."""
        self._orders = [LaneOrder(rows)]

    @property
    def num_rows(self) -> float:
        """The number of rows until the end, math.inf where there is none."""
        return sum(order.num_rows for order in self._orders)

    def is_whole(self, lane: int) -> bool:
        """Return whether the documents of a lane, of its corpus, are packed whole."""
        source = bisect.bisect_right(self._first_lanes, lane) - 1
        return self._corpora[source].is_whole(lane - self._first_lanes[source])

    def documents(self, lane: int, epoch: int, start: int) -> Iterator[tuple[int, Document]]:
        """Yield the documents of a lane of its corpus, as any `Corpus` does."""
        source = bisect.bisect_right(self._first_lanes, lane) - 1
        return self._corpora[source].documents(lane - self._first_lanes[source], epoch, start)

    def resume(self, lane: int, document: int) -> Resume | None:
        """Return where a lane can be begun again to reach a document, if it is of a stream that has said so."""
        source = bisect.bisect_right(self._first_lanes, lane) - 1
        corpus = self._corpora[source]
        return corpus.resume(lane - self._first_lanes[source], document) if isinstance(corpus, StreamedCorpus) else None

    def set_resume(self, lane: int, resume: Resume) -> None:
        """Tell a lane where it can be begun again, if it is of a stream."""
        source = bisect.bisect_right(self._first_lanes, lane) - 1
        corpus = self._corpora[source]
        if isinstance(corpus, StreamedCorpus):
            corpus.set_resume(lane - self._first_lanes[source], resume)

    def origin(self) -> Origin:
        """Return the origin of a run's beginning."""
        return Origin(0, (0,) * len(self.names))

    def place(self, row: int, origin: Origin) -> Place | None:
        """Return the place of a row of the global sequence, which is not before `origin`; None after the last row."""
        periods, slot = divmod(row - origin.row, len(self._sources))
        source = self._sources[slot]
        number = origin.given[source] + periods * self._per_period[source] + self._before[slot]
        found = self._orders[source].place(number)
        return None if found is None else Place(source, self._first_lanes[source] + found[0], found[1])

    def lanes_given(self, given: Sequence[int]) -> list[int]:
        """Return the number of rows that each lane gave, from those of each corpus."""
        return [number for rows, order in zip(given, self._orders, strict=True) for number in order.given(rows)]

    def given(self, row: int, origin: Origin) -> tuple[int, ...]:
        """Return the number of rows before `row` that each corpus gave."""
        periods, slot = divmod(row - origin.row, len(self._sources))
        begun = self._sources[:slot]
        return tuple(
            before + periods * self._per_period[source] + begun.count(source)
            for source, before in enumerate(origin.given)
        )


def _deal(weights: Sequence[float]) -> list[int]:
    """Return the corpus of each row of a period: always the one that is furthest behind its share."""
    if len(weights) == 1:
        return [0]
    exact = [weight * PERIOD for weight in weights]
    shares = [int(share) for share in exact]
    largest_remainders = sorted(range(len(weights)), key=lambda source: shares[source] - exact[source])
    for source in largest_remainders[: PERIOD - sum(shares)]:
        shares[source] += 1
    order, owed = [], [0] * len(weights)
    for _ in range(PERIOD):
        owed = [debt + share for debt, share in zip(owed, shares, strict=True)]
        source = owed.index(max(owed))
        owed[source] -= PERIOD
        order.append(source)
    return order
