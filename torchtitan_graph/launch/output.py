"""The output of a child, copied in threads to a file and to stderr, so that neither can make the child wait."""

import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from torchtitan_graph.log import logger

MOST_LINES = 1000  # that wait for a file or a terminal
MOST_BYTES = 2**16  # of a line; a longer one is several
PATIENCE_S = 1.0  # with a file or a terminal that takes nothing
END_S = 5.0  # for what still waits, once the child has ended


class Output:
    """Copies what a child prints, line by line, to the end of a file if there is one, and to stderr if it is `shown`.

    A full pipe would stop the child. So lines that a full disk, a file server or a terminal does not take within a
    second are left out, which is logged once.
    """

    def __init__(self, child: str, pipe: IO[bytes], path: Path | None, shown: bool) -> None:
        self._pipe = pipe
        self._copies = [_Copy(f"{path}: the output of {child}", lambda: path.open("ab", 0))] if path is not None else []
        if shown:
            self._copies.append(_Copy(f"stderr: the output of {child}", lambda: sys.stderr.buffer))
        self._thread = threading.Thread(target=self._read, name="output", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for what the child, which has ended, has printed; not long, for what it started may have the pipe."""
        self._thread.join(END_S)
        for copy in self._copies:
            copy.finish()

    def _read(self) -> None:
        with self._pipe as pipe:
            while line := pipe.readline(MOST_BYTES):
                for copy in self._copies:
                    copy.add(line)


class _Copy:
    """A copy, written in a thread of its own."""

    def __init__(self, what: str, open_it: Callable[[], IO[bytes]]) -> None:
        self._what, self._open = what, open_it
        self._lines: queue.Queue[bytes | None] = queue.Queue(MOST_LINES)
        self._is_told = self._is_stalled = False
        self._thread = threading.Thread(target=self._write, name="output", daemon=True)
        self._thread.start()

    def add(self, line: bytes) -> None:
        self._is_stalled = self._is_stalled and not self._lines.empty()
        try:
            self._lines.put(line, block=not self._is_stalled, timeout=PATIENCE_S)
        except queue.Full:
            self._is_stalled = True
            self._tell("it is not taken in time")

    def finish(self) -> None:
        try:
            self._lines.put(None, timeout=END_S)
            self._thread.join(END_S)
        except queue.Full:
            self._tell("it is not taken in time")

    def _write(self) -> None:
        file: IO[bytes] | None = None
        while (line := self._lines.get()) is not None:
            try:
                file = file or self._open()
                file.write(line)
                file.flush()
            except (OSError, ValueError) as error:  # a full disk, a closed terminal; later there may be room again
                self._tell(str(error))
        if file is not None and file is not sys.stderr.buffer:
            file.close()

    def _tell(self, why: str) -> None:
        if not self._is_told:
            self._is_told = True
            logger.warning(f"{self._what} is left out in part ({why}); what prints it goes on")
