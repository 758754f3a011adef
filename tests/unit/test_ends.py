"""What tests start ends with them, however pytest ends."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from ends import marked

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only on Linux")
# A job with a process in a session of its own, as torchrun's ranks are.
JOB = """
import subprocess, time
def test_that_starts_a_job():
    subprocess.Popen(["sh", "-c", "setsid sleep 1000 & setsid sh -c 'touch started; sleep 1000; true' & wait"])
    time.sleep(1000)
"""
# The jobs of users that have most processes: replica groups with a lighthouse, and ranks of run_train.sh.
JOBS = """
import time
from pathlib import Path
from runs import REPOSITORY, TINY, Command
def test_that_starts_jobs():
    script = str(REPOSITORY / "run_train.sh")
    common = ["--model.name", "my_models.slow", "--training.steps", "100000", "--compile.mode", "eager"]
    env = {"NGPU": "1", "CONFIG_FILE": TINY, "SLOW_S": "0.1"}
    groups = Command(script, *common, "--job.dump_folder", "groups", "--fault_tolerance.enable", **env)
    ranks = Command(script, *common, "--job.dump_folder", "ranks", **env)
    ranks.wait_for(Path("ranks/metrics.jsonl"))
    groups.wait_for(Path("groups/replica_0/metrics.jsonl"))
    Path("started").touch()
    time.sleep(1000)
"""


def left_by(test: str, folder: Path, number: int, words: Sequence[str] = ("-n", "0")) -> list[int]:
    """Run a test until it has made the file `started`, send pytest a signal, and return the processes that are left
    a while later."""
    (folder / "test_jobs.py").write_text(test)
    mine = uuid.uuid4().hex
    env = {**os.environ, "MINE": mine, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "e2e"), *sys.path])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", *words, "test_jobs.py"]
    with subprocess.Popen(command, cwd=folder, env=env, stdout=-1, stderr=subprocess.STDOUT, text=True) as run:
        while not (folder / "started").exists():
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.05)
        assert len(marked("MINE", mine)) > 3, "the test starts nothing"
        run.send_signal(number)
    for _ in range(200):
        if not (left := marked("MINE", mine)):
            return []
        time.sleep(0.05)
    return left


def test_an_interrupted_test_leaves_no_process(tmp_path: Path) -> None:
    assert left_by(JOB, tmp_path, signal.SIGINT) == []


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_however_pytest_ends_no_job_is_left(number: signal.Signals, workers: str, tmp_path: Path) -> None:
    assert left_by(JOBS, tmp_path, number, ("-n", workers)) == []
