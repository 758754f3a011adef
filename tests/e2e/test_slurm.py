"""multinode_trainer.slurm on a real SLURM cluster of two nodes, each in a network namespace of this machine."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import EAGER, HERE, REPOSITORY, TINY, _environment, numbers, saved, train

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
    """A job of two nodes with the run in `folder / "run"`; `per_node` processes on each, on CPUs."""

    def __init__(
        self, cluster: Callable[..., str], folder: Path, slow_s: float, *sbatch: str, per_node: int = 1, **env: str
    ) -> None:
        self.cluster, self.folder, self.run = cluster, folder, folder / "run"
        script = str(REPOSITORY / "multinode_trainer.slurm")
        tasks = [f"--ntasks-per-node={per_node}"] if per_node else []
        said = cluster(
            *["sbatch", "--nodes=2", "--parsable", *tasks, *sbatch, script, "--job.dump_folder", str(self.run), *SLOW],
            cwd=folder,
            **{"CONFIG_FILE": TINY, "SLOW_S": str(slow_s), **env},
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

    def wait_for_its_refusal(self) -> str:
        """Return what the script said when it refused the job."""
        self.wait_until("failed", lambda: "JobState=FAILED" in self.show(), 60)
        assert "ExitCode=2:0" in self.show() and "Restarts=0" in self.show(), self.log()
        return self.log()

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
        assert job.log().count("node n2: its file in") == 2, job.log()
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
        *["sbatch", "--nodes=2", "--ntasks-per-node=1", "--parsable", "--export=ALL,PREFLIGHT=0,MAX_RESTARTS=0"],
        *[str(REPOSITORY / "multinode_trainer.slurm"), "--job.dump_folder", str(other / "run"), *SLOW],
        *["--parallelism.tensor_parallel_degree", "3"],
        cwd=other,
        CONFIG_FILE=TINY,
    )
    job.id, job.folder = said.strip(), other
    job.wait_until("failed", lambda: "JobState=FAILED" in job.show())
    assert "requeue: stop: it would fail in the same way again" in job.log()
    assert "Restarts=0" in job.show()


def test_job_that_asks_for_none_of_the_gpus_is_refused(cluster: Callable[..., str], tmp_path: Path) -> None:
    said = Job(cluster, tmp_path, 0, "--time=20", per_node=0).wait_for_its_refusal()
    assert said.startswith("the job asked for no GPUs, but node n1 has 1,") and "add --gpus-per-node=1 " in said


def test_two_processes_on_each_node(cluster: Callable[..., str], tmp_path: Path) -> None:
    """SLURM_NTASKS is then set, and each srun has to override it: one launcher on a node, of two processes."""
    job = Job(cluster, tmp_path, 0, "--time=20", "--export=ALL,PREFLIGHT=0", per_node=2)
    job.wait_for_the_end()
    assert "srun: error" not in job.log()  # of launchers that found no place
    logs = (job.run / "logs").glob("*/*/*/attempt_0/*/stderr.log")
    assert sorted((log.parts[-5], log.parts[-2]) for log in logs) == [(n, r) for n in ("n1", "n2") for r in ("0", "1")]


# Stands in for Apptainer: a file system of its own, with this machine's programs and Python, without SLURM's commands,
# and with the folders of the host that --bind names; and a PATH of its own.
APPTAINER = """#!/usr/bin/env bash
set -e
echo "$(hostname) ${*//$'\\n'/ }" >>CALLS
[[ $1 == exec && $2 == --pwd && $4 == --bind && -f $6 ]]
export FOLDER=$3 MOUNTS=$5
exec unshare --mount bash -ec '
    root=$(mktemp -d)
    mount -t tmpfs none $root
    mkdir $root/tmp
    for folder in /bin /sbin /lib /lib64; do [[ ! -L $folder ]] || cp -a $folder $root; done
    for mount in /usr /etc /proc /dev /sys SHOWN ${MOUNTS//,/ }; do
        mkdir -p $root${mount#*:}
        mount --rbind ${mount%%:*} $root${mount#*:}
    done
    for command in srun sbatch scontrol sinfo scancel; do mount --bind /dev/null $root/usr/bin/$command; done
    exec chroot $root env -C $FOLDER PATH=INSIDE:/usr/bin:/bin "$@"' inside "${@:7}"
"""
PYTHON_OUTSIDE = "#!/bin/sh\necho Python runs outside of the container >&2\nexit 9\n"


@pytest.fixture
def host(tmp_path: Path) -> dict[str, str]:
    """Return the variables of a job on a host that has the stand-in for Apptainer, and no Python."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "image.sif").touch()
    (tmp_path / "job").mkdir()
    shown = " ".join(sorted({sys.prefix, sys.base_prefix, str(REPOSITORY)}))
    text = APPTAINER.replace("SHOWN", shown).replace("INSIDE", f"{sys.prefix}/bin")
    text = text.replace("CALLS", f"{tmp_path}/calls")
    for name, content in {"apptainer": text, "python": PYTHON_OUTSIDE}.items():
        (tmp_path / "bin" / name).write_text(content)
        (tmp_path / "bin" / name).chmod(0o755)
    return {"PATH": f"{tmp_path}/bin:/usr/sbin:/usr/bin:/sbin:/bin", "CONTAINER": str(tmp_path / "image.sif")}


def test_all_python_runs_in_the_container_and_goes_on_after_a_stop(
    cluster: Callable[..., str], never_stopped: Path, host: dict[str, str], tmp_path: Path
) -> None:
    job = Job(cluster, tmp_path / "job", 2, "--time=20", **host)
    job.wait_until("at step 3", lambda: "step 3/8" in job.log())
    cluster("scancel", "--signal=USR1", job.id)
    job.wait_for_the_end()
    assert "Restarts=1" in job.show() and "resuming after step" in job.log()
    assert "Python runs outside" not in job.log()
    assert_same_run(job.run, never_stopped)
    calls = (tmp_path / "calls").read_text().splitlines()
    for words, nodes in (
        ("launch.requeue", {"n1"}),
        ("launch.preflight", {"n1", "n2"}),
        ("launch --nnodes", {"n1", "n2"}),
    ):
        assert {line.split()[0] for line in calls if words in line} == nodes, words


def test_dump_folder_must_be_mounted(cluster: Callable[..., str], host: dict[str, str], tmp_path: Path) -> None:
    log = str(tmp_path / "job" / "slurm-%j.log")
    (tmp_path / "elsewhere").mkdir()
    job = Job(cluster, tmp_path / "job", 0, "--time=20", f"--chdir={tmp_path}/elsewhere", f"--output={log}", **host)
    assert f"job.dump_folder = {job.run}: it is in the container alone" in job.wait_for_its_refusal()
    assert not job.run.exists()


def test_an_array_of_replica_groups_outlives_a_node(cluster: Callable[..., str], tmp_path: Path) -> None:
    """A group in each element: the node of one dies, the other's steps go on; the element comes back and heals."""
    run, steps = tmp_path / "run", 150
    words = ["sbatch", "--array=0-1", "--exclusive", "--nodes=1", "--ntasks-per-node=1", "--parsable", "--time=20"]
    words += [str(REPOSITORY / "multinode_trainer.slurm"), "--job.dump_folder", str(run), *SLOW, *EAGER]
    words += ["--training.steps", str(steps), "--fault_tolerance.enable", "--validation.no-enable"]
    words += ["--fault_tolerance.heartbeat_timeout_seconds", "2", "--training.global_batch_size", "4"]
    job = cluster(*words, cwd=tmp_path, CONFIG_FILE=TINY, SLOW_S="0.5", PREFLIGHT="0").strip()

    def steps_of(group: int) -> list[int]:
        path = run / f"replica_{group}" / "metrics.jsonl"
        return [0, *numbers(path.parent)] if path.exists() else [0]

    def logs() -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(tmp_path.glob("slurm-*.log")))

    def wait_until(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 600
        while not is_so():
            assert time.monotonic() < deadline, logs()[-8000:]
            time.sleep(0.5)

    wait_until(lambda: steps_of(0)[-1] >= 3 and steps_of(1)[-1] >= 3)
    hosts = {json.loads((run / f"replica_{n}" / "status.json").read_text())["host"]: n for n in range(2)}
    lost = hosts["n1"]
    cluster(LOCAL_SLURM, "kill", "1")
    alone = steps_of(lost)[-1]
    wait_until(lambda: steps_of(1 - lost)[-1] > alone + 5)
    cluster(LOCAL_SLURM, "start", "1")
    wait_until(lambda: not cluster("squeue", "--noheader", "--jobs", job).strip())
    every = [numbers(run / f"replica_{group}") for group in range(2)]
    assert [*every[1 - lost]] == [*range(1, steps + 1)], "no step is lost"
    assert max(every[lost]) == steps and len(every[lost]) < steps, "it came back, and took part"
    assert every[lost] == {step: every[1 - lost][step] for step in every[lost]}
    assert "healed in" in logs()
