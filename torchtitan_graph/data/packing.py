"""Packing of one lane: its documents into rows, token by token."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from torchtitan_graph.data.bad_rows import Skipped
from torchtitan_graph.data.batch import IGNORE_INDEX, PADDING
from torchtitan_graph.data.corpus import Corpus
from torchtitan_graph.data.counts import Counts, in_words
from torchtitan_graph.data.document import Contexts, Document, Pair, Tokens
from torchtitan_graph.data.tokenizer import Tokenizer
from torchtitan_graph.errors import UserError

# By chance a lane of a small split may have no document in an epoch; but not so often in a row.
EMPTY_EPOCHS = 16


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
        for _ in range(EMPTY_EPOCHS if item is None else 0):
            if not self._begin_epoch() or (item := self._next_with_tokens()):
                break
        if item is None:
            self._refuse_empty()
            return False
        index, ids = item
        begin = 0 if (bos_id := self._tokenizer.bos_id) is None else 1
        self._tokens = tokens = np.empty(begin + len(ids) + 1, np.int64)
        tokens[:begin], tokens[begin:-1], tokens[-1] = bos_id or 0, ids, self._tokenizer.eos_id
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
                f" {self._needs} in {EMPTY_EPOCHS} epochs: {'; '.join(read) or 'it has too few documents'}"
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
