"""What multinode_trainer.slurm refuses, and the commands that it gives to SLURM.

SLURM's commands are stand-ins here, which write down how they are called; tests/e2e/test_slurm.py runs real ones.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

SCRIPT = Path(__file__).parents[3] / "multinode_trainer.slurm"
# A line for each call. Python's decisions are those of the test: $BEGIN and $END.
RECORD = 'echo "${0##*/} ${*@Q}" >>"$CALLS"\n'
DECISION = 'case " $* " in *launch.requeue*" begin "*) echo "$BEGIN" ;; *launch.requeue*) echo "$END" ;; esac\n'
COMMANDS = {
    "srun": 'if [[ $1 == --help ]]; then echo "$SRUN_HELP"; exit; fi\n' + RECORD + DECISION,
    "python": RECORD + DECISION,
    "apptainer": RECORD + DECISION,
    "sinfo": "",
    "scontrol": """case "$*" in
    "show hostnames "*) printf 'n1\\nn2\\n' ;;
    "show node "*) printf 'NodeName=n1 CPUTot=2\\n   %s\\n   CfgTRES=cpu=2,gres/gpu=8,gres/gpu:h100=8\\n' "$GRES" ;;
    "--oneliner show job "*) echo JobState=RUNNING ;;
    *) """
    + RECORD.strip()
    + " ;;\nesac\n",
}
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_CPUS_ON_NODE": "8"}
JOB |= {"SLURMD_NODENAME": "n1", "SLURM_NTASKS_PER_NODE": "2", "GRES": "Gres=(null)", "SRUN_HELP": "--container-image="}


class Batch(NamedTuple):
    """What a job did: exit code, output, and the calls of commands, each a list of words."""

    code: int
    output: str
    calls: list[list[str]]

    def sruns(self) -> list[list[str]]:
        return [words for words in self.calls if words[0] == "srun"]


@pytest.fixture
def batch(tmp_path: Path) -> Callable[..., Batch]:
    """Return a function that runs the script with these variables, in `tmp_path`; one that is None is not set."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "requeue.json").write_text('{"job_id": "7"}')

    def run(*options: str, without: str = "", **variables: str | None) -> Batch:
        for name, text in COMMANDS.items():
            (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}")
            (tmp_path / "bin" / name).chmod(0o755)
        if without:
            (tmp_path / "bin" / without).unlink()
        calls = tmp_path / "calls"
        calls.write_text("")
        env: dict[str, str | None] = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CALLS": str(calls)}
        env |= JOB | {"BEGIN": f"train {tmp_path / 'run'}", "END": "finished"} | variables
        done = subprocess.run(
            ["bash", str(SCRIPT), *options],
            cwd=tmp_path,
            env={name: value for name, value in env.items() if value is not None},
            capture_output=True,
            text=True,
        )
        return Batch(done.returncode, done.stderr, [shlex.split(line) for line in calls.read_text().splitlines()])

    return run


def after(words: list[str], *part: str) -> list[str]:
    """Return the words that follow `part`, which must be there."""
    at = next(n for n in range(len(words)) if tuple(words[n : n + len(part)]) == part)
    return words[at + len(part) :]


@pytest.mark.parametrize(
    ("gres", "number"),
    [
        ("Gres=gpu:8", 8),
        ("Gres=gpu:h100:8(S:0-1)", 8),
        ("Gres=gpu:a100:2(S:0,1),gpu:v100:4(S:0,1),nvme:900", 6),
    ],
)
def test_job_that_asks_for_none_of_the_gpus_is_refused(gres: str, number: int, batch: Callable[..., Batch]) -> None:
    refused = batch(GRES=gres, SLURM_NTASKS_PER_NODE=None)
    assert (refused.code, refused.calls) == (2, [])
    assert refused.output.startswith(f"the job asked for no GPUs, but node n1 has {number}, and would run one process")
    assert f"add --gpus-per-node={number} to sbatch" in refused.output and refused.output.count("\n") == 1
    asked = {"SLURM_GPUS_ON_NODE": "4", "SLURM_NTASKS_PER_NODE": None}
    for accepted in (batch(GRES=gres, **asked), batch(GRES=gres)):
        assert (accepted.code, accepted.output) == (0, "")


