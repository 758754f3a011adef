"""multinode_trainer.slurm on a real SLURM cluster of two nodes, each in a network namespace of this machine."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import HERE, REPOSITORY, TINY, _environment, numbers, saved, train

LOCAL_SLURM = str(REPOSITORY / "scripts" / "local_slurm.sh")
STEPS = 8
SLOW = ["--model.name", "my_models.slow", "--training.steps", str(STEPS), "--checkpoint.keep_latest_k", "0"]


def missing() -> str:
    """Say why there can be no cluster here, or ""."""
    if os.name != "posix" or os.getuid() != 0:
        return "needs root, for network namespaces"
    programs = ("slurmctld", "slurmd", "munged", "ip", "unshare", "nsenter")
    absent = [name for name in programs if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)}; see scripts/local_slurm.sh" if absent else ""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),  # limits of minutes are the shortest that SLURM has
    pytest.mark.skipif(bool(missing()), reason=missing()),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Callable[..., str]]:
    """Give a function that runs a command on the cluster's controller."""
    root = "/tmp/local_slurm_of_tests"
    env = {**_environment(), "LOCAL_SLURM_ROOT": root, "SLURM_CONF": f"{root}/slurm.conf"}
    env["PYTHONPATH"] = f"{REPOSITORY}{os.pathsep}{HERE}"

    def run(*words: str, cwd: Path | None = None, **more: str) -> str:
        done = subprocess.run(words, env={**env, **more}, cwd=cwd, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    run(LOCAL_SLURM, "up")
    yield run
    run(LOCAL_SLURM, "down")


class Job:
    """A job of two nodes with the run in `folder / "run"`."""

    def __init__(self, cluster: Callable[..., str], folder: Path, slow_s: float, *sbatch: str) -> None:
        self.cluster, self.folder, self.run = cluster, folder, folder / "run"
        script = str(REPOSITORY / "multinode_trainer.slurm")
        said = cluster(
            *["sbatch", "--nodes=2", "--parsable", *sbatch, script, "--job.dump_folder", str(self.run), *SLOW],
            cwd=folder,
            CONFIG_FILE=TINY,
            SLOW_S=str(slow_s),
        )
        self.id = said.strip()

    def show(self) -> str:
        return self.cluster("scontrol", "--oneliner", "show", "job", self.id)

    def log(self) -> str:
        path = self.folder / f"slurm-{self.id}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_until(self, what: str, is_so: Callable[[], bool], seconds: float = 600) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, f"not {what} in {seconds} s: {self.show()}\n{self.log()[-8000:]}"
            time.sleep(1)

    def wait_for_the_end(self) -> None:
        ended = r"JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT)"
        self.wait_until("ended", lambda: re.search(ended, self.show()) is not None)
        assert "JobState=COMPLETED" in self.show(), self.log()[-8000:]


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on two ranks of one node, without a cluster."""
    folder = tmp_path_factory.mktemp("never_stopped")
    code, output = train("--job.dump_folder", str(folder), *SLOW, ranks=2)
    assert code == 0, output
    return folder


def assert_same_run(run: Path, other: Path) -> None:
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    assert list(numbers(run)) == list(range(1, STEPS + 1))
    assert numbers(run) == numbers(other)
    assert saved(run, STEPS) == saved(other, STEPS)


def test_job_that_hits_its_time_limit_requeues_and_ends_bitwise_the_same(
    cluster: Callable[..., str], never_stopped: Path, tmp_path: Path
) -> None:
    # Two microbatches of 10 s: the limit comes before the eighth step, and after the start on a busy machine.
    job = Job(cluster, tmp_path, 10, "--time=3", "--signal=B:USR1@45")
    job.wait_for_the_end()
    assert "stopped by SIGUSR1 after step" in job.log()
    assert "requeue: go on: stopped by SIGUSR1" in job.log()
    assert re.search(r"Restarts=[1-9]", job.show())
    assert "Exception raised from" not in job.log()
    assert_same_run(job.run, never_stopped)
    ranks = {path.parent.name for path in (job.run / "logs").rglob("stderr.log")}
    assert ranks == {"0"}, "one process per node, each with a log of its own"


def test_node_that_dies_in_mid_run(cluster: Callable[..., str], never_stopped: Path, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, 2, "--time=20")
    job.wait_until("at step 3", lambda: "step 3/8" in job.log())
    cluster(LOCAL_SLURM, "kill", "2")
    job.wait_until("requeued", lambda: "Restarts=1" in job.show())
    cluster(LOCAL_SLURM, "start", "2")
    job.wait_for_the_end()
    assert re.search(r"resuming after step [2-8]", job.log())
    assert_same_run(job.run, never_stopped)


def test_node_that_fails_the_preflight_again_is_excluded(cluster: Callable[..., str], tmp_path: Path) -> None:
    """On n2 an empty disk lies over the run's folder, so that it shares nothing."""
    (tmp_path / "run").mkdir()
    daemon = Path("/tmp/local_slurm_of_tests/run/slurmd-n2.pid").read_text().strip()
    cluster("nsenter", "--mount", f"--target={daemon}", "mount", "-t", "tmpfs", "none", str(tmp_path / "run"))
    try:
        job = Job(cluster, tmp_path, 0, "--time=20")
        job.wait_until("excluded", lambda: "ExcNodeList=n2" in job.show())
        assert job.log().count("node n2: what it wrote to") == 2, job.log()
        assert "node n1" not in job.log()
        assert not (job.run / "checkpoint").exists()
        cluster("scancel", job.id)
    finally:
        cluster("nsenter", "--mount", f"--target={daemon}", "umount", str(tmp_path / "run"))


def test_mistake_in_the_configuration_never_requeues(cluster: Callable[..., str], tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, 0, "--time=20", "--export=ALL,PREFLIGHT=0")
    other = tmp_path / "elsewhere"
    other.mkdir()
    cluster("scancel", job.id)
    said = cluster(
        *["sbatch", "--nodes=2", "--parsable", "--export=ALL,PREFLIGHT=0,MAX_RESTARTS=0"],
        *[str(REPOSITORY / "multinode_trainer.slurm"), "--job.dump_folder", str(other / "run"), *SLOW],
        *["--parallelism.tensor_parallel_degree", "3"],
        cwd=other,
        CONFIG_FILE=TINY,
    )
    job.id, job.folder = said.strip(), other
    job.wait_until("failed", lambda: "JobState=FAILED" in job.show())
    assert "requeue: stop: it would fail in the same way again" in job.log()
    assert "Restarts=0" in job.show()
