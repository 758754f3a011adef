"""Packing of one lane: its documents into rows, token by token, or whole ones by their lengths."""

import bisect
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from torchtitan_graph.data.bad_rows import KINDS, Skipped
from torchtitan_graph.data.batch import IGNORE_INDEX, PADDING, PAIRS_PER_ROW
from torchtitan_graph.data.corpus import Corpus
from torchtitan_graph.data.document import Contexts, Document, Pair, Tokens
from torchtitan_graph.data.tokenizer import Tokenizer
from torchtitan_graph.errors import UserError

# By chance a lane of a small split may have no document in an epoch; but not so often in a row.
_EMPTY_EPOCHS = 16
# Whole documents are put into rows together, so many at a time: the last row of each time is full only in part.
WINDOW_ROWS = 32  # at least; of short rows as many as have
_WINDOW_TOKENS = 2**17  # but at most
_MOST_WINDOW_ROWS = 128


_NO_TARGET = (
    "nothing in them is learned (they have no turn of the assistant, or each has weight 0, is masked or is unclear)"
)


class Cursor(NamedTuple):
    """Position in a lane: number of rows returned so far; epoch and index of a document, and how much of it is used.

    That is the current document, and the number of its tokens; where rows have whole documents by length, the first of
    the window, and the number of the window's rows.
    """

    row: int = 0
    epoch: int = 0
    document: int = 0
    offset: int = 0


class Packing(NamedTuple):
    """How the rows of a run are filled.

    seq_len    tokens of a row
    epochs     passes over the corpus, after which the last row is padded; 0: without end
    whole      a row ends where the next document does not fit; only one that is longer than a row is split
    alone      a row ends with its document
    too_long   what becomes of a conversation that is longer than a row, or of an answer of a pair that is longer than
               half a row: "cut" after its tokens, "drop", "refuse"
    """

    seq_len: int
    epochs: int = 0
    whole: bool = False
    alone: bool = False
    too_long: str = "cut"


class Counts(NamedTuple):
    """Documents that did not become rows as they are: cut at a row's length, dropped for it, or without a target;
    conversations in several contexts, and how many these are; bad rows that are left out, of each of the KINDS; and
    documents whose targets are all beyond a row's length. New ones come last: positions are saved as lists of them."""

    cut: int = 0
    dropped: int = 0
    without_target: int = 0
    split: int = 0
    contexts: int = 0
    not_utf8: int = 0
    not_json: int = 0
    wrong_fields: int = 0
    no_value: int = 0
    wrong_message: int = 0
    not_text: int = 0
    no_answer: int = 0
    no_preference: int = 0
    refused: int = 0
    beyond: int = 0

    def __add__(self, other: tuple[int, ...]) -> "Counts":  # type: ignore[override]
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


def in_words(counts: Counts) -> list[str]:
    """Return what became of such documents, a line for each kind that there is."""
    whats = {
        "cut at training.seq_len": counts.cut,
        "dropped, as longer than it": counts.dropped,
        "left out, as what is learned begins after training.seq_len tokens": counts.beyond,
        f"left out, as {_NO_TARGET}": counts.without_target,
    }
    lines = [f"conversations {what}: {number:,}" for what, number in whats.items() if number]
    if counts.split:
        lines.append(
            f"conversations split: {counts.split:,}, into {counts.contexts:,} contexts, by training.split_turns"
        )
    bad = {what: getattr(counts, kind) for kind, what in KINDS.items()}
    return lines + [f"bad rows left out, {what}: {number:,}" for what, number in bad.items() if number]


def open_lane(corpus: Corpus, tokenizer: Tokenizer, packing: Packing, number: int, cursor: Cursor) -> "Lane":
    """Return a lane's rows from a cursor on."""
    kind = WholeLane if corpus.is_whole(number) else Lane
    return kind(corpus, tokenizer, packing, number, cursor)


