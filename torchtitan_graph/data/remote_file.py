"""A file at an address, read by ranges, whose blocks are kept in the node's cache.

Note [Blocks of a file]: an entry of the cache has a file `data` as large as the remote one, at first without content,
and `blocks`, a byte for each block, 1 once the block is written. A block is read by the first process of the node that
needs it, while the others wait for its lock, a lock on that byte of `blocks`. It is flushed to the disk before its byte
is set, and its version is looked at after it was read; so a kill at any moment leaves whole blocks, from which the next
start goes on.
"""

import contextlib
import errno
import fcntl
import importlib
import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import BoundedSemaphore, Lock, Thread
from typing import Any, TypeVar

from fsspec.core import url_to_fs

from torchtitan_graph.data.addresses import Found, find_change, refuse_unlisted
from torchtitan_graph.data.files import CHUNK, DataFile, Progress, count_read, open_data, part_of
from torchtitan_graph.data.node_cache import Entry, Full, NodeCache
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.patience import refuse_unreadable, retry_io
from torchtitan_graph.transient import is_transient

T = TypeVar("T")
AT_ONCE, _SMALL_AT_ONCE = 8, 32  # requests for blocks, and for small files
_MOST_COMING = 2048  # parts that are read ahead and not taken yet; each of 256 lanes has eight
_LOOK_S = 0.02  # between two looks at whether another process has read a block
_CHECK_S = 30.0  # between two looks at whether a file that is not kept has changed


