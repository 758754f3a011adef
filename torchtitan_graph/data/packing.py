"""Packing of one lane: its documents, token by token, split into rows."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from torchtitan_graph.data.batch import IGNORE_INDEX
from torchtitan_graph.data.corpus import Corpus
from torchtitan_graph.data.sources import Document
from torchtitan_graph.data.tokenizer import Tokenizer
from torchtitan_graph.errors import UserError

# By chance a lane of a small split may have no document in an epoch; but not so often in a row.
_EMPTY_EPOCHS = 16


class Cursor(NamedTuple):
    """Position in a lane: number of rows returned so far; epoch, index and number of used tokens of the current
    document."""

    row: int = 0
    epoch: int = 0
    document: int = 0
    offset: int = 0


class Lane:
    """Rows of `seq_len` tokens from one lane of a corpus, starting at a cursor.

    A document is [bos] + ids + [eos], and left out if it has no ids. A row has the next `seq_len` tokens, wherever
    documents begin or end, so every token is an input once. If documents stay `whole`, a row ends where the next one
    does not fit; only one that is longer than a row is split. With `alone` a row ends with its document. With `repeat`
    the lane continues with its next epoch; otherwise its last row is padded, and endless rows of padding follow.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        seq_len: int,
        repeat: bool,
        number: int,
        cursor: Cursor,
        whole: bool = False,
        alone: bool = False,
    ) -> None:
        self._corpus, self._tokenizer, self._seq_len, self._repeat = corpus, tokenizer, seq_len, repeat
        self._number, self._whole, self._alone = number, whole, alone
        self.cursor = cursor
        self.filled = self._num_empty = 0
        self._tokens = np.empty(0, np.int64)  # of the current document
        self._documents: Iterator[tuple[int, Document]] | None = None

    def next_row(self) -> np.ndarray:
        """Return the next row: tokens, labels, positions and documents, as (4, L); `filled` is its length without
        padding."""
        row = np.empty((4, self._seq_len), np.int64)
        tokens_L, labels_L, positions_L, documents_L = row
        place = 0
        for number, (piece, target) in enumerate(self._next_pieces()):
            end = place + len(piece)
            tokens_L[place:end] = piece
            labels_L[place : end - 1] = piece[1:]
            labels_L[end - 1] = target
            positions_L[place:end] = np.arange(len(piece))
            documents_L[place:end] = number
            place = end
        if place < self._seq_len:
            tokens_L[place:] = self._tokenizer.eos_id
            labels_L[place:] = IGNORE_INDEX
            positions_L[place:] = np.arange(self._seq_len - place)
            documents_L[place:] = documents_L[place - 1] + 1 if place else 0
        self.filled = place
        return row

    def skip_row(self) -> None:
        """Skip the next row: it belongs to another rank or worker."""
        self._next_pieces()

    def _next_pieces(self) -> list[tuple[np.ndarray, int]]:
        """Return a row's tokens: the part of each document, and the target of the part's last token."""
        pieces: list[tuple[np.ndarray, int]] = []
        wanted = self._seq_len
        while wanted and self._document_under_way():
            offset = self.cursor.offset
            if pieces and (self._alone or self._whole and len(self._tokens) - offset > wanted):
                break
            piece = self._tokens[offset : offset + wanted]
            offset += len(piece)
            target = int(self._tokens[offset]) if offset < len(self._tokens) else IGNORE_INDEX
            pieces.append((piece, target))
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
        for _ in range(_EMPTY_EPOCHS if self._repeat and item is None else 0):
            self.cursor = Cursor(self.cursor.row, self.cursor.epoch + 1)
            self._documents = self._corpus.documents(self._number, self.cursor.epoch, 0)
            if item := self._next_with_tokens():
                break
        if item is None:
            if self._repeat:
                empty = f"The {self._num_empty:,} that were read are empty"
                why = empty if self._num_empty else "It has too few documents"
                raise UserError(
                    f"training.dataset: lane {self._number} of {self._corpus.num_lanes} got no document with text in"
                    f" {_EMPTY_EPOCHS} epochs. {why}: take a corpus with more text"
                )
            return False
        index, ids = item
        bos = [] if self._tokenizer.bos_id is None else [self._tokenizer.bos_id]
        self._tokens = np.concatenate([bos, ids, [self._tokenizer.eos_id]]).astype(np.int64)
        self.cursor = self.cursor._replace(document=index, offset=offset if index == self.cursor.document else 0)
        return True

    def _next_with_tokens(self) -> tuple[int, list[int] | np.ndarray] | None:
        """Return the number and the ids of the epoch's next document that has any."""
        assert self._documents is not None
        for index, document in self._documents:
            ids = self._tokenizer.encode(document) if isinstance(document, str) else document
            if len(ids):
                return index, ids
            self._num_empty += 1
        return None
