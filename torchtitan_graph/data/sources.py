"""Documents by number, from files: text, JSON lines, Parquet, and the running Python's standard library."""

import bisect
import gzip
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from torchtitan_graph.errors import UserError

# Corpora up to this size are read once when they are opened: their digest covers every byte, and corrupt input is
# found before training. Of larger ones the digest covers names, sizes and both ends of each file, and a corrupt
# document is found when its turn comes.
SMALL_CORPUS_BYTES = 64 * 2**20
_END_BYTES = 4096


Document = str | np.ndarray  # its text, or its token ids without those that begin and end it


class Source(Protocol):
    """Documents that can be read in any order.

    `digest` tells whether two sources hold the same documents under the same numbers. `identity` names a document
    by where it is, or is the hash of that (see `corpus.document_key`); the split into train and validation goes by it.
    An instance can be pickled.
    """

    digest: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document: ...

    def identity(self, index: int) -> str | int: ...


class TextFiles:
    """A document per file, UTF-8; files are numbered as given and named relative to `root`."""

    def __init__(self, root: Path, files: list[Path]) -> None:
        self._root = str(root)
        self._names = [str(file.relative_to(root)) for file in files]
        self.digest = digest_files(root, files)
        if sum(file.stat().st_size for file in files) <= SMALL_CORPUS_BYTES:
            for index in range(len(self)):
                self[index]  # raises where a file can't be decoded

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> str:
        return _decode(Path(self._root, self._names[index]).read_bytes(), f"{self._root}/{self._names[index]}")

    def identity(self, index: int) -> str:
        return self._names[index]


class TextPieces:
    """One text file, cut at the first line end after every 8 KiB; each piece is a document.

    One document could not be shared out between training and validation. Nothing is indexed: piece i is found by
    looking for a line end from byte 8192 * i on.
    """

    PIECE_BYTES = 8192

    def __init__(self, file: Path) -> None:
        self._file = file
        self._size = file.stat().st_size
        self.digest = digest_files(file.parent, [file])
        if self._size <= SMALL_CORPUS_BYTES:
            _decode(file.read_bytes(), str(file))

    def __len__(self) -> int:
        return -(-self._size // self.PIECE_BYTES)

    def __getitem__(self, index: int) -> str:
        with open(self._file, "rb") as stream:
            start = self._line_start(stream, index)
            end = self._line_start(stream, index + 1)
            stream.seek(start)
            return _decode(stream.read(end - start), f"{self._file}, bytes {start} to {end}")

    def _line_start(self, stream: BinaryIO, index: int) -> int:
        if index == 0:
            return 0
        stream.seek(min(index * self.PIECE_BYTES, self._size) - 1)
        stream.readline()
        return stream.tell()

    def identity(self, index: int) -> str:
        return f"{self._file.name}:{index}"


class JsonLines:
    """A document per line of a JSON lines file, its text under the key `column`. Blank lines are no documents.

    Opening reads the file once, for the place of every line (16 bytes of memory each). A gzip file can only be read
    from its beginning, so it is unpacked into a temporary file first, which goes when the source does.
    """

    def __init__(self, file: Path, column: str) -> None:
        self._file = self._unpacked = file
        self._column = column
        self.digest = digest_files(file.parent, [file]) + column
        if file.suffix == ".gz":
            self._unpacked = _unpack(file)
            weakref.finalize(self, _remove, self._unpacked, os.getpid())
        self._line_starts, self._documents = _index_lines(self._unpacked)
        small = self._unpacked.stat().st_size <= SMALL_CORPUS_BYTES
        for index in range(len(self) if small else min(1, len(self))):
            self[index]  # raises where a line is not as it should be

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> str:
        line = int(self._documents[index])
        start, end = int(self._line_starts[line]), int(self._line_starts[line + 1])
        with open(self._unpacked, "rb") as stream:
            stream.seek(start)
            content = stream.read(end - start)
        where = f"{self._file}, line {line + 1}"
        try:
            row = json.loads(_decode(content, where))
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: not a JSON object with the key {self._column!r}.")
        if not isinstance(row.get(self._column), str):
            raise UserError(f"{where}: no text under the key {self._column!r}; there is {sorted(row)}.")
        # JSON can spell half a surrogate pair, which no encoding of text can.
        return row[self._column].encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def identity(self, index: int) -> str:
        return f"{self._file.name.removesuffix('.gz')}:{index}"


class Chain:
    """The documents of several sources, one after another."""

    def __init__(self, sources: list[Source]) -> None:
        self._sources = sources
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
        return self._sources[which], index - (self._ends[which - 1] if which else 0)


def _index_lines(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the byte at which each line starts, with the file's end, and the numbers of the lines that hold text."""
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
    handle, name = tempfile.mkstemp(suffix=".jsonl")
    try:
        with gzip.open(file) as packed, open(handle, "wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 2**20)
    except (OSError, EOFError) as error:  # a file cut short is an EOFError, a full disk an OSError
        os.unlink(name)
        raise UserError(f"{file}: could not be unpacked into {tempfile.gettempdir()}: {error}") from error
    return Path(name)


def _remove(file: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked worker's copy of the source goes first
        file.unlink(missing_ok=True)


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{where}: not UTF-8 at byte {error.start}, in line {line}: {error.reason}.") from error


def digest_files(root: Path, files: list[Path]) -> str:
    """Return a hash of the names below `root`, sizes and contents of files: all of it, or both ends of large ones."""
    sizes = [file.stat().st_size for file in files]
    whole = sum(sizes) <= SMALL_CORPUS_BYTES
    parts: list[str | bytes] = []
    for file, size in zip(files, sizes, strict=True):
        parts += [str(file.relative_to(root)), str(size)]
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
