"""Diagnostics of a hung step: every rank's stacks, and NCCL's flight recorder."""

import faulthandler
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchtitan_graph.config import job
from torchtitan_graph.errors import FolderLost
from torchtitan_graph.log import logger

STDERR = 2
TRACES = "comm_traces"  # folder in job.dump_folder for the diagnostics of a hung step


def set_up_flight_recorder(dump_folder: Path) -> None:
    """Set NCCL to write its last 20,000 collectives when one times out; before the process group exists."""
    folder = (dump_folder / TRACES).absolute()
    with suppress(OSError):  # a problem with the folder is reported when the run's own files are made there
        folder.mkdir(parents=True, exist_ok=True)
    for name, old_name, value in (
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "20000"),
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder / "rank_")),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
    ):
        if old_name not in os.environ:  # torch still reads it, after the new one
            os.environ.setdefault(name, value)


class HangWatch:
    """Write the stacks of this process to a file when a step takes longer than a collective may.

    A rank that waits in a collective ends with the timeout's error; one that hangs elsewhere would be killed without a
    message. Python's fault handler writes from a thread of its own, which needs no lock of the interpreter. A context
    manager: at its end the file is logged, or removed if it is empty. If no file can be made, stacks go to stderr.
    """

    def __init__(self, config: job.Comm, dump_folder: Path, rank: int) -> None:
        self._config = config
        self._path = dump_folder / TRACES / f"rank_{rank}_stacks.txt"
        self._file, self._seconds = STDERR, config.init_timeout_seconds

    @contextmanager
    def watch(self, first: bool) -> Iterator[None]:
        """Watch one step, the `first` with the longer timeout."""
        self._seconds = self._config.init_timeout_seconds if first else self._config.train_timeout_seconds
        faulthandler.dump_traceback_later(self._seconds, file=self._file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not watch inside the context, which may wait for other replicas."""
        faulthandler.cancel_dump_traceback_later()
        yield
        faulthandler.dump_traceback_later(self._seconds, file=self._file)

    def __enter__(self) -> "HangWatch":
        # Non-blocking, should it be a FIFO.
        flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NONBLOCK
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, flags, 0o644)  # an earlier attempt's stacks stay
            self._size = self._path.stat().st_size
        except OSError as error:
            logger.warning(f"if a step hangs, this rank's stacks go to stderr: no file can be made ({error})")
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._file == STDERR or isinstance(error, FolderLost):  # the folder is another run's, or does not answer
            return
        os.close(self._file)
        # Other ranks may still write to the folder, so it is not removed here.
        with suppress(OSError):
            size = self._path.stat().st_size
            if size > self._size:
                folder = self._path.parent
                logger.error(f"a step took longer than its collectives may; the stacks of the ranks are in {folder}")
            if size == 0:
                self._path.unlink()
