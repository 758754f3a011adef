"""Stopping of a run: SIGTERM, SIGUSR1 and Ctrl-C set a flag that the trainer reads at the end of each step.

Before the first step there is nothing to finish and nothing to save: there a signal ends the process.

A signal that comes before the handlers are installed is lost or kills the process, and importing torch takes seconds:
so this module imports nothing but the standard library, and `train.py` calls `install` before anything else.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

START = time.time()  # start of this process, about

# The environment variable with a folder where workers write their process ids and failure records: see launch/
LAUNCHER = "TORCHTITAN_GRAPH_LAUNCHER"
PARENT = "TORCHTITAN_GRAPH_PARENT"  # the environment variable with the process id for `die_with_parent`
GRACE_S = 1.5  # time to end in order before the first step; then the process is ended at any point

_signals = [signal.SIGTERM, signal.SIGINT] + [signal.SIGUSR1] * hasattr(signal, "SIGUSR1")  # not on every system
_received, _received_at = 0, 0.0
_before: dict[int, Any] = {}  # the previous handlers of the signals; empty where they are not handled here
_pid = 0  # of the process that installed the handlers; its children inherit them
_pipe = -1  # write end of the pipe by which `_watch` learns of signals
_can_unwind = False  # whether `Stopped` is caught
_stepping = False


class Stopped(BaseException):
    """Exception: a signal ends this process now, before its first step, or by Ctrl-C for the second time."""


def install() -> bool:
    """Install the signal handlers, and register with the launcher. Only a main thread can; others do nothing.

    Returns whether they were installed by this call: then its caller has to call `restore`, or end the process.
    """
    global _pid, _pipe, _received
    if (_before and _pid == os.getpid()) or threading.current_thread() is not threading.main_thread():
        return False
    _received = 0
    _before.update({number: signal.signal(number, _handle) for number in _signals})
    if _pid != os.getpid():
        _pid = os.getpid()
        read, _pipe = os.pipe()
        os.set_blocking(_pipe, False)
        os.register_at_fork(after_in_child=_close_pipe)
        threading.Thread(target=_watch, args=(read,), name="signals", daemon=True).start()
    # Python calls a handler only between two of its instructions: never while torch allocates, copies or waits.
    signal.set_wakeup_fd(_pipe, warn_on_full_buffer=False)
    if LAUNCHER in os.environ:
        _die_with_launcher()
        _touch("pid")
    return True


def restore() -> None:
    """Restore the previous signal handlers: no step is left to finish."""
    if _before and threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
        for number, handler in _before.items():
            signal.signal(number, handler)
        _before.clear()


def begin_setup() -> None:
    """Set signals to raise `Stopped` from now on, until the first step."""
    global _can_unwind, _stepping
    _can_unwind, _stepping = True, False


def begin_steps() -> None:
    """Set signals to wait for the end of the step from now on."""
    global _stepping
    _stepping = True


def begin_teardown() -> None:
    """Notify the launcher that all is saved: from now on it kills this process, should it hang."""
    if LAUNCHER in os.environ:
        _touch("teardown")


def received() -> int:
    """Return the signal that asked this process to stop, or 0."""
    return _received


def name(number: int) -> str:
    """Return a signal's name for a message."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def message(number: int = 0) -> str:
    """Return the message that `number`, or the signal received here, has ended a process."""
    what = "at once" if _stepping and not number else "before the first step"
    return f"stopped by {name(number or _received)} {what}; start it again to resume from its newest checkpoint, if any"


def exit_code(number: int = 0) -> int:
    """Return the exit code of a process ended by `number`, or the signal received here, by the shell's convention."""
    return 128 + (number or _received)


def _attempt() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _touch(suffix: str) -> None:
    Path(os.environ[LAUNCHER], f"{_attempt()}.{os.getpid()}.{suffix}").touch()


def die_with_parent() -> None:
    """Set the kernel to kill this process when the one that started it, and names itself in PARENT, has ended in any
    way; only on Linux."""
    parent = os.environ.pop(PARENT, None)  # not for the processes that this one starts
    if parent is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != int(parent):  # it was already gone
            os._exit(128 + signal.SIGKILL)


def _die_with_launcher() -> None:
    """Set the kernel to kill this worker when the launcher has ended in any way; only on Linux.

    Otherwise a killed launcher leaves workers that hold their GPUs.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if not Path(os.environ[LAUNCHER], f"{os.getppid()}.launcher").exists():  # it was already gone
            os._exit(128 + signal.SIGKILL)


def _handle(number: int, frame: FrameType | None) -> None:
    global _received, _received_at
    if os.getpid() != _pid:
        return
    # A signal to torchrun comes twice at once, to the process and passed on.
    first, again = not _received, bool(_received) and time.monotonic() > _received_at + 1
    both_ctrl_c = _received == number == signal.SIGINT
    _received, _received_at = number, time.monotonic()
    if _stepping:
        if again and both_ctrl_c:  # a second Ctrl-C means not to wait
            raise Stopped
    elif again or not _can_unwind:
        end()
    elif first:
        raise Stopped


def _close_pipe() -> None:
    with contextlib.suppress(ValueError):  # forked by a thread other than the main one
        signal.set_wakeup_fd(-1)


def _watch(pipe: int) -> None:
    """End the process where a signal before the first step fails to."""
    first = 0.0
    while True:
        number = os.read(pipe, 1)[0]
        if number not in _signals or _stepping:
            continue
        if not first:
            first = time.monotonic()
            timer = threading.Timer(GRACE_S, _end_if_not_stepping, [number])
            timer.daemon = True
            timer.start()
        elif time.monotonic() > first + 1:
            _end_if_not_stepping(number)


def _end_if_not_stepping(number: int) -> None:
    global _received
    if not _stepping:
        _received = _received or number
        end()


def end() -> NoReturn:
    """End the process at once, and report why: to its launcher, if it has one, else to the user.

    A launcher's worker then returns 0: torchrun would restart another exit code, though the run is to stop.
    """
    is_reported = bool(os.environ.get(LAUNCHER))
    if is_reported:
        write_record(exit_code(), lost_peer=False, message=f"Stopped: {message()}", traceback="")
    else:
        print(message(), file=sys.stderr, flush=True)
    os._exit(0 if is_reported else exit_code())  # tearing torch down takes seconds


def write_record(code: int, lost_peer: bool, message: str, traceback: str) -> bool:
    """Write the cause of this worker's end for the launcher that started it; return whether that worked."""
    folder, rank = os.environ.get(LAUNCHER), int(os.environ.get("RANK", "0"))
    if not folder:
        return False
    record = {"code": code, "rank": rank, "time": time.time(), "lost_peer": lost_peer}
    tmp = Path(folder, f"{rank}.{threading.get_ident()}.tmp")  # two threads may end the process
    try:
        tmp.write_text(json.dumps({**record, "message": message, "traceback": traceback}))
        os.replace(tmp, Path(folder, f"{_attempt()}.{rank}.json"))
    except OSError:  # no space in /tmp
        return False
    return True
