"""Which ends of an attempt lead to another one, and where."""

import errno
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disks import fill, small_disk
from torchtitan_graph.launch import requeue
from torchtitan_graph.launch.requeue import MAX_FRUITLESS, VARIABLES, Decision, begin_attempt, end_attempt
from torchtitan_graph.run import lock as lock_module
from torchtitan_graph.run.failure import FAULT

NODES = ["n1", "n2"]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """Return a function that calls the command as multinode_trainer.slurm does, and returns its last line."""
    for name, value in {"SLURM_JOB_ID": "7", "JOB_NODES": "n1 n2", "DOWN_NODES": "", "JOB": ""}.items():
        monkeypatch.setenv(name, value)

    def ask(when: str, restart: int = 0, **env: str) -> str:
        for name, value in {"SLURM_RESTART_COUNT": str(restart), **env}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["requeue", when, "--job.dump_folder", str(tmp_path / "run")])
        capsys.readouterr()
        assert requeue.main() == 0
        (line,) = capsys.readouterr().out.splitlines()
        return line

    return ask


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ([], "'' is not begin, end or stopped; SLURM_JOB_ID is not set; JOB_NODES is not set; DOWN_NODES"),
        (["start"], "'start' is not begin, end or stopped"),
        (["--help"], "'--help' is not begin"),
        (["begin"], "requeue: SLURM_JOB_ID is not set"),
    ],
)
def test_a_wrong_call_is_told_how_it_is_done(
    words: list[str], missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(sys, "argv", ["requeue", *words])
    assert requeue.main() == 2
    said = capsys.readouterr()
    assert missing in said.err and "requeue begin|end|stopped [--table.key value ...]" in said.err and not said.out


def test_what_the_batch_script_asks_is_answered(script: Callable[..., str], tmp_path: Path) -> None:
    text = (Path(requeue.__file__).parents[2] / "multinode_trainer.slurm").read_text()
    ends = sorted(set(re.findall(r"\bend=(\w+)", text)))
    assert ends == ["end", "stopped"] and "decide begin" in text and "decide $end" in text
    assert all(f"export {name}" in text or re.search(rf"export .*\b{name}\b", text) for name in VARIABLES[1:])
    for restart, end in enumerate(ends):
        assert script("begin", restart) == f"train {tmp_path / 'run'}"
        assert script(end, restart) == "requeue"


def test_job_that_is_cancelled_is_not_requeued(script: Callable[..., str]) -> None:
    script("begin")
    assert script("end", JOB="JobId=7 JobState=CANCELLED Reason=None") == "stop"
    assert script("end", JOB="JobId=7 JobState=PREEMPTED Reason=None") == "stop"
    assert script("end", JOB="JobId=7 JobState=RUNNING Reason=None") == "requeue"


def test_nodes_are_excluded_besides_those_of_the_user(script: Callable[..., str]) -> None:
    for restart, others in enumerate(("(null)", "n8,n9")):
        assert script("begin", restart).startswith("train ")
        answer = script("end", restart, DOWN_NODES="n2", JOB=f"JobState=RUNNING ExcNodeList={others} NumNodes=2")
        assert answer == ("requeue n8,n9,n2" if restart else "requeue")
    assert script("begin", 2) == "requeue n8,n9,n2"  # SLURM gave the job a node that it excludes


def test_folder_that_a_container_does_not_show_says_so(
    script: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    monkeypatch.setenv("CONTAINER", "image.sif")
    monkeypatch.setattr(sys, "argv", ["requeue", "begin", "--job.dump_folder", "/elsewhere/run"])
    assert requeue.main() == 0
    said = capsys.readouterr()
    assert said.out == "stop\n"
    assert "/elsewhere/run can't be written: [Errno 30]" in said.err and "add it to CONTAINER_MOUNTS" in said.err


class FakeJob:
    """Writes what the trainer and the preflight of one job would write; SLURM's part is told by arguments."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch, self.restart = folder, monkeypatch, -1
        (folder / "failures").mkdir()

    def begin(self, down: tuple[str, ...] = ()) -> Decision:
        self.restart += 1
        self.monkeypatch.setenv("SLURM_JOB_ID", "7")
        self.monkeypatch.setenv("SLURM_RESTART_COUNT", str(self.restart))
        return begin_attempt(self.folder, "7", self.restart, NODES, list(down))

    def status(self, state: str, step: int) -> None:
        who = {"host": "n1", "pid": 1, "job_id": "7", "attempt": [self.restart, 0]}
        content = {**who, "state": state, "reason": "SIGUSR1", "step": step, "restarts": 0, "time": 1.0, "seconds": {}}
        (self.folder / "status.json").write_text(json.dumps(content))

    def failure(self, host: str, code: int, lost_peer: bool = False, elastic: int = 0) -> None:
        record: dict[str, Any] = {"job_id": "7", "attempt": [self.restart, elastic], "time": time.time()}
        record |= {"host": host, "pid": 1}
        record |= {"code": code, "lost_peer": lost_peer, "message": "no", "traceback": ""}
        name = f"7.{self.restart}.{elastic}-{host}-{lost_peer}.json"
        (self.folder / "failures" / name).write_text(json.dumps(record))

    def end(self, down: tuple[str, ...] = (), got_signal: bool = False) -> Decision:
        return end_attempt(self.folder, "7", self.restart, list(down), got_signal)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeJob:
    return FakeJob(tmp_path, monkeypatch)


def test_stopped_run_goes_on_and_finished_one_does_not(job: FakeJob) -> None:
    assert job.begin().again
    job.status("stopped", 10)
    assert job.end() == Decision(True, "stopped by SIGUSR1", [])
    assert job.begin().again
    job.status("finished", 20)
    assert job.end() == Decision(False, "the run is finished", [])


def test_attempt_that_is_stopped_before_its_first_step_or_its_save_says_so(job: FakeJob) -> None:
    job.begin()
    assert job.end(got_signal=True) == Decision(True, "stopped by a signal before it trained", [])
    job.begin()
    job.status("running", 10)
    assert job.end(got_signal=True) == Decision(True, "stopped by a signal before it had saved", [])
    job.begin()
    job.failure("n2", 2)
    assert job.end(got_signal=True) == Decision(False, "it would fail in the same way again", [])


@pytest.mark.parametrize("code", [2, 3])
def test_configuration_and_numbers_are_never_tried_again(job: FakeJob, code: int) -> None:
    job.begin()
    job.status("failed", 10)
    job.failure("n1", 1, lost_peer=True)
    job.failure("n2", code)
    assert job.end() == Decision(False, "it would fail in the same way again", [])


def test_storage_that_was_away_is_waited_for_in_another_attempt(job: FakeJob) -> None:
    job.begin()
    job.failure("n1", 2)
    job.failure("n2", 6)
    assert job.end() == Decision(True, "storage was unavailable", [])


def test_fault_of_the_program_is_not_tried_again(job: FakeJob) -> None:
    job.begin()
    job.status("failed", 10)
    job.failure("n1", 1, lost_peer=True)
    job.failure("n2", 1)
    assert not job.end().again


def test_lost_process_is(job: FakeJob) -> None:
    job.begin()
    job.status("failed", 10)
    job.failure("n1", 1, lost_peer=True)
    assert job.end().again


def test_what_torchrun_recovered_from_does_not_count(job: FakeJob) -> None:
    job.begin()
    job.status("failed", 10)
    job.failure("n2", 1, elastic=0)
    job.failure("n1", 1, lost_peer=True, elastic=1)
    assert job.end().again


def test_status_of_an_earlier_attempt_says_nothing_of_this_one(job: FakeJob) -> None:
    job.begin()
    job.status("finished", 10)
    job.begin()
    assert job.end() == Decision(True, "a process or a node was lost", [])


def test_attempts_without_progress_are_capped_and_progress_forgives(job: FakeJob) -> None:
    for step in (5, 5, 4, 6, 6, 6):
        assert job.begin().again, step
        job.status("stopped", step)
        assert job.end().again, step
    job.begin()
    job.status("stopped", 6)
    assert MAX_FRUITLESS == 3
    assert job.end() == Decision(False, "stopped by SIGUSR1, but 3 attempts got no further than step 6", [])


def test_attempts_that_slurm_ends_are_capped_too(job: FakeJob) -> None:
    """When a node dies SLURM requeues by itself, and no end is noted."""
    decisions = [job.begin().again for _ in range(MAX_FRUITLESS + 2)]
    assert decisions == [True] * MAX_FRUITLESS + [False, False]


def test_node_that_fails_twice_is_excluded(job: FakeJob) -> None:
    job.begin()
    job.failure("n2", 5)
    assert job.end(down=("n2",)) == Decision(True, "a node failed the preflight", [])  # that is one failure
    assert job.begin().exclude == []
    assert job.begin(down=("n2", "n9")).exclude == ["n2"]  # SLURM lost it in the second attempt
    job.status("stopped", 3)
    assert job.end().exclude == ["n2"]


def test_job_in_a_folder_that_another_run_has_stops_and_writes_nothing(
    job: FakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "SEEN_WITHIN_S", 0.2)
    monkeypatch.setattr(lock_module, "LOOK_EVERY_S", 0.02)
    job.folder.mkdir(exist_ok=True)
    lock = job.folder / "run.lock"
    lock.write_text(json.dumps({"host": "elsewhere", "pid": 1, "job_id": "6", "attempt": [0, 0]}))
    heart = threading.Timer(0.05, os.utime, [lock])
    heart.start()
    assert begin_attempt(job.folder, "7", 0, NODES, []) == Decision(False, f"another run has {job.folder}", [])
    heart.join()
    assert sorted(path.name for path in job.folder.iterdir()) == ["failures", "run.lock"]
    assert begin_attempt(job.folder, "6", 0, NODES, []).again  # the lock is this job's
    assert begin_attempt(job.folder, "7", 0, NODES, []).again  # no heartbeat comes


def test_another_job_in_the_folder_begins_anew(job: FakeJob) -> None:
    for _ in range(4):
        job.begin(down=("n2",))
    assert begin_attempt(job.folder, "8", 0, NODES, ["n2"]) == Decision(True, "attempt 1 on n1, n2", [])


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"job_id": "7"}',
        '{"job_id": "7", "attempts": [{}]}',
        '{"job_id": "7", "attempts": [{"restart": 0, "begins_at": "0", "nodes": [], "end": null, "bad_nodes": []}]}',
    ],
)
def test_damaged_attempts_are_forgotten(damage: str, job: FakeJob) -> None:
    job.begin()
    (job.folder / "requeue.json").write_text(damage)
    job.status("stopped", 10)
    assert job.end() == Decision(True, "stopped by SIGUSR1", [])
    (job.folder / "requeue.json").write_text(damage)
    assert job.begin().again
    (job.folder / "status.json").write_text(damage)
    assert job.end() == Decision(True, "a process or a node was lost", [])


def test_attempt_on_a_full_disk_is_not_begun_and_its_end_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        job = FakeJob(disk, monkeypatch)
        job.begin()
        job.status("failed", 10)
        job.failure("n1", 4)
        fill(disk)
        assert job.end() == Decision(False, "it would fail in the same way again", [])
        again = job.begin()
        assert not again.again and "can't be written: the disk at" in again.why and "is full" in again.why
        assert json.loads((disk / "requeue.json").read_text())["attempts"][0]["end"] is not None


def test_what_a_failure_says_is_printed_as_text(job: FakeJob, capsys: pytest.CaptureFixture) -> None:
    job.begin()
    job.failure("n1", FAULT)
    (path,) = (job.folder / "failures").iterdir()
    record = json.loads(path.read_text()) | {"host": "n\x1b[2J1", "traceback": "x\x1b]0;mine\x07" + "y" * 10_000}
    for message in ("", "\n", "no\x1b[31m\nmore"):
        path.write_text(json.dumps(record | {"message": message}))
        requeue._report(job.folder)
        printed = capsys.readouterr().err
        assert printed.startswith("requeue: n\\x1b[2J1: ") and "\x1b" not in printed and len(printed) < 5000
    assert "more" not in printed
