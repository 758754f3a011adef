"""Rows that can't be read as documents: the first ends the run, or all are left out and counted by their kind."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger

# The kinds of bad rows, each with what is said of those that are left out.
KINDS = {
    "not_utf8": "not UTF-8",
    "not_json": "no JSON object",
    "wrong_fields": "another number of fields than the table has columns",
    "no_value": "a column is missing, or its value is of the wrong type",
    "wrong_message": "a message with a wrong role or key, or without content",
    "not_text": "an image or another part that is not text",
    "no_answer": "an empty answer",
    "no_preference": "answers that can't be compared",
    "refused": "refused by the chat template",
}
HINT = "training.on_bad_row = 'skip' leaves such rows out, and counts them"
_MOST_NAMED = 10
_MOST_KEPT = 128 * 2**20
D = TypeVar("D")


class BadRow(UserError):
    """Error: a row can't be read as a document; `kind` is one of KINDS."""

    def __init__(self, kind: str, message: str) -> None:
        assert kind in KINDS, kind
        super().__init__(message)
        self.kind = kind

    def at(self, where: str) -> "BadRow":
        """Return the same error with a place before its message."""
        return BadRow(self.kind, f"{where}: {self}")


class AllBad(UserError):
    """Error: no row of a file can be read, and bad rows are left out."""


class Skipped(NamedTuple):
    """In place of the document of a bad row: it keeps its number and has no tokens."""

    kind: str


class Room:
    """The bytes that are left for documents that are kept, of all corpora of a job; each process has its own."""

    def __init__(self) -> None:
        self.left = _MOST_KEPT

    def __reduce__(self) -> tuple[type["Room"], tuple[()]]:
        return Room, ()


class BadRows:
    """Reads the documents of one file or class, and says what becomes of its bad rows.

    Of a small corpus, documents that are tokens are kept once they are read, as long as there is room: a run reads each
    several times, to check it, to count rows, and in each epoch, and a chat template takes long.

    place: the file or folder, for messages.
    on_bad_row: as `training.on_bad_row`.
    may_be_all: whether all may be left out.
    room: what it shares with other files; not set: its own.
    """

    def __init__(
        self, place: str, on_bad_row: str = "refuse", may_be_all: bool = False, room: Room | None = None
    ) -> None:
        self._place, self.skip, self._may_be_all = place, on_bad_row == "skip", may_be_all
        self._has_warned = self._keeps = False
        self._kept: dict[int, Any] = {}
        self._room = room or Room()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}  # a worker process reads only some, and keeps those

    def read(self, read: Callable[[int], D], index: int) -> D | Skipped:
        """Return document `index`, or Skipped for a bad row; raise UserError for that where it is refused."""
        try:
            return self._read(read, index)
        except BadRow as error:
            if not self.skip:
                raise UserError(f"{_ended(str(error))} {HINT}") from error
            if not self._has_warned:
                logger.warning(f"{_ended(str(error))} It is left out, as are all bad rows; the log counts them by kind")
            self._has_warned = True
            return Skipped(error.kind)

    def read_all(self, read: Callable[[int], D], number: int) -> None:
        """Read every document of a small corpus once, and keep those that are tokens; the bad rows are reported
        together, as an error or a warning.

        Raises UserError if there is a bad row and it is refused, AllBad if none is left.
        """
        self._keeps = True
        kinds: Counter[str] = Counter()
        lines: list[str] = []
        for index in range(number):
            try:
                self._read(read, index)
            except BadRow as error:
                kinds[error.kind] += 1
                if len(lines) < _MOST_NAMED:
                    lines.append(str(error))
        if not (bad := kinds.total()):
            return
        counts = "; ".join(f"{what}: {kinds[kind]:,}" for kind, what in KINDS.items() if kinds[kind])
        if bad > _MOST_NAMED:
            lines.append(f"and {bad - _MOST_NAMED:,} more")
        if bad > 1:
            lines.insert(0, f"{self._place}: {bad:,} of {number:,} rows are bad ({counts}):")
        named = "\n    ".join(lines)
        if not self.skip:
            if bad == number > 1:  # left out, none remains
                raise UserError(named)
            raise UserError(f"{_ended(named)} {HINT}" if bad == 1 else f"{named}\n{HINT}")
        if bad == number and not self._may_be_all:
            raise AllBad(f"{named}\nNo document is left")
        left_out = "It is left out" if bad == 1 else "They are left out"
        logger.warning(f"{named}\n{left_out}: training.on_bad_row")
        self._has_warned = True

    def _read(self, read: Callable[[int], D], index: int) -> D:
        if index in self._kept:
            return self._kept[index]  # type: ignore[no-any-return]
        document = read(index)
        num_bytes = _num_bytes(document)
        if self._keeps and num_bytes and self._room.left >= num_bytes:
            self._kept[index] = document
            self._room.left -= num_bytes
        return document


def _num_bytes(document: Any) -> int:
    """Return the bytes of the tokens in a document, none of a text."""
    if isinstance(document, tuple):
        return sum(map(_num_bytes, document))
    return document.nbytes if isinstance(document, np.ndarray) else 0


def _ended(text: str) -> str:
    """Return a text with the mark that ends a sentence."""
    return text if text.endswith((".", "?")) else f"{text}."
