"""Documents by number, from files: text, JSON lines, Parquet, and the running Python's standard library."""

import bisect
import gzip
import hashlib
import itertools
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from torchtitan_graph.data.document import Document, Tokens
from torchtitan_graph.data.files import DataFile
from torchtitan_graph.data.forms import Form, RowFormat
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.small_files import BadFile, parse_json

# Corpora up to this size are read once when they are opened: their digest covers every byte, and corrupt input is found
# before training. For larger ones the digest covers names, sizes and both ends of each file, and a corrupt document is
# found when it is read.
SMALL_CORPUS_BYTES = 64 * 2**20
_END_BYTES = 4096
_MOST_NAMED = 10
_LONGEST_CHARACTER = 4  # bytes of UTF-8
_LONGEST_LINE = 128 * 2**20
_PACKED = {"gzip": b"\x1f\x8b\x08", "zstd": b"\x28\xb5\x2f\xfd", "xz": b"\xfd7zXZ\0", "zip": b"PK\3\4"}
_ONE_PER_LINE = (
    'JSON lines have one object on each line, such as {"text": "..."}; jq -c \'.[]\' FILE writes those of a JSON array'
)
_UTF8_HINT = "Convert text of another encoding to UTF-8; training.skip_not_utf8 = true leaves such documents out"


class NotUtf8(UserError):
    """A document that can't be decoded."""


class Source(Protocol):
    """Documents that can be read in any order.

    `digest` is equal for two sources with the same documents under the same numbers. `identity` names a document by its
    place, or is the hash of that (see `corpus.document_key`); it decides the split into train and validation. Documents
    of a source with `is_whole` are `Tokens`. An instance can be pickled.
    """

    digest: str
    is_whole: bool

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document: ...

    def identity(self, index: int) -> str | int: ...


class _Texts:
    """Base of the sources of text: documents that are not UTF-8 are refused, or replaced by empty ones."""

    _file: str  # the file or folder, for messages
    skip_not_utf8: bool
    is_whole = False
    _has_warned = False

    def __len__(self) -> int:
        raise NotImplementedError

    def _read(self, index: int) -> Document:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Document:
        try:
            return self._read(index)
        except NotUtf8 as error:
            if not self.skip_not_utf8:
                raise UserError(f"{error}. {_UTF8_HINT}") from error
            if not self._has_warned:
                logger.warning(f"{error}. It is left out, as are all documents that are not UTF-8")
            self._has_warned = True
            return Tokens(np.empty(0, np.int64), np.empty(0, bool)) if self.is_whole else ""

    def _read_all(self) -> None:
        """Read every document once; those that are not UTF-8 are reported together, as an error or a warning."""
        errors = []
        for index in range(len(self)):
            try:
                self._read(index)
            except NotUtf8 as error:
                errors.append(str(error))
        if not errors:
            return
        many = f"{self._file}: {len(errors):,} of {len(self):,} documents are not UTF-8:"
        lines = [many, *errors[:_MOST_NAMED]] if len(errors) > 1 else errors
        if len(errors) > _MOST_NAMED:
            lines.append(f"and {len(errors) - _MOST_NAMED:,} more")
        named = "\n    ".join(lines)
        if not self.skip_not_utf8:
            raise UserError(f"{named}\n{_UTF8_HINT}")
        if len(errors) == len(self):
            raise UserError(f"{named}\nNo document is left: convert them to UTF-8")
        logger.warning(f"{named}\nThey are left out: training.skip_not_utf8")
        self._has_warned = True


class TextFiles(_Texts):
    """A document per file, UTF-8; files are numbered as given and named relative to `root`."""

    def __init__(self, root: Path, files: list[Path], skip_not_utf8: bool = False) -> None:
        self._file, self.skip_not_utf8 = str(root), skip_not_utf8
        self._files = [DataFile(file) for file in files]
        self._names = [str(file.relative_to(root)) for file in files]
        self.digest = digest_files(root, files)
        if sum(file.size for file in self._files) <= SMALL_CORPUS_BYTES:
            self._read_all()

    def __len__(self) -> int:
        return len(self._files)

    def _read(self, index: int) -> str:
        return _decode(self._files[index].read(), self._files[index].path)

    def identity(self, index: int) -> str:
        return self._names[index]


