"""What the launcher makes of how its workers ended."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import run

from torchtitan_graph import stop
from torchtitan_graph.checkpoint import SaveError
from torchtitan_graph.errors import UserError
from torchtitan_graph.launch import __main__ as launcher
from torchtitan_graph.launch.__main__ import Launch, on_this_machine
from torchtitan_graph.log import logger
from torchtitan_graph.run.failure import CONFIGURATION, FAULT, NON_FINITE, SAVE_FAILED, report_to_launcher
from torchtitan_graph.trainer import NonFiniteError

LOST = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1")


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Launch:
    monkeypatch.setenv(stop.LAUNCHER, str(tmp_path))
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    return Launch(tmp_path)


def ends(monkeypatch: pytest.MonkeyPatch, rank: int, error: BaseException, code: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    try:
        raise error
    except BaseException as raised:
        assert report_to_launcher(raised, code)


def silent(code: int, local_rank: int = 0) -> SimpleNamespace:
    return SimpleNamespace(exitcode=code, timestamp=0, local_rank=local_rank, error_file="<NA>")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("training.steps = 0"), CONFIGURATION),
        (NonFiniteError("step 4"), NON_FINITE),
        (SaveError("no room"), SAVE_FAILED),
        (stop.Stopped("stopped by Ctrl-C"), 130),
    ],
    ids=lambda value: value if isinstance(value, int) else "",
)
def test_what_is_a_message_is_told_once_and_its_exit_code_is_the_job_s(
    error: BaseException, code: int, launch: Launch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in (0, 1):
        ends(monkeypatch, rank, error, code)
    assert launch.report(0, {}) == code
    assert caplog.messages == [str(error)]


def test_the_first_fault_is_the_cause_and_lost_peers_are_a_line_each(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends(monkeypatch, 0, LOST, FAULT)
    ends(monkeypatch, 2, KeyError("first"), FAULT)
    ends(monkeypatch, 1, KeyError("second"), FAULT)
    assert launch.report(0, {0: silent(1), 3: silent(-signal.SIGTERM)}) == FAULT
    cause, *others = caplog.messages
    assert cause.startswith("rank 2 failed:\nTraceback") and cause.count("Traceback") == 1
    assert others == ["rank 1: KeyError: 'second'", f"rank 0: RuntimeError: {LOST}", "rank 3: was ended by SIGTERM"]


def test_a_rank_that_torchrun_stops_hides_no_failure(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends(monkeypatch, 0, stop.Stopped("stopped by SIGTERM before the first step"), 143)
    assert launch.report(0, {1: silent(-signal.SIGKILL)}) == 128 + signal.SIGKILL
    assert caplog.messages[0].startswith("rank 1 was ended by SIGKILL")
    caplog.clear()
    ends(monkeypatch, 1, UserError("training.steps = 0"), CONFIGURATION)
    assert launch.report(0, {2: silent(-signal.SIGTERM)}) == CONFIGURATION
    assert caplog.messages == ["training.steps = 0"]
    launch._signals.append(signal.SIGTERM)  # which somebody sent to the launcher: then it is the cause
    assert launch.report(0, {}) == 143


def test_a_killed_rank_is_the_cause_of_what_its_peers_say(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends(monkeypatch, 0, LOST, FAULT)
    assert launch.report(0, {0: silent(1), 1: silent(-signal.SIGKILL)}) == 128 + signal.SIGKILL
    assert caplog.messages == ["rank 1 was ended by SIGKILL", f"rank 0: RuntimeError: {LOST}"]
    assert all(record.levelno == logging.ERROR for record in caplog.records)
    assert not launch.has_logs_to_read


def test_what_a_killed_rank_printed_is_kept_and_named(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    logs = launch.folder / "logs" / "vm.1_x" / "attempt_0"
    for rank, printed in enumerate(("", "out of memory")):
        (logs / str(rank)).mkdir(parents=True)
        (logs / str(rank) / "stderr.log").write_text(printed)
    launch.report(0, {0: silent(-signal.SIGTERM), 1: silent(-signal.SIGKILL, local_rank=1)})
    assert caplog.messages[0] == f"rank 1 was ended by SIGKILL; its output is in {logs / '1'}"
    assert launch.has_logs_to_read


def test_of_what_torchrun_recovered_from_lost_peers_are_a_line(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends(monkeypatch, 0, LOST, FAULT)
    launch.report(0, {})
    assert caplog.messages == [f"rank 0: RuntimeError: {LOST}"]


def test_of_an_attempt_that_ended_well_there_is_nothing_to_tell(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends(monkeypatch, 0, LOST, FAULT)
    assert launch.report(1, {}) == 0 and not caplog.messages


def test_records_that_can_not_be_read_are_no_ranks(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends(monkeypatch, 0, UserError("training.steps = 0"), CONFIGURATION)
    (tmp_path / "0.1.json").write_text('{"rank": "1"}')
    os.mkfifo(tmp_path / "0.2.json")
    assert launch.report(0, {}) == CONFIGURATION and caplog.text.count("is ignored") == 2


def test_a_launcher_without_a_place_for_its_files_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def none_there(**_: str) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(launcher.tempfile, "mkdtemp", none_there)
    monkeypatch.setattr(stop, "install", lambda: False)
    assert launcher.main(["--", "--training.steps", "1"]) == CONFIGURATION
    assert "name a writable one in TMPDIR" in "".join(capsys.readouterr())


@pytest.mark.parametrize("value", ["", "x", "0,x", "-1", "2", "0;1", "9" * 5000])
def test_log_rank_that_shows_no_rank_of_this_run_is_refused(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOG_RANK", value)
    with pytest.raises(UserError, match="must be ranks of 0 to 1"):
        on_this_machine(2, tmp_path)


@pytest.fixture
def own_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in launcher.PASSED_ON}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_that_no_worker_is_there_to_take_ends_the_launcher(
    launch: Launch, own_signals: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As while torchrun waits for another machine in the place of one that died."""
    come = threading.Event()
    monkeypatch.setattr(stop, "_stepping", False)  # and put back: a test before this one may have installed handlers
    monkeypatch.setattr(launcher, "ALONE_S", 0.1)

    def lose_a_node(_: object) -> None:
        ends(monkeypatch, 0, LOST, FAULT)
        os.kill(os.getpid(), signal.SIGTERM)
        come.wait(5)

    monkeypatch.setattr(run, "run", lose_a_node)
    assert launch.run(["-m", "nothing"]) == 128 + signal.SIGTERM
    assert caplog.messages[0] == f"rank 0: RuntimeError: {LOST}"
    assert caplog.messages[1].startswith("stopped by SIGTERM while no rank ran"), "there may have been steps before"
    come.set()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whose child a process is")
