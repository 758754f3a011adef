"""Files of a corpus: of any size, regular, and unchanged since the run opened them."""

import codecs
import gzip
import json
import os
import shutil
import stat
import tempfile
import weakref
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan_graph.data.bad_rows import BadRow
from torchtitan_graph.errors import UserError
from torchtitan_graph.patience import refuse_unreadable
from torchtitan_graph.small_files import ANY_SIZE, open_small

_MOST_OPEN = 64
_BEGINNING = 2**20  # bytes in which the first lines are looked for
_PACKED = {"gzip": b"\x1f\x8b\x08", "zstd": b"\x28\xb5\x2f\xfd", "xz": b"\xfd7zXZ\0", "zip": b"PK\3\4"}
_UTF8_HINT = "Convert text of another encoding to UTF-8"


def open_data(path: Path) -> BinaryIO:
    """Open a regular file of any size; raises as `open_small`."""
    return open_small(path, ANY_SIZE)


class DataFile:
    """A regular file that a run reads in parts; changes are detected by size and modification time.

    It stays open once a part was read, as do up to _MOST_OPEN such files of a process: opening it for each document
    would ask a file server each time.

    Raises UserError if it is something else, such as a FIFO; OSError as `os.stat`.
    """

    __slots__ = ("__weakref__", "_changed_at", "_descriptor", "path", "size")
    _num_open = 0

    def __init__(self, path: Path) -> None:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            open_data(path).close()  # raises, with the kind of file
        self.path, self.size, self._changed_at = str(path), found.st_size, found.st_mtime_ns
        self._descriptor: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.path, self.size, self._changed_at)

    def read(self) -> bytes:
        """Return all bytes; raise UserError if it is gone, unreadable, or has changed."""
        with refuse_unreadable(self.path):
            self.check()
            with open_data(Path(self.path)) as stream:
                content = stream.read()
            self.check()  # again: it may have been written meanwhile
        return content

    def read_part(self, start: int, count: int) -> bytes:
        """Return up to `count` bytes from `start` on; raises as `read`."""
        with refuse_unreadable(self.path):
            if self._descriptor is None:
                self.check()
                self._keep_open()
            if self._descriptor is None:
                with open_data(Path(self.path)) as stream:
                    content = _part(stream.fileno(), start, count)
                self.check()
                return content
            try:
                content, found = _part(self._descriptor, start, count), os.fstat(self._descriptor)
            except OSError:  # perhaps of a server that has forgotten it: the next try opens it again
                self._descriptor = None
                raise
            if not found.st_nlink or (found.st_size, found.st_mtime_ns) != (self.size, self._changed_at):
                self.check()
        return content

    def _keep_open(self) -> None:
        if DataFile._num_open < _MOST_OPEN:
            with open_data(Path(self.path)) as stream:
                self._descriptor = os.dup(stream.fileno())
            DataFile._num_open += 1
            weakref.finalize(self, _close, self._descriptor)

    def check(self) -> None:
        """Raise UserError if the file is gone, or has changed since it was opened."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError as error:
            raise UserError(f"{self.path}: was deleted while the run reads it; put it back, and start again") from error
        if found.st_size != self.size:
            what = f"had {self.size:,} bytes when it was opened, and has {found.st_size:,} now"
        elif found.st_mtime_ns != self._changed_at:
            what = "was written since it was opened"
        else:
            return
        raise UserError(f"{self.path}: {what}. A corpus must not change during a run: put it back, or begin a new run")


def _reopened(path: str, size: int, changed_at: int) -> DataFile:
    """Return a file as it was when another process opened it."""
    file = DataFile.__new__(DataFile)
    file.path, file.size, file._changed_at, file._descriptor = path, size, changed_at, None
    return file


def _part(descriptor: int, start: int, count: int) -> bytes:
    content = os.pread(descriptor, count, start)
    while len(content) < count and (more := os.pread(descriptor, count - len(content), start + len(content))):
        content += more  # the system may return less than there is
    return content


def _close(descriptor: int) -> None:
    os.close(descriptor)
    DataFile._num_open -= 1


def without_gz(name: str) -> str:
    """Return the name of a file without `.gz` at its end, in capital letters or small."""
    return name[:-3] if name.lower().endswith(".gz") else name


def refuse_packed(file: DataFile, suffixes: tuple[str, ...]) -> None:
    """Raise UserError if a file is a packed one by its first bytes.

    suffixes: of files that are read as this one is, and are packed by gzip.
    """
    begin = file.read_part(0, 8)
    for kind, magic in _PACKED.items():
        if begin.startswith(magic):
            name = Path(file.path).name
            way = f"unpack it first. (JSON lines and tables are read from {', '.join(suffixes)})"
            if kind == "gzip" and f"{Path(name).suffix.lower()}.gz" in suffixes:
                way = f"rename it to {name}.gz"
            raise UserError(f"{file.path}: is a {kind} file, which its name does not say: {way}")


def first_lines(file: DataFile) -> list[bytes]:
    """Return the first lines of a file that are not blank, up to three, each whole and not of many bytes."""
    begin = file.read_part(0, _BEGINNING).removeprefix(codecs.BOM_UTF8)
    lines = begin.splitlines()
    if file.size > _BEGINNING:
        lines = lines[:-1]
    return [line for line in lines if line.strip()][:3]


def are_json_objects(lines: list[bytes]) -> bool:
    """Return whether each line is a JSON object, and there are some."""
    return bool(lines) and all(line.lstrip().startswith(b"{") and isinstance(_parsed(line), dict) for line in lines)


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def unpacked(file: Path, owner: object) -> DataFile:
    """Return a gzip file's content as a temporary file, which is deleted with its owner."""
    path = _unpack(file)
    weakref.finalize(owner, _remove, path, os.getpid())
    return DataFile(path)


def _unpack(file: Path) -> Path:
    handle, name = tempfile.mkstemp(prefix=f"{file.name[:100]}-")
    try:
        with gzip.open(file) as packed, open(handle, "wb") as whole:
            shutil.copyfileobj(packed, whole, 2**20)
    except (OSError, EOFError, zlib.error) as error:  # a full disk is an OSError, a file cut short an EOFError
        os.unlink(name)
        raise UserError(f"{file}: could not be unpacked into {tempfile.gettempdir()}: {error}") from error
    return Path(name)


def _remove(file: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked worker's copy of the source is deleted first
        file.unlink(missing_ok=True)


def decode(content: bytes, where: str, first_byte: int | None = None) -> str:
    """Return UTF-8 as text; raise BadRow with the first byte of the file that is not.

    first_byte: the place of the content in its file; of a whole file None, and the line is named too.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line_ends = content.count(b"\n", 0, error.start)
        place = f", in line {line_ends + 1}" if first_byte is None else " of the file"
        what = f"not UTF-8 at byte {(first_byte or 0) + error.start}{place}: {error.reason}"
        raise BadRow("not_utf8", f"{where}: {what}. {_UTF8_HINT}") from error
