"""Files of a corpus: of any size, regular, and unchanged since the run opened them."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from torchtitan_graph.errors import UserError
from torchtitan_graph.patience import refuse_unreadable
from torchtitan_graph.small_files import ANY_SIZE, open_small


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