class TextPieces(_Texts):
    """One text file, split at the first line end after every 8 KiB; each piece is a document.

    One document could not be split into training and validation. Nothing is indexed: piece i begins at the first line
    or, where none begins in 8 KiB, the first character from byte 8192 * i on. Where none begins before the file's end,
    the previous piece is the last.
    """

    PIECE_BYTES = 8192

    def __init__(self, file: Path, skip_not_utf8: bool = False) -> None:
        self._file, self.skip_not_utf8 = str(file), skip_not_utf8
        self._data = DataFile(file)
        self.digest = digest_files(file.parent, [file])
        _refuse_packed(self._data)
        self._number = -(-self._data.size // self.PIECE_BYTES)
        if self._number and not self._piece(self._number - 1)[0]:
            self._number -= 1
            self.digest += ", less the empty piece at its end"  # it was once a document, with another order of all
        if self._data.size <= SMALL_CORPUS_BYTES:
            self._read_all()

    def __len__(self) -> int:
        return self._number

    def _read(self, index: int) -> str:
        content, first_byte = self._piece(index)
        return _decode(content, self._file, first_byte)

    def _piece(self, index: int) -> tuple[bytes, int]:
        """Return the bytes of a piece, and its first byte's place in the file."""
        first = max(0, index * self.PIECE_BYTES - 1)  # a line end there makes the piece begin after it
        content = self._data.read(first, 2 * self.PIECE_BYTES + _LONGEST_CHARACTER)
        start = self._begin(content, index * self.PIECE_BYTES - first) if index else 0
        end = self._begin(content, (index + 1) * self.PIECE_BYTES - first)
        return content[start:end], first + start

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
        return f"{Path(self._file).name}:{index}"


class JsonLines(_Texts):
    """A document per line of a JSON lines file; the keys of the first tell in which form. Blank lines are skipped.

    Opening reads the file once, for the place of every line (16 bytes of memory each). A gzip file can only be read
    from its beginning, so it is unpacked into a temporary file first, which is deleted with the source.
    """

    def __init__(self, file: Path, reading: RowFormat) -> None:
        self._file, self.skip_not_utf8 = str(file), reading.skip_not_utf8
        self._data = packed = DataFile(file)
        digest = digest_files(file.parent, [file])
        if file.suffix == ".gz":
            unpacked = _unpack(file)
            weakref.finalize(self, _remove, unpacked, os.getpid())
            self._data = DataFile(unpacked)
        self._line_starts, self._documents = _index_lines(Path(self._data.path))
        packed.check()
        self.form: Form = reading.form(self._first_keys(), self._file)
        self.digest, self.is_whole = digest + self.form.digest, self.form.is_whole
        if self._data.size <= SMALL_CORPUS_BYTES:
            self._read_all()
        elif len(self):
            self[0]  # raises for an invalid line

    def __len__(self) -> int:
        return len(self._documents)

    def _first_keys(self) -> Collection[str]:
        """Return the keys of the first line that can be decoded; those of a text's where there is none."""
        for index in range(len(self)):
            try:
                return self._row(index)[0]
            except NotUtf8:  # refused, or left out, with all others
                continue
        return ["text"]

    def _read(self, index: int) -> Document:
        row, where = self._row(index)
        return self.form.document(row, where)

    def _row(self, index: int) -> tuple[dict[str, Any], str]:
        """Return the object in a line, and the line's place."""
        line = int(self._documents[index])
        start, end = int(self._line_starts[line]), int(self._line_starts[line + 1])
        where = f"{self._file}, line {line + 1}"
        if end - start > _LONGEST_LINE:
            raise UserError(f"{where}: has {end - start:,} bytes, more than the {_LONGEST_LINE:,} of a document here")
        content = self._data.read(start, end - start)
        _decode(content, where)
        try:
            row = parse_json(content, object, where)
        except BadFile as error:
            if index == 0 and content.lstrip()[:1] in (b"[", b"{"):  # perhaps one value over several lines
                raise UserError(f"{error}. {_ONE_PER_LINE}") from error
            raise
        if not isinstance(row, dict):
            raise UserError(f"{where}: not a JSON object. {_ONE_PER_LINE}")
        return row, where

    def identity(self, index: int) -> str:
        return f"{Path(self._file).name.removesuffix('.gz')}:{index}"


class Chain:
    """The documents of several sources, one after another."""

    def __init__(self, sources: list[Source]) -> None:
        self.sources, self.is_whole = sources, sources[0].is_whole
        if any(source.is_whole != self.is_whole for source in sources):
            raise UserError(
                "text, which is packed wherever rows end, and conversations, which are packed whole, can't be one"
                " corpus: name their files one by one in training.sources"
            )
        self._ends = list(itertools.accumulate(len(source) for source in sources))
        self.digest = _hash(source.digest for source in sources)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Document:
        source, index = self._find(index)
        return source[index]

    def identity(self, index: int) -> str | int:
        source, index = self._find(index)
        return source.identity(index)

    def _find(self, index: int) -> tuple[Source, int]:
        which = bisect.bisect_right(self._ends, index)
        return self.sources[which], index - (self._ends[which - 1] if which else 0)


def _index_lines(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the byte at which each line starts, with the file's end, and the numbers of the lines with text."""
    ends, position = [], 0
    with open(file, "rb") as stream:
        while chunk := stream.read(2**24):
            ends.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + position + 1)
            position += len(chunk)
    starts = np.concatenate([np.zeros(1, np.int64), *ends])
    holds_text = np.diff(starts) > len("\r\n")
    if starts[-1] != position:  # the last line has no end
        starts, holds_text = np.append(starts, position), np.append(holds_text, True)
    return starts, np.flatnonzero(holds_text)


def _unpack(file: Path) -> Path:
    handle, name = tempfile.mkstemp(prefix=f"{file.name[:100]}-", suffix=".jsonl")
    try:
        with gzip.open(file) as packed, open(handle, "wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 2**20)
    except (OSError, EOFError, zlib.error) as error:  # a full disk is an OSError, a file cut short an EOFError
        os.unlink(name)
        raise UserError(f"{file}: could not be unpacked into {tempfile.gettempdir()}: {error}") from error
    return Path(name)


def _remove(file: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked worker's copy of the source is deleted first
        file.unlink(missing_ok=True)


def _decode(content: bytes, where: str, first_byte: int = 0) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line_ends = content.count(b"\n", 0, error.start)
        line = f", in line {line_ends + 1}" if first_byte == 0 else ""
        raise NotUtf8(f"{where}: not UTF-8 at byte {first_byte + error.start}{line}: {error.reason}") from error


def _refuse_packed(file: DataFile) -> None:
    begin = file.read(0, 8)
    for kind, magic in _PACKED.items():
        if begin.startswith(magic):
            raise UserError(
                f"{file.path}: is a {kind} file, which is not read as text: unpack it first. (JSON lines are read from"
                " .jsonl.gz and .json.gz)"
            )


def digest_files(root: Path, files: list[Path]) -> str:
    """Return a hash of the names below `root`, sizes and contents of files: all of it, or both ends of large ones."""
    sizes = [file.stat().st_size for file in files]
    whole = sum(sizes) <= SMALL_CORPUS_BYTES
    parts: list[str | bytes] = []
    for file, size in zip(files, sizes, strict=True):
        parts += [os.fsencode(file.relative_to(root)), str(size)]
        with open(file, "rb") as stream:
            if whole:
                parts.append(hashlib.sha256(stream.read()).digest())
            else:
                parts.append(stream.read(_END_BYTES))
                stream.seek(max(0, size - _END_BYTES))
                parts.append(stream.read(_END_BYTES))
    return _hash(parts)


def _hash(parts: Iterable[str | bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        total.update(len(content).to_bytes(8, "little") + content)
    return total.hexdigest()
