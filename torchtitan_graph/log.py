"""The logger of the package, and the format of its lines."""

import contextlib
import logging
import os
import shutil
import sys

from torchtitan_graph.errors import without_secrets

logger = logging.getLogger("torchtitan_graph")

_YELLOW, _RED, _RESET = "\033[33m", "\033[31m", "\033[0m"
_CLEAR_LINE = "\r\033[K"


class _LineFormatter(logging.Formatter):
    def __init__(self, prefix: str, color: bool) -> None:
        super().__init__(f"{prefix}%(asctime)s %(levelname)-7s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
        self.color = color

    def format(self, record: logging.LogRecord) -> str:
        line = without_secrets(super().format(record))
        if not self.color or record.levelno < logging.WARNING:
            return line
        return (_RED if record.levelno >= logging.ERROR else _YELLOW) + line + _RESET


class _Console(logging.StreamHandler):
    """Log lines, and on a terminal a status line below them, which is replaced by the next."""

    status = ""

    def emit(self, record: logging.LogRecord) -> None:
        status = self.status
        self.show("")
        super().emit(record)
        self.show(status)

    def show(self, status: str) -> None:
        if self.status or (status and self.stream.isatty()):
            columns = shutil.get_terminal_size().columns
            with contextlib.suppress(OSError):  # a closed terminal; the run goes on
                self.stream.write(_CLEAR_LINE + status[: columns - 1])
                self.stream.flush()
            self.status = status


def show_status(text: str) -> None:
    """Show a status line below the log where stderr is a terminal, in place of the last one; "" removes it."""
    for handler in logger.handlers:
        if isinstance(handler, _Console):
            handler.show(text)


def init_logging() -> None:
    """Set up the logger to write to stderr, with time, level and, unless torchrun shows it, the rank.

    Calling it again replaces what the first call set up. Warnings and errors are coloured where stderr is a
    terminal and the environment has no NO_COLOR (https://no-color.org).
    """
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    prefix = f"[rank{os.environ.get('RANK', '0')}] " if several and not _torchrun_names_the_rank() else ""
    handler = _Console(sys.stderr)
    handler.setFormatter(_LineFormatter(prefix, sys.stderr.isatty() and not os.environ.get("NO_COLOR")))
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False  # a library that configures the root logger must not print every line twice


def _torchrun_names_the_rank() -> bool:
    # With --tee or --redirects torchrun redirects each rank's stderr to a file, in the folder of the rank's error file,
    # and prefixes the lines that it copies to the terminal. Without them all ranks write to one stream, unmarked.
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None:
        return False
    try:
        own_file = os.stat(os.path.join(os.path.dirname(error_file), "stderr.log"))
        return os.path.samestat(own_file, os.fstat(sys.stderr.fileno()))
    except OSError:  # no such file, or a stderr that is not a file
        return False
