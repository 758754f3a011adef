"""Files of a corpus: of any size, regular, and unchanged since the run opened them."""

import gzip
import os
import shutil
import stat
import tempfile
import weakref
import zlib
from pathlib import Path
from typing import BinaryIO

from torchtitan_graph.data.bad_rows import BadRow
from torchtitan_graph.errors import UserError
from torchtitan_graph.patience import refuse_unreadable
from torchtitan_graph.small_files import ANY_SIZE, open_small

_UTF8_HINT = "Convert text of another encoding to UTF-8"


def open_data(path: Path) -> BinaryIO:
    """Open a regular file of any size; raises as `open_small`."""
    return open_small(path, ANY_SIZE)


class DataFile:
    """A regular file that a run reads in parts; changes are detected by size and modification time.

    Raises UserError if it is something else, such as a FIFO; OSError as `os.stat`.
    """

    __slots__ = ("path", "size", "_changed_at")

    def __init__(self, path: Path) -> None:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            open_data(path).close()  # raises, with the kind of file
        self.path, self.size, self._changed_at = str(path), found.st_size, found.st_mtime_ns

    def read(self, start: int = 0, count: int = -1) -> bytes:
        """Return `count` bytes from `start` on, or all; raise UserError if it is gone, unreadable, or has changed."""
        with refuse_unreadable(self.path):
            self.check()
            with open_data(Path(self.path)) as stream:
                stream.seek(start)
                content = stream.read(count)
            self.check()  # again: it may have been written meanwhile
        return content

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


def without_gz(name: str) -> str:
    """Return the name of a file without `.gz` at its end, in capital letters or small."""
    return name[:-3] if name.lower().endswith(".gz") else name


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


def decode(content: bytes, where: str, first_byte: int = 0) -> str:
    """Return UTF-8 as text; raise BadRow with the first byte that is not."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line_ends = content.count(b"\n", 0, error.start)
        line = f", in line {line_ends + 1}" if first_byte == 0 else ""
        what = f"not UTF-8 at byte {first_byte + error.start}{line}: {error.reason}"
        raise BadRow("not_utf8", f"{where}: {what}. {_UTF8_HINT}") from error
