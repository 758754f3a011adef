"""Signals before the first step end a process, whatever it does; later ones wait for the end of the step."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_graph import stop, train
from torchtitan_graph.config import load
from torchtitan_graph.launch.__main__ import Launch
from torchtitan_graph.log import logger

# A process that is set up for ever, in Python or in a call that never comes back to it.
SETUP = """
import os, sys, threading, time
from torchtitan_graph import stop, train
from torchtitan_graph.config import load
stop.install()
if sys.argv[1] != "import":
    stop.begin_setup()
    if sys.argv[1] == "steps":
        stop.begin_steps()
greetings = iter(["ready"])
try:
    while sys.argv[1] == "blocked":
        try:  # from the greeting on: the signal may come right after it
            for greeting in greetings:
                print(greeting, flush=True)
            time.sleep(100)
        except stop.Stopped:
            pass
    print("ready", flush=True)
    for _ in range(40):
        time.sleep(0.1)
        if stop.received() and sys.argv[1] == "steps":
            print("the step is done")
            sys.exit(0)
except stop.Stopped:
    print(stop.message(), flush=True)
    os._exit(stop.exit_code())  # Python's own end takes the handlers away: a second signal would kill it in that
"""

LAUNCHER = """
import os, pathlib, subprocess, sys
from torchtitan_graph import stop, train
from torchtitan_graph.config import load
folder = pathlib.Path(os.environ[stop.LAUNCHER])
(folder / f"{os.getpid()}.launcher").touch()
worker = "from torchtitan_graph import stop; stop.install(); stop.begin_teardown(); print('ready', flush=True)"
subprocess.run([sys.executable, "-c", worker + "; import time; time.sleep(60)"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can")
def test_workers_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, stop.LAUNCHER: str(tmp_path)}
    command = [sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as launcher:
        assert launcher.stdout and launcher.stdout.readline() == b"ready\n"
        assert sorted(path.suffix for path in tmp_path.glob("0.*")) == [".pid", ".teardown"]
        launcher.kill()
        assert launcher.communicate(timeout=10)[0] == b""  # the worker, too, has let go of it


OF_ALL_GROUPS = """
import os, subprocess, sys
from torchtitan_graph import stop
os.environ[stop.PARENT] = str(os.getpid())
child = "import os; from torchtitan_graph import stop as s; s.die_with_parent()"
child += "; print(s.PARENT in os.environ, flush=True)"
subprocess.run([sys.executable, "-c", child + "; import time; time.sleep(60)"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can")
def test_the_launchers_of_groups_die_with_that_of_all() -> None:
    with subprocess.Popen([sys.executable, "-c", OF_ALL_GROUPS], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout and launcher.stdout.readline() == b"False\n", "its own children are not told"
        launcher.kill()
        assert launcher.communicate(timeout=10)[0] == b""


@pytest.mark.parametrize(
    ("phase", "signals", "code", "said"),
    [
        pytest.param(
            *("import", [signal.SIGTERM], 143, "stopped by SIGTERM before the first step"), marks=pytest.mark.slow
        ),
        pytest.param(
            *("setup", [signal.SIGINT, signal.SIGINT], 130, "stopped by Ctrl-C before the first step"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("blocked", [signal.SIGTERM], 143, "stopped by SIGTERM before the first step"), marks=pytest.mark.slow
        ),
        ("steps", [signal.SIGTERM], 0, "the step is done"),
    ],
)
def test_a_signal(phase: str, signals: list[signal.Signals], code: int, said: str) -> None:
    got, output = send(phase, *signals)
    assert (got, output.count(said), output.count("\n")) == (code, 1, 1), output


@pytest.mark.parametrize("phase", ["import", pytest.param("blocked", marks=pytest.mark.slow)])
def test_a_worker_that_a_signal_ends_has_not_failed_and_tells_its_launcher(
    phase: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another exit code torchrun would start it again, though the job is to stop."""
    (tmp_path / f"{os.getpid()}.launcher").touch()
    env = {stop.LAUNCHER: str(tmp_path), "RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert send(phase, signal.SIGUSR1, **env) == (0, "")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    assert Launch(tmp_path).report(2, {}) == 128 + signal.SIGUSR1
    assert [message.partition(";")[0] for message in caplog.messages] == ["stopped by SIGUSR1 before the first step"]


def send(phase: str, *signals: signal.Signals, **env: str) -> tuple[int, str]:
    """Return the exit code of a process that gets these signals in a phase, and what it prints then."""
    process = subprocess.Popen(
        [sys.executable, "-c", SETUP, phase],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "ready\n"
    for number in signals:
        process.send_signal(number)
    output, _ = process.communicate(timeout=8)  # 2 s on a machine that is not busy
    return process.returncode, output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nothing of it is saved, for checkpoint.enable = false"),
        (("--checkpoint.enable",), "started again, the run goes on from there"),
        (("--checkpoint.enable", "--checkpoint.load_only"), "nothing of it is saved, for checkpoint.load_only = true"),
    ],
)
def test_only_a_run_that_is_saved_is_said_to_go_on(words: tuple[str, ...], said: str) -> None:
    assert train._started_again(load(words)) == said


def test_called_from_python_it_gives_the_signals_back(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook's Ctrl-C is its own again, once a run in it has ended."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    monkeypatch.setattr(stop, "_received", signal.SIGTERM)  # which ended a run here before
    with pytest.raises(SystemExit):
        train.main(["--help"])
    assert stop.received() == 0
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1
