"""Documents by number, from JSON lines."""

import codecs
from functools import partial
from typing import Any

import numpy as np

from torchtitan_graph.data.bad_rows import BadRow
from torchtitan_graph.data.document import Document
from torchtitan_graph.data.files import DataFile, Progress, decode, first_lines, refuse_packed
from torchtitan_graph.data.forms import RowFormat, form_of
from torchtitan_graph.data.node_cache import Arrays
from torchtitan_graph.data.row_forms import Form
from torchtitan_graph.data.sources import digest_files, is_small
from torchtitan_graph.data.unpack import UnpackedFile, is_packed, unpacked_name
from torchtitan_graph.errors import UserError
from torchtitan_graph.small_files import BadFile, parse_json

JSON_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
LONGEST_ROW = 128 * 2**20  # bytes
_ONE_PER_LINE = (
    'JSON lines have one object on each line, such as {"text": "..."}; jq -c \'.[]\' FILE writes those of a JSON array'
)


class JsonLines:
    """A document per line of a JSON lines file; the keys of the first tell in which form. Blank lines are skipped.

    Opening reads the file once, for the place of every line (16 bytes each), which is kept in the node's cache unless
    the file is small. A packed file can only be read from its beginning, so it is unpacked into that cache first.
    """

    def __init__(self, file: DataFile, reading: RowFormat) -> None:
        self._file, self._bad_rows, self._reading = file.path, reading.bad_rows(file.path), reading
        self._name = unpacked_name(file.base)
        digest = digest_files([file], [file.base])
        self._data = UnpackedFile(file, reading.cache) if is_packed(file.name) else file
        if self._data is file:
            refuse_packed(file, JSON_SUFFIXES)
        self._refuse_table(first_lines(self._data))
        cache = None if is_small(self._data.size) else reading.cache
        self._index = Arrays(cache, "lines", self._data.key, build=partial(_index_lines, self._data))
        file.check()
        self._refuse_array()
        self.form: Form = form_of(reading, lambda index: self._row(index)[0], len(self), self._file)
        self.digest, self.is_whole = digest + self.form.digest, self.form.is_whole
        if reading.is_small(self._data.size):
            self._bad_rows.read_all(self._read, len(self))
        elif len(self):
            self[0]  # raises for an invalid line

    def _refuse_table(self, lines: list[bytes]) -> None:
        """Raise UserError if the first lines are those of a table."""
        for delimiter, kind in ((b",", "csv"), (b"\t", "tsv")):
            if len(lines) > 1 and all(delimiter in line and line.lstrip()[:1] not in (b"{", b"[") for line in lines):
                name = self._name.rpartition(".")[0]
                raise UserError(
                    f"{self._file}: is a table and no JSON lines, it seems, as its first line is"
                    f" {lines[0].decode(errors='replace')!r:.80}: rename it to {name}.{kind}"
                )

    def _refuse_array(self) -> None:
        """Raise UserError if the file is one JSON array, on one line or over several."""
        if not len(self):
            return
        lines = self._documents[[0, -1]]
        begin = self._data.read_part(int(self._line_starts[lines[0]]), 64).removeprefix(codecs.BOM_UTF8)
        ends = [int(end) for end in self._line_starts[lines + 1]]
        of_first, of_last = (self._data.read_part(max(0, end - 64), min(64, end)).rstrip()[-1:] for end in ends)
        if begin.lstrip().startswith(b"[") and of_last == b"]" and (len(self) == 1 or of_first != b"]"):
            raise UserError(f"{self._file}: is one JSON array. {_ONE_PER_LINE}")

    @property
    def _line_starts(self) -> np.ndarray:
        return self._index.arrays[0]

    @property
    def _documents(self) -> np.ndarray:
        """The numbers of the lines that are not blank."""
        return self._index.arrays[1]

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Document:
        return self._bad_rows.read(self._read, index)

    @property
    def is_remote(self) -> bool:
        return not self._data.is_kept

    def prepare(self, index: int) -> None:
        line = int(self._documents[index])
        start, end = map(int, self._line_starts[line : line + 2])
        self._data.prepare(start, end - start)

    def _read(self, index: int) -> Document:
        row, where = self._row(index)
        self._reading.name_unread_columns(row, self.form, where)
        return self.form.document(row, where)

    def _row(self, index: int) -> tuple[dict[str, Any], str]:
        """Return the object in a line, and the line's place."""
        line = int(self._documents[index])
        start, end = int(self._line_starts[line]), int(self._line_starts[line + 1])
        where = f"{self._file}, line {line + 1}"
        if end - start > LONGEST_ROW:
            raise UserError(f"{where}: has {end - start:,} bytes, more than the {LONGEST_ROW:,} of a document here")
        content = self._data.read_part(start, end - start)
        decode(content, where, start)
        try:
            row = parse_json(content, object, where)
        except BadFile as error:
            if index == 0 and content.removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"[", b"{"):  # of several lines?
                raise BadRow("not_json", f"{error}. {_ONE_PER_LINE}") from error
            raise BadRow("not_json", str(error)) from error
        if not isinstance(row, dict):
            raise BadRow("not_json", f"{where}: not a JSON object. {_ONE_PER_LINE}")
        return row, where

    def identity(self, index: int) -> str:
        return f"{self._name}:{index}"


def _index_lines(file: DataFile) -> list[np.ndarray]:
    """Return the byte at which each line starts, with the file's end, and the numbers of the lines that are not
    blank."""
    ends: list[np.ndarray] = []
    firsts: list[np.ndarray] = []  # bytes of lines
    position, begins_line = 0, True
    progress = Progress(f"finding the lines of {file.path}", file.size)
    for chunk in file.chunks():
        content = np.frombuffer(chunk, np.uint8)
        ends.append(np.flatnonzero(content == ord("\n")) + 1)
        firsts.append(content[ends[-1][ends[-1] < len(chunk)]])
        if begins_line:
            firsts[-1] = np.append(content[0], firsts[-1])
        begins_line = chunk.endswith(b"\n")
        ends[-1] += position
        position += len(chunk)
        progress.add(len(chunk))
    starts = np.concatenate([np.zeros(1, np.int64), *ends])
    if starts[-1] != position:  # the last line has no end
        starts = np.append(starts, position)
    first = np.concatenate([np.empty(0, np.uint8), *firsts])
    is_blank = first == ord("\n")
    for line in np.flatnonzero(np.isin(first, list(b" \t\r\v\f"))):
        is_blank[line] = not file.read_part(int(starts[line]), int(starts[line + 1] - starts[line])).strip()
    return [starts, np.flatnonzero(~is_blank)]
