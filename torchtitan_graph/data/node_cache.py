"""A folder on the node's disk for what all its processes share: blocks of remote files, unpacked files, indexes.

Note [Entries of the cache]: an entry is a folder, named by a hash of what it holds and of the version of the file that
it was made from; so a file that was rewritten has another entry. A process that uses an entry
holds a shared lock on its file `used`, which the system releases however the process ends; an entry that nobody uses is
deleted, the one used longest ago first, when room is needed. `whole` is in an entry once it was made completely: it is
written under another name, by one process, while others wait for its lock.

The file `used` of the cache itself says how much all entries use. It is at least that, as bytes are counted before they
are written; where they don't seem to fit, entries are looked at one by one.
"""

import contextlib
import fcntl
import hashlib
import math
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.patience import FULL, why_unwritable
from torchtitan_graph.small_files import read_text, sync, write_text
from torchtitan_graph.transient import is_transient

_NAME = re.compile("[0-9a-f]{32}")  # of an entry; nothing else is deleted, whatever is in the folder
_USED = "used"
_DELETED = ".deleted"
_DISK_LEFT = 0.05  # the share of the disk that stays free


class Full(UserError):
    """Error: something does not fit into the cache."""


class Unwritable(UserError):
    """Error: the cache can't be written."""


class Entry:
    """A folder of the cache, which is not deleted while this lives. See Note [Entries of the cache]."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        descriptor = os.open(folder / _USED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, descriptor)  # before anything can fail
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.utime(descriptor)


class NodeCache:
    """The cache of a node: a folder, and how large it may become. An instance can be pickled.

    folder: by default `torchtitan_graph` among the user's caches ($XDG_CACHE_HOME, or ~/.cache).
    limit: bytes of all entries; in any case 5 % of the disk stay free.
    """

    def __init__(self, folder: str | None = None, limit: float = 500e9) -> None:
        self._folder, self._limit = folder, limit

    @property
    def folder(self) -> Path:
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(self._folder or f"{caches}/torchtitan_graph").expanduser()

    def open(self, *key: str, size: int = 0) -> Entry:
        """Return the entry of a key, with a file `data` of `size` bytes if that is not 0; without room raise Full."""
        folder = self.folder / hashlib.sha256("\n".join(key).encode(errors="surrogateescape")).hexdigest()[:32]
        with self.refuse_unwritable():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(self.folder / "lock"):
                file = folder / "data"
                missing = size and not (file.exists() and file.stat().st_size == size)
                if missing:
                    self._make_room(size)
                folder.mkdir(exist_ok=True)
                entry = Entry(folder)
                if missing:
                    (folder / "blocks").unlink(missing_ok=True)  # else it would mark blocks that are gone as there
                    file.touch()
                    os.truncate(file, size)
        return entry

    def make(self, *key: str, build: Callable[[Path], None]) -> tuple[Path, Entry]:
        """Return what `build` writes, a file or a folder; one process of the node calls it, and others wait.

        build: writes to the path that it is given; it calls `grow` before it writes much. After an error or a kill
            another process begins again.
        """
        entry = self.open(*key)
        try:
            return self._make(entry, build), entry
        except OSError as error:  # also of a library that writes for `build`, or of a lock's file
            if error.errno in FULL:
                raise self._unwritable(error) from error
            raise

    def _make(self, entry: Entry, build: Callable[[Path], None]) -> Path:
        whole, part = entry.folder / "whole", entry.folder / "part"
        if not whole.exists():
            with _locked(entry.folder / "making", "another process of this node prepares the data; waiting for it"):
                if not whole.exists():
                    _remove(part)  # of a process that was killed
                    try:
                        build(part)
                        for path in [*part.iterdir(), part] if part.is_dir() else [part]:
                            sync(path)
                        os.rename(part, whole)
                    except BaseException:
                        _remove(part)
                        raise
        return whole

    @contextlib.contextmanager
    def refuse_unwritable(self) -> Iterator[None]:
        """Raise Unwritable, with the option to change, for an OSError in writing; transient ones pass through."""
        try:
            yield
        except OSError as error:
            if is_transient(error):
                raise
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> Unwritable:
        hint = ""
        if error.errno in FULL:
            hint = ": make room on it, or set training.cache_folder to a folder on another disk"
        return Unwritable(
            f"training.cache_folder = {str(self.folder)!r} can't be written: {why_unwritable(self.folder, error)}{hint}"
        )

    def grow(self, size: int) -> None:
        """Make room for `size` more bytes of an entry; raise Full if there is none."""
        with self.refuse_unwritable(), _locked(self.folder / "lock"):
            self._make_room(size)

    def _make_room(self, size: int) -> None:
        """Count `size` more bytes of an entry, and delete entries that are not used until they fit; raise Full, and
        delete none, if they can't."""
        used = self._read_used()
        if used is None or self._room(used) < size:
            used = self._scan_and_free(size)
        write_text(self.folder / _USED, f"{used.reserved + size} {used.written}")

    def _room(self, used: "_Used") -> float:
        return min(self._limit - used.reserved, self._room_on_disk(used))

    def _room_on_disk(self, used: "_Used") -> float:
        disk = os.statvfs(self.folder)
        return disk.f_frsize * (disk.f_bavail - _DISK_LEFT * disk.f_blocks) - (used.reserved - used.written)

    def _refuse_full(self, size: int, used: "_Used", freed: int) -> None:
        """Raise Full if `size` more bytes don't fit, though `freed` of those in use will be deleted."""
        of_limit = size - freed - (self._limit - used.reserved)
        of_disk = size - freed - self._room_on_disk(used)
        why = []
        if of_limit > 0:
            least = f"{math.ceil((self._limit + of_limit) / 1e6) / 1e3:.3f}".rstrip("0").rstrip(".")
            why.append(
                f"training.cache_gb = {self._limit / 1e9:g} is too small: {_in_words(of_limit)} are missing: set it to"
                f" {least} or more"
            )
        if of_disk > 0:
            why.append(
                f"the disk of training.cache_folder, {self.folder}, is full but for {_DISK_LEFT:.0%} of it, which stay"
                f" free: {_in_words(of_disk)} are missing: make room on it, or set training.cache_folder to a folder on"
                " another disk"
            )
        if why:
            raise Full("; and ".join(why))

    def _read_used(self) -> "_Used | None":
        try:
            return _Used(*map(int, read_text(self.folder / _USED, 100).split()))
        except (OSError, UserError, ValueError, TypeError):  # there is none yet
            return None

    def _scan_and_free(self, size: int) -> "_Used":
        """Return what all entries use, after some are deleted, if they must be, so that `size` more bytes fit."""
        for path in self.folder.glob(f"*{_DELETED}"):  # of a process that was killed
            shutil.rmtree(path)
        folders = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and (path / "used").is_file()]
        sizes = {folder: _sizes(folder) for folder in folders}
        used = _Used(*map(sum, zip(*sizes.values(), strict=True))) if sizes else _Used(0, 0)
        unused: list[tuple[float, Path]] = []
        with contextlib.ExitStack() as stack:
            if self._room(used) < size:
                for folder in folders:
                    if (locked := _try_lock(folder / "used")) is not None:
                        stack.callback(os.close, locked)
                        unused.append((os.fstat(locked).st_mtime, folder))
            self._refuse_full(size, used, sum(sizes[folder].reserved for _, folder in unused))
            for _, folder in sorted(unused):
                if self._room(used) >= size:
                    break
                os.rename(folder, doomed := folder.with_suffix(_DELETED))  # at once: no part of an entry is one
                shutil.rmtree(doomed)
                used = _Used(*(a - b for a, b in zip(used, sizes[folder], strict=True)))
        return used


