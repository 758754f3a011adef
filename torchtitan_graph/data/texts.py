"""Documents by number, from files of text."""

from collections.abc import Sequence

from torchtitan_graph.data.bad_rows import BadRows
from torchtitan_graph.data.columns import PAIRS
from torchtitan_graph.data.document import Document
from torchtitan_graph.data.files import DataFile, are_json_objects, decode, first_lines, refuse_packed
from torchtitan_graph.data.lines import JSON_SUFFIXES
from torchtitan_graph.data.sources import digest_files, is_small
from torchtitan_graph.data.tables import TABLE_SUFFIXES
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger

_LONGEST_CHARACTER = 4  # bytes of UTF-8
_TABLES = ({"prompt", "completion"}, {"user", "assistant"}, *map(set, PAIRS))


class TextFiles:
    """A document per file, UTF-8; files are numbered as given."""

    is_whole = False

    def __init__(self, root: str, files: list[DataFile], bad_rows: BadRows | None = None) -> None:
        self._bad_rows = bad_rows or BadRows(root)
        self._files = files
        self.digest = digest_files(files, [file.name for file in files])
        if is_small(sum(file.size for file in self._files)):
            self._bad_rows.read_all(self._read, len(self))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Document:
        return self._bad_rows.read(self._read, index)

    def _read(self, index: int) -> str:
        return decode(self._files[index].read(), self._files[index].path)

    def identity(self, index: int) -> str:
        return self._files[index].name


class TextPieces:
    """One text file, split at the first line end after every 8 KiB; each piece is a document.

    One document could not be split into training and validation. Nothing is indexed: piece i begins at the first line
    or, where none begins in 8 KiB, the first character from byte 8192 * i on. Where none begins before the file's end,
    the previous piece is the last.
    """

    PIECE_BYTES = 8192
    is_whole = False

    def __init__(self, file: DataFile, bad_rows: BadRows | None = None) -> None:
        self._file, self._bad_rows, self._data = file.path, bad_rows or BadRows(file.path), file
        self.digest = digest_files([file], [file.base])
        refuse_packed(self._data, (*JSON_SUFFIXES, *TABLE_SUFFIXES))
        self._number = -(-self._data.size // self.PIECE_BYTES)
        if self._number and not self._piece(self._number - 1)[0]:
            self._number -= 1
            self.digest += ", less the empty piece at its end"  # it was once a document, with another order of all
        if is_small(self._data.size):
            self._bad_rows.read_all(self._read, len(self))

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> Document:
        return self._bad_rows.read(self._read, index)

    @property
    def is_remote(self) -> bool:
        return self._data.is_remote

    def prepare(self, index: int) -> None:
        self._data.prepare(*self._part(index))

    def _read(self, index: int) -> str:
        content, first_byte = self._piece(index)
        return decode(content, self._file, first_byte or None)  # lines are counted from the file's first byte

    def _piece(self, index: int) -> tuple[bytes, int]:
        """Return the bytes of a piece, and its first byte's place in the file."""
        first, count = self._part(index)
        content = self._data.read_part(first, count)
        start = self._begin(content, index * self.PIECE_BYTES - first) if index else 0
        end = self._begin(content, (index + 1) * self.PIECE_BYTES - first)
        return content[start:end], first + start

    def _part(self, index: int) -> tuple[int, int]:
        """Return the first byte that tells where a piece begins, and how many bytes a piece needs."""
        return max(0, index * self.PIECE_BYTES - 1), 2 * self.PIECE_BYTES + _LONGEST_CHARACTER

    def _begin(self, content: bytes, place: int) -> int:
        """Return the begin of a piece, searched from `place` on: the file's end if no line begins."""
        last = place - 1 + self.PIECE_BYTES
        line_end = content.find(b"\n", place - 1, last)
        if line_end >= 0:
            return line_end + 1
        if last > len(content):
            return len(content)
        inside = 0  # bytes inside a character
        while inside < _LONGEST_CHARACTER and content[place + inside] & 0b1100_0000 == 0b1000_0000:
            inside += 1
        return place + inside

    def identity(self, index: int) -> str:
        return f"{self._data.base}:{index}"


def refuse_rows(files: Sequence[DataFile], option: str) -> None:
    """Raise UserError for a file of text whose first lines are JSON objects; warn of one that begins as a table.

    option: the name of the option that says that it is text.
    """
    for file in files:
        path, stem = file.path, file.base.rpartition(".")[0] or file.base
        lines = first_lines(file)
        if are_json_objects(lines):
            raise UserError(
                f"{path}: its lines are JSON objects, and would be learned as they are, braces and keys: rename it to"
                f" {stem}.jsonl to train on what they hold, or set {option} = 'text'"
            )
        first = lines[0].decode(errors="replace") if lines else ""
        for delimiter, suffix in ((",", ".csv"), ("\t", ".tsv")):
            header = {name.strip().strip('"') for name in first.split(delimiter)}
            if any(pair <= header for pair in _TABLES):
                logger.warning(
                    f"{path}: is read as text, and its first line, {first!r:.80}, is like the names of a table's"
                    f" columns: rename it to {stem}{suffix} to train on its rows"
                )
