"""Documents by number, from tables of comma- or tab-separated values (.csv, .tsv)."""

import codecs
import csv
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath

import numpy as np

from torchtitan_graph.data.bad_rows import BadRow
from torchtitan_graph.data.document import Document
from torchtitan_graph.data.files import (
    DataFile,
    Progress,
    are_json_objects,
    chunks_as_file,
    decode,
    first_lines,
    refuse_packed,
)
from torchtitan_graph.data.forms import RowFormat, form_of
from torchtitan_graph.data.lines import LONGEST_ROW
from torchtitan_graph.data.node_cache import Arrays
from torchtitan_graph.data.row_forms import Form
from torchtitan_graph.data.sources import digest_files, is_small
from torchtitan_graph.data.unpack import UnpackedFile, is_packed, unpacked_name
from torchtitan_graph.errors import UserError

TABLE_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".csv.zst", ".tsv.zst")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_OTHER_DELIMITERS = ";\t|,"

# Note [Rows of a table]
# Values are quoted as RFC 4180 says: one that begins with a quotation mark ends with one, has two for one inside, and
# may have line ends and delimiters. A quotation mark elsewhere is a character. Opening finds where each row begins, by
# reading the file once as Latin-1: the characters that divide it are the same bytes in UTF-8.


def is_table(name: str) -> bool:
    """Return whether a file is a table by its name."""
    return name.lower().endswith(TABLE_SUFFIXES)