class Arrays:
    """Arrays that one process of a node computes, and all map from the cache, also where an instance is pickled.

    Where the cache can't be written, or has no room, they are computed and not kept.
    """

    def __init__(self, cache: NodeCache | None, *key: str, build: Callable[[], list[np.ndarray]]) -> None:
        """Compute arrays, or find those that were; without a cache they are not kept."""
        self._cache, self._key = cache, key
        self._entry: Entry | None = None
        self.arrays: list[np.ndarray] = []
        if cache is not None:
            try:
                self._keep(cache, build)
            except (Full, Unwritable) as error:
                logger.warning(f"an index is not kept, and made again at each start: {error}")
        self.arrays = self.arrays or build()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_entry": None, "arrays": [] if self._entry else self.arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self.arrays and self._cache is not None:
            self._keep(self._cache, _build_what_is_gone)

    def _keep(self, cache: NodeCache, build: Callable[[], list[np.ndarray]]) -> None:
        def write(part: Path) -> None:
            self.arrays = build()
            cache.grow(sum(array.nbytes for array in self.arrays))
            with cache.refuse_unwritable():
                part.mkdir()
                for number, array in enumerate(self.arrays):
                    np.save(part / f"{number}.npy", array, allow_pickle=False)

        whole, self._entry = cache.make(*self._key, build=write)
        self.arrays = [_map(whole / f"{number}.npy") for number in range(len([*whole.iterdir()]))]


def _build_what_is_gone() -> list[np.ndarray]:
    raise UserError("what was kept of a corpus is gone from training.cache_folder; start again")


def _in_words(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{math.ceil(num_bytes / 1e6)} MB"


class _Used(NamedTuple):
    """Bytes of entries: the most that they may grow to (`reserved`), and the least that are on disk (`written`).

    See Note [Entries of the cache].
    """

    reserved: int
    written: int


def _try_lock(file: Path) -> int | None:
    """Return a descriptor of a file that is locked for this process alone; None if another uses it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextlib.contextmanager
def _locked(file: Path, said: str = "") -> Iterator[None]:
    """Hold a lock of all processes of the node, which ends with the process; `said` is logged if it has to wait."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if said:
                logger.info(said)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sizes(folder: Path) -> _Used:
    reserved = written = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            reserved, written = reserved + found.st_size, written + min(found.st_size, 512 * found.st_blocks)
    return _Used(reserved, written)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _map(file: Path) -> np.ndarray:
    array = np.load(file, mmap_mode="r", allow_pickle=False)
    return array.view(np.ndarray)  # a slice of a memmap costs ten times as much
