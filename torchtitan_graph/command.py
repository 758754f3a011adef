"""The end of a command that prints its results: quiet when its reader is gone or Ctrl-C is pressed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn


def run_command(main: Callable[[], int]) -> NoReturn:
    """Exit with the result of `main`. A closed pipe, as after `| head`, and Ctrl-C end it as they end other programs:
    without a traceback, with the shell's exit code for SIGPIPE and SIGINT."""
    try:
        try:
            code = main()
        finally:  # also after --help, which exits
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        code = 128 + signal.SIGPIPE
    sys.exit(code)
