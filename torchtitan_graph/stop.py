"""Ask a run to stop: SIGTERM, SIGUSR1 and Ctrl-C set a flag that the trainer reads at the end of each step.

A signal that comes before the handlers are installed is lost or kills the process, and importing torch takes seconds:
so this module imports nothing but the standard library, and `train.py` calls `install` before anything else.
"""

import signal
import threading
import time
from types import FrameType

START = time.time()  # when this process began, as near as a module can tell

_signals = [signal.SIGTERM, signal.SIGINT] + [signal.SIGUSR1] * hasattr(signal, "SIGUSR1")  # not on every system
_received, _received_at = 0, 0.0


def install() -> None:
    """Handle the signals from now on. Only a main thread can; others do nothing."""
    if threading.current_thread() is threading.main_thread():
        for number in _signals:
            signal.signal(number, _note)


def restore() -> None:
    """Let the signals end the process again: it fails, and there is no step left to finish."""
    if threading.current_thread() is threading.main_thread():
        for number in _signals:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def received() -> int:
    """Return the signal that asked this process to stop, or 0."""
    return _received


def name(number: int) -> str:
    """Return a signal as people write it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _note(number: int, frame: FrameType | None) -> None:
    global _received, _received_at
    now = time.monotonic()
    # Who presses Ctrl-C again does not want to wait; torchrun passes the first one on, so it comes twice at once.
    if _received == number == signal.SIGINT and now > _received_at + 1:
        raise KeyboardInterrupt
    _received, _received_at = number, now