class RemoteFile(DataFile):
    """A file at an address. What doesn't fit into the cache is read from its address each time.

    Methods raise UserError if it is gone, unreadable, or has changed since it was listed.
    """

    is_remote = True

    def __init__(self, found: Found, cache: NodeCache) -> None:
        self.path, self.name, self.size, _ = self._found = found
        self._cache = cache
        self._entry: Entry | None = None
        self._blocks: _Blocks | None = None
        self._opened: tuple[int, Any, str] = (0, None, "")
        # What is read in the background: blocks by number, and parts of a file that is not kept.
        self._coming: dict[int | tuple[int, int], Future[Any]] = {}
        self._ahead = 0, b""  # what came last of a file that is not kept, from which byte on
        self._knows_ranges: bool | None = None
        self._file_system()
        self._check_at = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_entry": None,
            "_blocks": None,
            "_opened": (0, None, ""),
            "_coming": {},
            "_ahead": (0, b""),
        }

    @property
    def key(self) -> str:
        return f"{self.path} {self.size} {self._found.version}"

    def read(self) -> bytes:
        return self.read_part(0, self.size)

    def read_part(self, start: int, count: int) -> bytes:
        count = min(count, self.size - start)
        if count <= 0:
            return b""
        if (blocks := self._open()) is None:
            content = self._read_unkept(start, count)
            if time.monotonic() >= self._check_at:
                self.check()
                self._check_at = time.monotonic() + _CHECK_S
        else:
            for number in range(start // CHUNK, (start + count - 1) // CHUNK + 1):
                if not blocks.there[number]:
                    self._file_system()
                    if (coming := self._coming.pop(number, None)) is not None:
                        coming.result()
                    self._fill(blocks, number)
            with refuse_unreadable(str(blocks.data)):
                content = part_of(blocks.descriptor, start, count)
        count_read(len(content))
        return content

    def _read_unkept(self, start: int, count: int) -> bytes:
        """Return a part of a file that is not kept: where parts follow each other, more each time, up to a block."""
        self._file_system()
        if (coming := self._coming.pop((start, count), None)) is not None:
            return coming.result()  # type: ignore[no-any-return]
        first, content = self._ahead
        if not first <= start < start + count <= first + len(content):
            follows = first < start <= first + len(content)
            more = min(CHUNK, 2 * len(content)) if follows else 0
            first, content = start, self.fetch(start, min(start + max(count, more), self.size))
        self._ahead = (first, content) if count < CHUNK and start + count < self.size else (0, b"")
        return content[start - first :][:count]

    def prepare(self, start: int, count: int) -> None:
        count = min(count, self.size - start)
        if count <= 0:
            return
        if (blocks := self._open()) is None:
            self._begin((start, count), partial(self.fetch, start, start + count))
            return
        for number in range(start // CHUNK, (start + count - 1) // CHUNK + 1):
            if not blocks.there[number] and not self._begin(number, partial(self._fill, blocks, number)):
                return

    def _begin(self, key: int | tuple[int, int], call: Callable[[], Any]) -> bool:
        """Read something in the background; return whether it is, or others take all the room."""
        self._file_system()
        if key not in self._coming:
            if not _free.acquire(blocking=False):
                return False
            self._coming[key] = _in_background(call, _free.release)
            if len(self._coming) > _MOST_COMING:  # the oldest is of an iteration that has ended
                del self._coming[next(iter(self._coming))]
        return True

    def chunks(self) -> Iterator[bytes]:
        self._open()  # not by each thread
        yield from ahead([partial(self.read_part, start, CHUNK) for start in range(0, self.size, CHUNK)], AT_ONCE)

    def local(self) -> Path:
        if not self.size:
            return self._cache.make("empty", build=Path.touch)[0]
        if (blocks := self._open()) is None:
            self._cache.open("blocks", self.key, size=self.size)  # raises, and says why
            raise AssertionError("it fits now, and did not before")
        if not all(blocks.there):
            progress = Progress(f"reading {self.path}", self.size)
            for chunk in self.chunks():
                progress.add(len(chunk))
        return blocks.data

    def check(self) -> None:
        with refuse_unlisted(self.path):
            try:
                change = retry_io(lambda: find_change(*self._file_system()[1:], self._found), what=self.path)
            except FileNotFoundError as error:
                if is_transient(error):  # the whole bucket is gone
                    raise
                what = "was deleted while the run reads it; put it back, and start again"
                raise UserError(f"{self.path}: {what}") from error
        if change:
            raise self._changed(change)

    def check_at_times(self) -> None:
        pass  # what is kept stays what it was when it was read

    def _open(self) -> "_Blocks | None":
        """Return what is kept of the file; None if it is empty, or too large for that."""
        if self._blocks is None and self.is_kept and self.size:  # an empty file has no block
            try:
                self._entry = self._cache.open("blocks", self.key, size=self.size)
            except Full as error:
                logger.warning(f"{self.path}: is read from there again each time, which is slow. {error}")
                self.is_kept = False
                return None
            self._blocks = _Blocks(self._entry.folder, -(-self.size // CHUNK))
        return self._blocks

    def _file_system(self) -> tuple[int, Any, str]:
        """Return this process, its file system and the file's path there, the same for all threads: fsspec would make
        one for each, with connections of its own."""
        if self._opened[0] != os.getpid():
            self._opened, self._coming = (os.getpid(), *url_to_fs(self.path)), {}
        return self._opened

    def _fill(self, blocks: "_Blocks", number: int) -> None:
        """Read a block into the cache if it isn't there. See Note [Blocks of a file]."""
        if not blocks.there[number] and not self.finds_ranges():
            self._fill_all(blocks)
        if blocks.there[number]:
            return
        with blocks.locked(number):
            if not blocks.is_there(number):
                start = number * CHUNK
                content = self.fetch(start, min(start + CHUNK, self.size))
                self.check()
                with self._cache.refuse_unwritable():
                    blocks.write(number, content)
        blocks.there[number] = 1

    def _fill_all(self, blocks: "_Blocks") -> None:
        """Read the file from its beginning to its end, once on a node, into the cache."""
        with _streaming, blocks.locked(len(blocks.there)):
            if not blocks.are_there():
                with refuse_unlisted(self.path):
                    retry_io(partial(self._try_to_fill_all, blocks))
            blocks.there[:] = b"\1" * len(blocks.there)

    def _try_to_fill_all(self, blocks: "_Blocks") -> None:
        place = 0
        for content in self.stream():
            with self._cache.refuse_unwritable():
                _write_at(blocks.descriptor, content, place)
            place += len(content)
        self.check()
        if place != self.size:
            raise OSError(errno.EIO, f"{place:,} of {self.size:,} bytes came", self.path)
        with self._cache.refuse_unwritable():
            blocks.mark_all()

    def stream(self) -> Iterator[bytes]:
        """Yield the file from its beginning as a web server gives it, by one request; nothing is kept."""
        _, fs, path = self._file_system()
        timeout = importlib.import_module("aiohttp").ClientTimeout(total=None, sock_read=_CHECK_S)
        options = {**fs.storage_options, "client_kwargs": {**fs.client_kwargs, "timeout": timeout}}
        left = self.size + 1  # one more shows that there is more
        with type(fs)(**options).open(path, block_size=0) as stream:
            while left > 0 and (content := stream.read(min(CHUNK, left))):
                yield content
                left -= len(content)

    def finds_ranges(self) -> bool:
        """Return whether its server answers a request for a part with that part; web servers need not."""
        if self._knows_ranges is None:
            _, fs, path = self._file_system()
            self._knows_ranges = "http" not in fs.protocol or self.size <= CHUNK
            if not self._knows_ranges:
                with refuse_unlisted(self.path):
                    self._knows_ranges = retry_io(partial(_gives_second_byte, fs, path))
        return self._knows_ranges

    def fetch(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` to before `end` as they are at the address; nothing is kept."""
        if start == end:
            return b""
        with refuse_unlisted(self.path):
            return retry_io(partial(self._try_to_fetch, start, end), what=self.path)

    def fetch_unchanged(self) -> bytes:
        """Return the whole file, which is then still the one that was listed."""
        content = self.fetch(0, self.size)
        self.check()
        return content

    def _try_to_fetch(self, start: int, end: int) -> bytes:
        try:
            _, fs, path = self._file_system()
            # The hub's file system would read 5 MiB more each time.
            options = {"cache_type": "none"} if "hf" in fs.protocol else {}
            content = fs.cat_file(path, start=start, end=end, **options)
        except Exception as error:  # the hub's own error for a file that is gone is no FileNotFoundError
            if isinstance(error, FileNotFoundError) or not is_transient(error):
                self.check()  # raises, if it is gone or another
            raise
        if len(content) == self.size > end - start:
            raise UserError(
                f"{self.path}: its server answers a request for a part with the whole file: copy it to this node, or"
                " to a server that knows ranges"
            )
        if len(content) != end - start:
            self.check()
            raise OSError(errno.EIO, f"{len(content):,} of {end - start:,} bytes came", self.path)
        return content


class EndsFile(RemoteFile):
    """A file at an address of which both ends are kept, and what is between is read from there each time.

    Args:
        size: bytes that are kept at each end.
        find_more: returns how many are kept at the end if they are more, from its last `size` ones.
    """

    def __init__(self, file: RemoteFile, size: int, find_more: Callable[[bytes], int]) -> None:
        super().__init__(file._found, file._cache)

        def build(path: Path) -> None:
            first, last = self.fetch(0, min(size, self.size)), self.fetch(max(0, self.size - size), self.size)
            if (more := find_more(last)) > size:
                last = self.fetch(max(0, self.size - more), self.size)
            self.check()
            self._cache.grow(len(first + last))
            with self._cache.refuse_unwritable():
                path.write_bytes(first + last)

        path, self._entry = self._cache.make("ends", self.key, build=build)
        content = path.read_bytes()
        self._beginning, self._end = content[:size], content[size:]

    def read_part(self, start: int, count: int) -> bytes:
        end, begin_end = min(start + count, self.size), self.size - len(self._end)
        if end <= len(self._beginning):
            content = self._beginning[start:end]
        elif start >= begin_end:
            content = self._end[start - begin_end : end - begin_end]
        else:
            content = self.fetch(start, end)
        count_read(len(content))
        return content


def _gives_second_byte(fs: Any, path: str) -> bool:
    """Return whether a web server answers a request for it alone; what else it answers is not read."""
    with fs.open(path, block_size=1, cache_type="none") as file:
        file.seek(1)
        try:
            return len(file.read(1)) == 1
        except ValueError:  # of fsspec, for an answer that is not a part
            return False


class _Part(DataFile):
    """A file at an address that is a part of a file in the node's cache."""

    def __init__(self, file: DataFile, packed: DataFile, start: int) -> None:
        self.path, self.name, self.size, self._packed, self._start = file.path, file.name, file.size, packed, start

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    @property
    def key(self) -> str:
        return f"{self._packed.key} {self._start}"

    def read(self) -> bytes:
        return self.read_part(0, self.size)

    def read_part(self, start: int, count: int) -> bytes:
        return self._packed.read_part(self._start + start, min(count, self.size - start))

    def check(self) -> None:
        self._packed.check()


class _Packed(DataFile):
    """The contents of many small files at addresses, one after another, in the node's cache."""

    def __init__(self, files: Sequence[RemoteFile], cache: NodeCache) -> None:
        self._files, self._cache = files, cache
        super().__init__(self._make())

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_entry": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make()

    def _make(self) -> Path:
        self._entry: Entry | None
        path, self._entry = self._cache.make("packed", *(file.key for file in self._files), build=self._build)
        return path

    def _build(self, path: Path) -> None:
        progress = Progress(f"reading {len(self._files):,} files", total := sum(file.size for file in self._files))
        self._cache.grow(total)
        with path.open("wb") as whole:
            for content in ahead([file.fetch_unchanged for file in self._files], _SMALL_AT_ONCE):
                with self._cache.refuse_unwritable():
                    whole.write(content)
                progress.add(len(content))


def packed_together(files: Sequence[DataFile], cache: NodeCache) -> list[DataFile]:
    """Return files that are read as whole ones, as parts of one file in the cache, if they are at addresses and fit."""
    remote = [file for file in files if isinstance(file, RemoteFile)]
    if not remote or len(remote) < len(files):
        return [*files]
    try:
        packed = _Packed(remote, cache)
    except Full as error:
        logger.warning(f"{len(files):,} files are read again from their addresses each time, which is slow. {error}")
        return [*files]
    starts = itertools.accumulate((file.size for file in files), initial=0)
    return [_Part(file, packed, start) for file, start in zip(files, starts, strict=False)]


def unkept_chunks(file: DataFile) -> Iterator[bytes]:
    """Yield a file from its beginning, as its disk or its address gives it: not from what this node has kept of it."""
    if isinstance(file, RemoteFile) and not file.finds_ranges():
        yield from file.stream()
        return
    if isinstance(file, RemoteFile):
        ends = ((start, min(start + CHUNK, file.size)) for start in range(0, file.size, CHUNK))
        yield from ahead((partial(file.fetch, *part) for part in ends), AT_ONCE)
        return
    with open_data(Path(file.path)) as stream:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while chunk := stream.read(CHUNK):
            yield chunk


_free = BoundedSemaphore(AT_ONCE)
_streaming = Lock()  # of this process's threads, while one reads a file from its beginning to its end


def _renew_free() -> None:  # in a forked process, whose parent's threads are not there
    global _free, _streaming
    _free, _streaming = BoundedSemaphore(AT_ONCE), Lock()


os.register_at_fork(after_in_child=_renew_free)


def _in_background(call: Callable[[], Any], finish: Callable[[], None]) -> "Future[Any]":
    """Call a function in a thread that the process does not wait for when it ends, and then `finish`."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        finally:
            finish()

    Thread(target=work, daemon=True).start()
    return future


def ahead(calls: Iterable[Callable[[], bytes]], number: int) -> Iterator[bytes]:
    """Yield the results of calls in their order, up to `number` of them at work at a time."""
    with ThreadPoolExecutor(number) as pool:
        yield from in_order(map(pool.submit, calls), number)


def in_order(futures: Iterator["Future[T]"], number: int) -> Iterator[T]:
    """Yield the results of futures in their order, with up to `number` of them begun."""
    begun: deque[Future[T]] = deque()
    for future in futures:
        begun.append(future)
        if len(begun) == number:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()


def _write_at(descriptor: int, content: bytes, place: int) -> None:
    """Write all bytes at a place: one call may write a part of them, where a disk becomes full."""
    while content:
        written = os.pwrite(descriptor, content, place)
        content, place = content[written:], place + written


class _Blocks:
    """The blocks of a file that are in an entry of the cache. See Note [Blocks of a file]."""

    def __init__(self, folder: Path, number: int) -> None:
        self.data = folder / "data"
        self.descriptor = os.open(self.data, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        self._marks = os.open(folder / "blocks", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._marks)
        self.there = bytearray(os.pread(self._marks, number, 0).ljust(number, b"\0"))

    @contextlib.contextmanager
    def locked(self, number: int) -> Iterator[None]:
        """Hold the lock of a block, which ends with the process."""
        while True:
            try:
                # Not a call that waits: where threads of two processes wait for each other's blocks, the system takes
                # that for a deadlock of the processes, though other threads of theirs hold them.
                fcntl.lockf(self._marks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
                break
            except (BlockingIOError, PermissionError):
                time.sleep(_LOOK_S)
        try:
            yield
        finally:
            fcntl.lockf(self._marks, fcntl.LOCK_UN, 1, number)

    def is_there(self, number: int) -> bool:
        return os.pread(self._marks, 1, number) == b"\1"

    def are_there(self) -> bool:
        return os.pread(self._marks, len(self.there), 0) == b"\1" * len(self.there)

    def mark_all(self) -> None:
        os.fsync(self.descriptor)
        os.pwrite(self._marks, b"\1" * len(self.there), 0)

    def write(self, number: int, content: bytes) -> None:
        _write_at(self.descriptor, content, number * CHUNK)
        os.fsync(self.descriptor)
        os.pwrite(self._marks, b"\1", number)