class Table:
    """A document per row of a table, whose first row has the names of the columns. Blank lines are skipped.

    Opening reads the file once, for the place of every row (16 bytes each), which is kept as that of JSON lines is; a
    packed file is unpacked first, as those are.
    """

    def __init__(self, file: DataFile, reading: RowFormat) -> None:
        self._file, self._bad_rows = file.path, reading.bad_rows(file.path)
        self._name = unpacked_name(file.base)
        digest = digest_files([file], [file.base])
        self._data = UnpackedFile(file, reading.cache) if is_packed(file.name) else file
        if self._data is file:
            refuse_packed(file, TABLE_SUFFIXES)
        if are_json_objects(first_lines(self._data)):
            stem = self._name.rpartition(".")[0]
            raise UserError(
                f"{self._file}: its lines are JSON objects, and no rows of a table: rename it to {stem}.jsonl"
            )
        self._delimiter = _DELIMITERS[PurePath(self._name.lower()).suffix]
        cache = None if is_small(self._data.size) else reading.cache
        self._index = Arrays(cache, "rows", self._name, self._data.key, build=self._find_rows)
        file.check()
        self._header = self._read_header() if len(self._starts) > 1 else []
        self.form: Form = form_of(reading, lambda index: dict.fromkeys(self._header), len(self), self._file)
        self.digest, self.is_whole = digest + self.form.digest, self.form.is_whole
        if reading.is_small(self._data.size):
            self._bad_rows.read_all(self._read, len(self))
        elif len(self):
            self[0]  # raises for an invalid row

    @property
    def _starts(self) -> np.ndarray:
        return self._index.arrays[0]

    @property
    def _lines(self) -> np.ndarray:
        return self._index.arrays[1]

    def __len__(self) -> int:
        return max(0, len(self._lines) - 1)

    def __getitem__(self, index: int) -> Document:
        return self._bad_rows.read(self._read, index)

    def identity(self, index: int) -> str:
        return f"{self._name}:{index}"

    @property
    def is_remote(self) -> bool:
        return not self._data.is_kept

    def prepare(self, index: int) -> None:
        start, end = map(int, self._starts[index + 1 : index + 3])
        self._data.prepare(start, end - start)

    def _read(self, index: int) -> Document:
        where = f"{self._file}, line {self._lines[index + 1]}"
        values = self._values(index + 1, where)
        if len(values) != len(self._header):
            raise BadRow(
                "wrong_fields",
                f"{where}: has {len(values)} field{'s' * (len(values) != 1)}, and the table has"
                f" {len(self._header)} columns. A value with a delimiter or a line end in it must be quoted",
            )
        return self.form.document(dict(zip(self._header, values, strict=True)), where)

    def _values(self, row: int, where: str) -> list[str]:
        """Return the values of a row, of which 0 is the header."""
        start, end = int(self._starts[row]), int(self._starts[row + 1])
        if end - start > LONGEST_ROW:
            raise UserError(f"{where}: has {end - start:,} bytes, more than the {LONGEST_ROW:,} of a document here")
        text = decode(self._data.read_part(start, end - start), where, start)
        try:
            return next(_rows(_split(text), self._delimiter))
        except csv.Error as error:
            raise BadRow("wrong_fields", f"{where}: is no row of a table: {_in_words(str(error))}") from error

    def _read_header(self) -> list[str]:
        """Return the names of the columns; raise UserError if two are equal, or they seem divided in another way."""
        where = f"{self._file}, line {self._lines[0]}"
        try:
            header = self._values(0, where)
        except BadRow as error:
            raise UserError(str(error)) from error
        if twice := [name for name, count in Counter(header).items() if count > 1]:
            raise UserError(f"{where}: two of its columns have the name {twice[0]!r}; rename one")
        others = [mark for mark in _OTHER_DELIMITERS if mark != self._delimiter and mark in header[0]]
        if len(header) == 1 and others:
            other = next((suffix for suffix, mark in _DELIMITERS.items() if mark == others[0]), None)
            instead = "write it so" if other is None else f"write it so, or rename the file to {other}"
            raise UserError(
                f"{where}: its values are divided by {others[0]!r}, it seems, as the one column is {header[0]!r:.80}."
                f" Values are divided by a comma in .csv, and by a tab in .tsv: {instead}"
            )
        return header

    def _find_rows(self) -> list[np.ndarray]:
        """Return the byte at which each row begins, the header's first, with the file's end, and each one's line."""
        starts, lines = array("q"), array("q")
        progress = Progress(f"finding the rows of {self._file}", self._data.size)
        with chunks_as_file(self._data, progress) as stream:
            begin = 0
            if stream.peek(3).startswith(codecs.BOM_UTF8):
                begin = len(stream.read(3))
            reading = _Reading(iter(lambda: stream.readline(LONGEST_ROW + 1), b""), begin)
            rows = _rows(iter(reading), self._delimiter)
            while True:
                start, line, error = reading.position, reading.line, ""
                try:
                    row = next(rows)
                except StopIteration:
                    break
                except csv.Error as found:  # named when it is read
                    row, error = [" ", " "], str(found)
                if error and "unexpected end" in error:
                    raise UserError(
                        f"{self._file}, line {line + 1}: a value begins with a quotation mark, and the file ends"
                        " without the one that closes it. Close it, or double each mark that is part of a value"
                    )
                if row and not (len(row) == 1 and not row[0].strip() and not reading.is_quoted):
                    starts.append(start)
                    lines.append(line + 1)
            starts.append(reading.position)
        return [np.array(starts, np.int64), np.array(lines, np.int64)]


class _Reading:
    """Lines as Latin-1, with the place after the last one, and whether it has a quotation mark."""

    def __init__(self, lines: Iterator[bytes], position: int) -> None:
        self._lines, self.position, self.line, self.is_quoted = lines, position, 0, False

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self.position += len(line)
            self.line += 1
            self.is_quoted = b'"' in line
            yield line.decode("latin-1")


def _split(text: str) -> Iterator[str]:
    """Yield the lines of a text; `str.splitlines` would end one at other characters too."""
    start = 0
    while start < len(text):
        end = text.find("\n", start) + 1 or len(text)
        yield text[start:end]
        start = end


def _rows(lines: Iterator[str], delimiter: str) -> Iterator[list[str]]:
    if csv.field_size_limit() < LONGEST_ROW:
        csv.field_size_limit(LONGEST_ROW)
    return csv.reader(lines, delimiter=delimiter, strict=True)


def _in_words(error: str) -> str:
    if "new-line character" in error:
        return (
            "a carriage return stands alone in it; lines end with a line feed, or a carriage return and one, and a"
            " value with another must be quoted"
        )
    if "expected after" in error:
        return "a closing quotation mark is followed by more text; one that is part of a quoted value must be doubled"
    return error