class Lane:
    """Rows from one lane of a corpus, starting at a cursor.

    A document is [bos] + ids + [eos], and left out if it has no ids. A row has the next `seq_len` tokens, wherever
    documents begin or end, so every token is an input once.
    """

    _needs = "with text"

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, packing: Packing, number: int, cursor: Cursor) -> None:
        self._corpus, self._tokenizer, self._packing, self._number = corpus, tokenizer, packing, number
        self.cursor = cursor
        self.filled = self._num_empty = 0
        self.counts = Counts()  # of the documents read for the row returned last
        self._left_out = Counts()  # of all that were read
        self._tokens = np.empty(0, np.int64)  # of the current document
        self._documents: Iterator[tuple[int, Document]] | None = None

    def next_row(self) -> np.ndarray:
        """Return the next row: tokens, labels, positions and documents, as (4, L), all padding after the last;
        `filled` is its length without padding."""
        return self._row(self.next_pieces())

    def padding(self) -> np.ndarray:
        """Return a row of padding alone."""
        return self._row([])

    def _row(self, pieces: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """Return a row of documents' parts: the tokens of each, and their labels."""
        seq_len = self._packing.seq_len
        row = np.empty((4, seq_len), np.int64)
        tokens_L, labels_L, positions_L, documents_L = row
        place = 0
        for number, (tokens, labels) in enumerate(pieces):
            end = place + len(tokens)
            tokens_L[place:end], labels_L[place:end] = tokens, labels
            positions_L[place:end] = np.arange(len(tokens))
            documents_L[place:end] = number
            place = end
        if place < seq_len:
            tokens_L[place:] = self._tokenizer.eos_id
            labels_L[place:] = IGNORE_INDEX
            positions_L[place:] = np.arange(seq_len - place)
            documents_L[place:] = PADDING
        self.filled = place
        return row

    def next_pieces(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the documents' parts in the next row: the tokens of each, and their labels; none after the last."""
        self.counts = Counts()
        pieces: list[tuple[np.ndarray, np.ndarray]] = []
        wanted, whole = self._packing.seq_len, self._packing.whole
        while wanted and self._document_under_way():
            offset = self.cursor.offset
            if pieces and (self._packing.alone or whole and len(self._tokens) - offset > wanted):
                break
            piece = self._tokens[offset : offset + wanted]
            following = self._tokens[offset + 1 : offset + wanted + 1]
            offset += len(piece)
            labels = following if len(following) == len(piece) else np.append(following, IGNORE_INDEX)
            pieces.append((piece, labels))
            wanted -= len(piece)
            self.cursor = self.cursor._replace(offset=offset)
        self.cursor = self.cursor._replace(row=self.cursor.row + 1)
        return pieces

    def _document_under_way(self) -> bool:
        """Advance to the next document if this one has ended; return whether there is one."""
        if self._documents is None:  # the first row, perhaps of a resumed lane: begin inside the cursor's document
            self._documents = self._corpus.documents(self._number, self.cursor.epoch, self.cursor.document)
            self._read_document(self.cursor.offset)
        while self.cursor.offset >= len(self._tokens):
            if not self._read_document(offset=0):
                return False
        return True

    def _read_document(self, offset: int) -> bool:
        """Advance to the next document with tokens, at `offset` if it is the cursor's; return whether there is one."""
        item = self._next_with_tokens()
        for _ in range(_EMPTY_EPOCHS if item is None else 0):
            if not self._begin_epoch() or (item := self._next_with_tokens()):
                break
        if item is None:
            self._refuse_empty()
            return False
        index, ids = item
        bos = [] if self._tokenizer.bos_id is None else [self._tokenizer.bos_id]
        self._tokens = np.concatenate([bos, ids, [self._tokenizer.eos_id]]).astype(np.int64)
        self.cursor = self.cursor._replace(document=index, offset=offset if index == self.cursor.document else 0)
        return True

    def _begin_epoch(self) -> bool:
        """Begin the lane's next epoch; return whether there is one."""
        if 0 < self._packing.epochs <= self.cursor.epoch + 1:
            return False
        self.cursor = Cursor(self.cursor.row, self.cursor.epoch + 1)
        self._documents = self._corpus.documents(self._number, self.cursor.epoch, 0)
        return True

    def _refuse_empty(self) -> None:
        """Raise if the corpus, which repeats without end, has nothing to repeat."""
        if self._packing.epochs == 0:
            read = in_words(self._left_out)
            if self._num_empty:
                read.append(f"documents without text: {self._num_empty:,}")
            raise UserError(
                f"training.dataset: lane {self._number} of {self._corpus.num_lanes} got no document"
                f" {self._needs} in {_EMPTY_EPOCHS} epochs: {'; '.join(read) or 'it has too few documents'}"
            )

    def _next_with_tokens(self) -> tuple[int, list[int] | np.ndarray] | None:
        """Return the number and the ids of the epoch's next document that has any."""
        assert self._documents is not None
        for index, document in self._documents:
            if isinstance(document, Skipped):
                self.counts += Counts(**{document.kind: 1})
                self._left_out += Counts(**{document.kind: 1})
                continue
            assert not isinstance(document, (Tokens, Pair, Contexts)), "those are packed whole"
            ids = self._tokenizer.encode(document) if isinstance(document, str) else document
            if len(ids):
                return index, ids
            self._num_empty += 1
        return None


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
        while self.cursor.offset >= len(self._window) and not self._has_ended and empty < _EMPTY_EPOCHS:
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