def test_a_worker_that_hangs_after_its_work_is_killed(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    worker = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 60"])
    (launch.folder / f"0.{worker.pid}.pid").touch()
    file = launch.folder / f"0.{worker.pid}.teardown"
    file.touch()
    launch._kill_hanging()
    assert worker.poll() is None and not caplog.messages
    os.utime(file, (0, 0))
    (launch.folder / f"0.{os.getpid()}.teardown").touch()
    os.utime(launch.folder / f"0.{os.getpid()}.teardown", (0, 0))  # a number that is another's by now: no child
    launch._kill_hanging()
    assert worker.wait(5) == -signal.SIGKILL
    assert len(caplog.messages) == 1 and f"process {worker.pid} does not end" in caplog.text
    launch._kill_hanging()


def test_an_option_that_torchrun_does_not_take_is_refused(launch: Launch, own_signals: None) -> None:
    with pytest.raises(UserError, match="torchrun can't take these options: Unsupported nproc_per_node value: x"):
        launch.run(["--nproc_per_node", "x", "-m", "nothing"])


def test_that_the_store_ends_before_other_nodes_agents_is_not_told(
    launch: Launch, own_signals: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str | None] = []

    def agent(_: object) -> None:
        shown.append(os.environ.get(launcher.LOG_LEVEL))
        logging.getLogger("torch.distributed.elastic.rendezvous.dynamic_rendezvous").warning("failed to shutdown")

    monkeypatch.setattr(stop, "_stepping", False)
    monkeypatch.setattr(run, "run", agent)
    # caplog's handler is not a proof: pytest adds it to loggers that propagate nothing, too.
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("torch.distributed"), "handlers", [handler])
    assert launch.run(["-m", "nothing"]) == 0
    assert shown == [None], "of the agent nothing is shown, and its workers' environment asks for all"


def test_without_options_of_torchrun_it_starts_what_is_asked_for_on_this_machine() -> None:
    command = [sys.executable, "-m", "torchtitan_graph.launch", "--", "--training.steps", "few"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == CONFIGURATION and "1 problem" in done.stderr, done.stderr
    assert "training.steps = 'few'" in done.stderr


def test_each_launch_has_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers take the lock of an earlier attempt over at once. In containers host and process id may be equal."""
    names = set()
    for _ in range(2):
        for name in ("PET_RDZV_ID", "OMP_NUM_THREADS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
            monkeypatch.setenv(name, "")  # so that it is taken back at the end
            monkeypatch.delenv(name)
        on_this_machine(10**6, tmp_path)
        names.add(os.environ["PET_RDZV_ID"])
    assert len(names) == 2 and os.environ["OMP_NUM_THREADS"] == "1"  # at least
