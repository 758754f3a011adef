"""Files of a corpus: of any size, regular, and unchanged since the run opened them."""

import codecs
import functools
import io
import json
import os
import resource
import stat
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan_graph.data.bad_rows import BadRow
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.patience import refuse_unreadable, retry_io
from torchtitan_graph.small_files import ANY_SIZE, open_small

CHECK_S = 1.0  # between two looks at whether a file has changed
CHUNK = 2**23  # bytes
_SAID_EVERY_S = 10.0
_MOST_OPEN = 4096
_BEGINNING = 2**20  # bytes in which the first lines are looked for
_PACKED = {"gzip": b"\x1f\x8b\x08", "zstd": b"\x28\xb5\x2f\xfd", "xz": b"\xfd7zXZ\0", "zip": b"PK\3\4"}
_UTF8_HINT = "Convert text of another encoding to UTF-8"


def open_data(path: Path) -> BinaryIO:
    """Open a regular file of any size; raises as `open_small`."""
    return open_small(path, ANY_SIZE)


class Reading:
    """What this process has read of corpora so far: documents, and bytes of their files."""

    documents = 0
    bytes_read = 0


def count_read(num_bytes: int) -> None:
    """Count bytes of a corpus that were read."""
    Reading.bytes_read += num_bytes


class Progress:
    """Logs how far the reading of a large file has come, every ten seconds."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._began = self._said = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count bytes that were read."""
        self._done += num_bytes
        if (now := time.monotonic()) - self._said > _SAID_EVERY_S:
            self._said = now
            speed = self._done / (now - self._began)
            logger.info(f"{self._what}: {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {speed / 1e6:.0f} MB/s")


def chunks_as_file(file: "DataFile", progress: Progress) -> io.BufferedReader:
    """Return a file's content as a stream that reads it once, from its beginning."""
    return io.BufferedReader(_Stream(file.chunks(), progress), CHUNK)


class _Stream(io.RawIOBase):
    """Pieces of bytes as a file."""

    def __init__(self, chunks: Iterator[bytes], progress: Progress) -> None:
        self._chunks, self._rest, self._progress = chunks, b"", progress

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = next(self._chunks, b"")
            self._progress.add(len(self._rest))
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


@functools.cache
def _most_open() -> int:
    """Return how many files of corpora stay open: a quarter of those that a process may have, at least some."""
    return min(_MOST_OPEN, max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


class DataFile:
    """A regular file that a run reads in parts; changes are detected by size and modification time.

    It stays open once a part was read, as do up to _MOST_OPEN such files of a process, and is looked at for changes
    once a second: a part costs one system call.

    name    below the folder that is read, or of the file alone
    key     names the file and its version, for what is kept of it
    is_kept whether it is on this node, or what is read of it then is

    Raises UserError if it is something else, such as a FIFO; OSError as `os.stat`.
    """

    is_remote = False
    is_kept = True
    _num_open = 0

    def __init__(self, path: Path, name: str | None = None) -> None:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            open_data(path).close()  # raises, with the kind of file
        self.path, self.name = str(path), name or path.name
        self.size, self._changed_at = found.st_size, found.st_mtime_ns
        self._version = f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"  # a copy may keep the second
        self._descriptor: int | None = None
        self._check_at = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptor": None}

    @property
    def base(self) -> str:
        """The last part of its name."""
        return self.name.rpartition("/")[2]

    @property
    def key(self) -> str:
        return f"{os.path.realpath(self.path)} {self._version}"

    def read(self) -> bytes:
        """Return all bytes, after transient errors too; raise UserError if it is gone, unreadable, or has changed."""
        content = retry_io(self._try_to_read)
        count_read(len(content))
        return content

    def _try_to_read(self) -> bytes:
        with refuse_unreadable(self.path):
            try:
                return self._read_once(0, self.size)
            except FileNotFoundError:
                self.check()
                raise

    def read_part(self, start: int, count: int) -> bytes:
        """Return up to `count` bytes from `start` on; raises as `read`."""
        count = min(count, self.size - start)
        if count <= 0:
            return b""
        content = retry_io(functools.partial(self._try_to_read_part, start, count))
        count_read(len(content))
        return content

    def _try_to_read_part(self, start: int, count: int) -> bytes:
        with refuse_unreadable(self.path):
            if self._descriptor is None:
                self.check()
                self._keep_open()
            if self._descriptor is None:
                return self._read_once(start, count)
            try:
                content = part_of(self._descriptor, start, count)
                if len(content) < count or time.monotonic() >= self._check_at:
                    self._refuse_changed(os.fstat(self._descriptor))
                    self._check_at = time.monotonic() + CHECK_S
            except OSError:  # perhaps of a server that has forgotten it: the next try opens it again
                self._descriptor = None
                raise
        return content

    def prepare(self, start: int, count: int) -> None:
        """Begin to read a part, if that takes long; `read_part` then waits for it."""

    def chunks(self) -> Iterator[bytes]:
        """Yield the file from its beginning, piece by piece; raises as `read`."""
        for start in range(0, self.size, CHUNK):
            yield self.read_part(start, CHUNK)

    def local(self) -> Path:
        """Return the path of the whole file on this node."""
        return Path(self.path)

    def _read_once(self, start: int, count: int) -> bytes:
        # Without O_NONBLOCK, opening a FIFO that has taken its place would wait.
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            content = part_of(descriptor, start, count)
            self._refuse_changed(os.fstat(descriptor))  # afterwards: it may be written meanwhile
        except OSError:
            self._refuse_changed(os.fstat(descriptor))  # a FIFO in its place has no parts
            raise
        finally:
            os.close(descriptor)
        return content

    def _keep_open(self) -> None:
        if DataFile._num_open < _most_open():
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
            raise self._changed(f"had {self.size:,} bytes when it was opened, and has {found.st_size:,} now")
        if found.st_mtime_ns != self._changed_at:
            raise self._changed("was written since it was opened")

    def check_at_times(self) -> None:
        """Raise as `check`, looking once a second: for parts that are mapped."""
        if time.monotonic() >= self._check_at:
            self.check()
            self._check_at = time.monotonic() + CHECK_S

    def _refuse_changed(self, found: os.stat_result) -> None:
        """Raise as `check` if an open file is not what it was."""
        if not found.st_nlink or (found.st_size, found.st_mtime_ns) != (self.size, self._changed_at):
            self.check()

    def _changed(self, what: str) -> UserError:
        return UserError(f"{self.path}: {what}. A corpus must not change during a run: put it back, or begin a new run")


def part_of(descriptor: int, start: int, count: int) -> bytes:
    """Return bytes of an open file, fewer only where it ends: one call of the system gives 2 GiB at most."""
    content = os.pread(descriptor, count, start)
    while len(content) < count and (more := os.pread(descriptor, count - len(content), start + len(content))):
        content += more
    return content


def _close(descriptor: int) -> None:
    os.close(descriptor)
    DataFile._num_open -= 1


def refuse_packed(file: DataFile, suffixes: tuple[str, ...]) -> None:
    """Raise UserError if a file is a packed one by its first bytes.

    suffixes: of files that are read as this one is, and are packed.
    """
    begin = file.read_part(0, 8)
    for kind, magic in _PACKED.items():
        if begin.startswith(magic):
            name = file.base
            way = f"unpack it first. (JSON lines and tables are read from {', '.join(suffixes)})"
            suffix = {"gzip": ".gz", "zstd": ".zst"}.get(kind, "")
            if suffix and f"{Path(name).suffix.lower()}{suffix}" in suffixes:
                way = f"rename it to {name}{suffix}"
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