def test_gpus_that_slurm_does_not_manage_are_found(
    batch: Callable[..., Batch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert batch(SLURM_NTASKS_PER_NODE=None).code == 0  # a node without GPUs
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100'\necho 'GPU 1: NVIDIA H100'\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    assert "node n1 has 2, and" in batch(SLURM_NTASKS_PER_NODE=None).output


def test_commands_of_a_job_without_a_container(batch: Callable[..., Batch]) -> None:
    done = batch("--training.steps", "3", CONFIG_FILE="my.toml", NCCL_IB_HCA="mlx5_0,mlx5_1", SRUN_ARGS="--mpi=none -v")
    options = ["--job.config_file", "my.toml", "--training.steps", "3"]
    begin, preflight, launch, end = done.calls
    assert begin == ["python", "-m", "torchtitan_graph.launch.requeue", "begin", *options]
    assert end == ["python", "-m", "torchtitan_graph.launch.requeue", "end", *options]
    for words, processes in ((preflight, 2), (launch, 1)):
        assert words[:5] == ["srun", "--cpu-bind=none", "--kill-on-bad-exit=0", "--mpi=none", "-v"]
        assert words[5:8] == ["--nodes=2", f"--ntasks={2 * processes}", f"--ntasks-per-node={processes}"]
        assert words[8] == "env" and {"NCCL_IB_HCA=mlx5_0,mlx5_1", "MASTER_ADDR=n1"} <= set(words)
        assert not any("container" in word or "PYTHONNOUSERSITE" in word for word in words)
    assert after(preflight, "python")[:2] == ["-m", "torchtitan_graph.launch.preflight"]
    assert after(launch, "launch")[0] == "2" and launch[-4:] == options


def test_each_srun_has_the_image_of_pyxis_and_python_runs_in_no_other_way(
    batch: Callable[..., Batch], tmp_path: Path
) -> None:
    image = {"CONTAINER": "registry#team/torch:2.13", "CONTAINER_MOUNTS": "/shared:/shared,/data:/in:ro"}
    done = batch(**image, NCCL_SOCKET_IFNAME="ib0", SRUN_ARGS="--mpi=none")
    assert len(done.calls) == len(done.sruns()) == 4  # the begin, the preflight, the launch, the end
    for words in done.calls:
        options, command = words[: words.index("env")], words[words.index("env") :]
        mounts = f"{tmp_path}:{tmp_path},/shared:/shared,/data:/in:ro"
        assert {"--container-image=registry#team/torch:2.13", f"--container-mounts={mounts}"} <= set(options)
        assert {f"--container-workdir={tmp_path}", "--mpi=none"} <= set(options)
        assert {"NCCL_SOCKET_IFNAME=ib0", "MASTER_ADDR=n1", "PYTHONNOUSERSITE=1"} <= set(command)
    for words in (done.calls[0], done.calls[-1]):
        assert after(words, "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--nodelist=n1")[0] == "--overlap"
    (tmp_path / "torch.sqsh").touch()
    assert f"--container-image={tmp_path / 'torch.sqsh'}" in batch(CONTAINER="torch.sqsh").calls[0]


def test_apptainer_runs_what_srun_and_this_node_start(batch: Callable[..., Batch], tmp_path: Path) -> None:
    done = batch(CONTAINER="torch.sif", CONTAINER_MOUNTS="/shared:/shared")
    begin, preflight, launch, end = done.calls
    for words in (begin, end):
        assert words[0] == "apptainer" and after(words, "torch.sif", "env")
    for words in (preflight, launch):
        (at,) = (number for number, word in enumerate(words) if word.endswith("/apptainer"))
        assert words[0] == "srun" and words[at - 1].startswith("--ntasks-per-node=")
        mounts = f"{tmp_path}:{tmp_path},/shared:/shared"
        image, command, *_ = after(words, "exec", *gpu_options(), "--pwd", str(tmp_path), "--bind", mounts)
        assert (image, command) == ("torch.sif", "env")


def gpu_options() -> list[str]:
    """Return the options that give a container this machine's GPUs."""
    devices = {"--nv": "/dev/nvidiactl", "--rocm": "/dev/kfd"}
    return [option for option, device in devices.items() if Path(device).exists()]


@pytest.mark.skipif(bool(shutil.which("apptainer") or shutil.which("singularity")), reason="its runtime is here")
def test_container_without_its_runtime_is_refused(batch: Callable[..., Batch]) -> None:
    for refused, word in (
        (batch(CONTAINER="torch.sif", without="apptainer"), "node n1 has neither apptainer nor singularity"),
        (batch(CONTAINER="torch.sqsh", SRUN_HELP="--cpu-bind="), "SLURM has no pyxis here"),
    ):
        assert (refused.code, refused.calls) == (2, [])
        assert refused.output.startswith("CONTAINER = torch.s") and word in refused.output


def test_dump_folder_that_is_in_the_container_alone_is_refused(batch: Callable[..., Batch], tmp_path: Path) -> None:
    folder = tmp_path / "not mounted"
    refused = batch(CONTAINER="torch.sif", BEGIN=f"train {folder}")
    assert refused.code == 2 and len(refused.calls) == 1
    assert refused.output.startswith(f"job.dump_folder = {folder}: it is in the container alone")


@pytest.mark.parametrize(
    ("decision", "code", "calls"),
    [
        ("finished", 0, []),
        ("stop", 1, []),
        ("", 1, []),  # Python failed
        ("requeue", 0, ["scontrol requeue 7"]),
        ("requeue n8,n2", 0, ["scontrol requeue 7", "scontrol update JobId=7 ExcNodeList=n8,n2"]),
    ],
)
def test_what_is_decided_is_done(decision: str, code: int, calls: list[str], batch: Callable[..., Batch]) -> None:
    for number, done in ((4, batch(END=decision)), (1, batch(BEGIN=decision))):
        assert done.code == code
        assert [" ".join(words) for words in done.calls[number:]] == calls
