"""Packing of one lane's whole documents into rows, by their lengths."""

import bisect
import itertools

import numpy as np

from torchtitan_graph.data.bad_rows import Skipped
from torchtitan_graph.data.batch import IGNORE_INDEX, PAIRS_PER_ROW
from torchtitan_graph.data.corpus import Corpus
from torchtitan_graph.data.counts import Counts
from torchtitan_graph.data.document import Contexts, Document, Pair, Tokens
from torchtitan_graph.data.packing import EMPTY_EPOCHS, Cursor, Lane, Packing
from torchtitan_graph.data.tokenizer import Tokenizer
from torchtitan_graph.errors import UserError

# Whole documents are put into rows a number at a time; the last row of each number is full only in part.
WINDOW_ROWS = 32  # at least; of short rows as many as have
_WINDOW_TOKENS = 2**17  # but at most
_MOST_WINDOW_ROWS = 128


def open_lane(corpus: Corpus, tokenizer: Tokenizer, packing: Packing, number: int, cursor: Cursor) -> Lane:
    """Return a lane's rows from a cursor on."""
    kind = WholeLane if corpus.is_whole(number) else Lane
    return kind(corpus, tokenizer, packing, number, cursor)


class WholeLane(Lane):
    """Rows of whole documents from one lane of a corpus, starting at a cursor.

    Documents of `window_rows` rows' tokens, a window, are read at a time, the longest first put into the fullest row
    that has room for it (best fit, decreasing). At an epoch's end the window is filled up to a whole row by the next
    epoch's first documents. Rows are in the order of their first document. A pair counts as one, and becomes two
    documents, 2k and 2k + 1 of its row, which has PAIRS_PER_ROW at most.
    """

    _needs = "with anything to learn"
    _window: list[list[Tokens]]  # the documents of its rows

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, packing: Packing, number: int, cursor: Cursor) -> None:
        super().__init__(corpus, tokenizer, packing, number, cursor)
        self._window, self._after = [], (cursor.epoch, cursor.document)  # the epoch and document after the window
        self._uncounted = Counts()

    def next_pieces(self) -> list[tuple[np.ndarray, np.ndarray]]:
        if self._documents is None:  # the first row, perhaps of a resumed lane: the cursor is in the middle of a window
            self._read_window()
            if self.cursor.offset:  # they were counted with the window's first row
                self._uncounted = Counts()
        empty = 0
        while self.cursor.offset >= len(self._window) and not self._has_ended and empty < EMPTY_EPOCHS:
            self.cursor = Cursor(self.cursor.row, *self._after)
            self._read_window()
            empty += not self._window
        self.counts, self._uncounted = self._uncounted, Counts()
        row, offset = self.cursor.row, self.cursor.offset
        if offset >= len(self._window):
            self._refuse_empty()
            self.cursor = self.cursor._replace(row=row + 1)
            return []
        self.cursor = self.cursor._replace(row=row + 1, offset=offset + 1)
        return [(ids, _labels(ids, is_target)) for ids, is_target in self._window[offset]]

    @property
    def _has_ended(self) -> bool:
        """Whether no document follows the window."""
        return 0 < self._packing.epochs <= self._after[0]

    def _read_window(self) -> None:
        """Read the documents of the next rows, from those after the window on, and put them into rows."""
        read: list[tuple[tuple[int, Document], list[tuple[Tokens, ...]], Counts]] = []
        num_tokens, seq_len, first_epoch = 0, self._packing.seq_len, self._after[0]
        wanted, num_of_next = window_rows(seq_len) * seq_len, 0  # documents of the next epoch
        if self._documents is None:
            self._documents = self._corpus.documents(self._number, *self._after)
        while num_tokens < wanted and not self._has_ended and self._after[0] < first_epoch + 2:
            epoch, _ = self._after
            if (item := next(self._documents, None)) is None:
                self._after = epoch + 1, 0
                self._documents = self._corpus.documents(self._number, *self._after)
                wanted = min(wanted, -(-num_tokens // seq_len) * seq_len)
                continue
            read.append((item, *self._all_fitted(item[1])))
            num_of_next += epoch > first_epoch
            num_tokens += sum(map(_size, read[-1][1]))
            self._after = epoch, item[0] + 1

        def rows_of(number: int) -> list[list[Tokens]]:
            return self._in_rows([kept for _, kept, _ in read[:number]])

        self._window = rows_of(len(read))
        if len(self._window) * seq_len > wanted and num_of_next and self._after[0] == first_epoch + 1:
            # Documents of the next epoch that would begin one more row are for the next window. How many still fit is
            # searched by halves, as each try packs the whole window.
            least = len(read) - num_of_next
            number = least + bisect.bisect_left(
                range(num_of_next), True, key=lambda more: len(rows_of(least + more + 1)) * seq_len > wanted
            )
            later = [item for item, *_ in read[number:]]
            self._documents, self._after = itertools.chain(later, self._documents), (first_epoch + 1, later[0][0])
            del read[number:]
            self._window = rows_of(number)
        counted = sum((counts for *_, counts in read), Counts())
        self._uncounted += counted
        self._left_out += counted

    def _in_rows(self, read: list[list[tuple[Tokens, ...]]]) -> list[list[Tokens]]:
        """Return the documents of each row."""
        documents = [parts for kept in read for parts in kept]
        sizes = [*map(_size, documents)]
        most = PAIRS_PER_ROW if any(len(parts) > 1 for parts in documents) else len(sizes)
        rows = best_fit(sizes, self._packing.seq_len, most)
        if self._packing.alone:
            rows = [[number] for number in range(len(sizes))]
        return [[part for number in row for part in documents[number]] for row in rows]

    def _all_fitted(self, document: Document) -> tuple[list[tuple[Tokens, ...]], Counts]:
        """Return what of a document becomes parts of rows, as it fits into one, with the counts of what does not."""
        if isinstance(document, Skipped):
            return [], Counts(**{document.kind: 1})
        fitted = [self._fitted(together) for together in _packed_together(document)]
        split = Counts(split=1, contexts=len(fitted)) if isinstance(document, Contexts) else Counts()
        return [kept for kept, _ in fitted if kept is not None], sum((counts for _, counts in fitted), split)

    def _fitted(self, parts: tuple[Tokens, ...]) -> tuple[tuple[Tokens, ...] | None, Counts]:
        """Return a document, or the two of a pair, as they fit into a row, None if dropped."""
        room = self._packing.seq_len // len(parts)
        longest = max(len(part.ids) for part in parts)
        if longest > room and self._packing.too_long == "refuse":
            what, half = ("an answer of a pair", "half of ") if len(parts) > 1 else ("a conversation", "")
            raise UserError(
                f"{what} has {longest:,} tokens, more than {half}training.seq_len = {self._packing.seq_len}: raise"
                " that, or choose training.too_long = 'cut' or 'drop'"
            )
        if longest > room and self._packing.too_long == "drop":
            return None, Counts(dropped=1)
        if not all(part.is_target[1:].any() for part in parts):
            return None, Counts(without_target=1)
        if not all(part.is_target[1:room].any() for part in parts):
            return None, Counts(beyond=1)
        return tuple(Tokens(ids[:room], is_target[:room]) for ids, is_target in parts), Counts(cut=int(longest > room))


def window_rows(seq_len: int) -> int:
    """Return the number of rows that whole documents are put into together."""
    return min(max(WINDOW_ROWS, _WINDOW_TOKENS // seq_len), _MOST_WINDOW_ROWS)


def _packed_together(document: Document) -> list[tuple[Tokens, ...]]:
    """Return what a row must hold together: a document; the two of a pair; each context by itself."""
    if isinstance(document, Contexts):
        return [(context,) for context in document.contexts]
    assert isinstance(document, (Tokens, Pair)), "a corpus of whole documents"
    return [(document,)] if isinstance(document, Tokens) else [tuple(document)]


def _size(parts: tuple[Tokens, ...]) -> int:
    return sum(len(part.ids) for part in parts)


def _labels(ids: np.ndarray, is_target: np.ndarray) -> np.ndarray:
    return np.append(np.where(is_target[1:], ids[1:], IGNORE_INDEX), IGNORE_INDEX)


def best_fit(sizes: list[int], room: int, most: int) -> list[list[int]]:
    """Distribute items over bins of a size, at most `most` in each: the largest first, each into the fullest bin that
    has room for it.

    Returns the numbers of the items in each bin, ascending, the bins in the order of their first item. No size is
    larger than `room`.
    """
    bins: list[list[int]] = []
    left: list[tuple[int, int]] = []  # the room that each bin has left, and its number, ascending; without full ones
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        place = bisect.bisect_left(left, (sizes[item], -1))
        room_left, number = left.pop(place) if place < len(left) else (room, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(item)
        if len(bins[number]) < most:
            bisect.insort(left, (room_left - sizes[item], number))
    return sorted(sorted(items) for items in bins)
