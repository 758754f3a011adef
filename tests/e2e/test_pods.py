"""The pods of a Kubernetes job, as processes of this machine, and the task of SkyPilot: real runs."""

import json
import signal
import socket
from pathlib import Path

import pytest
import yaml
from runs import EAGER, REPOSITORY, TINY, Command, numbers

from torchtitan_graph.launch import kubernetes
from torchtitan_graph.parallel.join import LOOPBACK

pytestmark = pytest.mark.slow  # several interpreters, one after another
STEPS = 6
SLOW = ["--model.name", "my_models.slow", "--training.steps", str(STEPS), *EAGER]


class Job:
    """A JobSet of two pods with a process each, as its manifest says, but for the address where they meet."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        out = folder / "job.yaml"
        words = ["--kubernetes", "jobset", "--nodes", "2", "--gpus-per-node", "1", "--image", "image", "--name", "job"]
        words += ["--volume-claim", "claim", "--mount-path", str(folder), "--out", str(out), "--", *SLOW]
        kubernetes.main([*words, "--job.config_file", TINY, "--job.dump_folder", str(self.run)])
        config, job_set = yaml.safe_load_all(out.read_text())
        (folder / "job.toml").write_text(config["data"]["job.toml"])
        template = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        container = template["spec"]["containers"][0]
        with socket.create_server((LOOPBACK, 0)) as free:
            meeting = f"{LOOPBACK}:{free.getsockname()[1]}"
        placed = {"job-node-0-0.job:29400": meeting, kubernetes.CONFIG: str(folder)}
        self.words = [*container["command"], *container["args"]]
        for in_the_cluster, here in placed.items():
            self.words = [word.replace(in_the_cluster, here) for word in self.words]

    def start(self, attempt: int, slow_s: float) -> list[Command]:
        pods = []
        for index in ("1", "0"):  # the pod that all others wait for comes last
            environment = {"JOB_COMPLETION_INDEX": index, "JOBSET_RESTART_ATTEMPT": str(attempt), "POD_IP": LOOPBACK}
            pods.append(Command(*self.words, cwd=self.folder, SLOW_S=str(slow_s), **environment))
        return pods

    def status(self) -> str:
        return str(json.loads((self.run / "status.json").read_text())["state"])


def test_a_job_whose_pods_are_drained_and_then_killed_ends_as_one_run(tmp_path: Path) -> None:
    job = Job(tmp_path)
    drained = job.start(0, slow_s=0.3)
    drained[0].wait_for(job.run / "checkpoint" / "step-2" / "train_state.json")
    drained[0].process.send_signal(signal.SIGTERM)
    for pod in drained:  # the other one, too
        code, output = pod.finish()
        assert code == 143 and "the run is not finished" in output, output
    assert job.status() == "stopped" and max(numbers(job.run)) < STEPS

    killed = job.start(1, slow_s=0.3)
    killed[0].wait_for(job.run / "checkpoint" / "step-4" / "train_state.json")
    for pod in killed:
        pod.process.kill()
    assert {pod.finish().code for pod in killed} == {-signal.SIGKILL}

    outputs = []
    for pod in job.start(2, slow_s=0):
        code, output = pod.finish()
        assert code == 0, output
        outputs.append(output)
    assert "resuming after step" in outputs[0] + outputs[1]
    assert job.status() == "finished" and list(numbers(job.run)) == list(range(1, STEPS + 1))
    assert {path.name for path in (job.run / "logs" / "2").iterdir()} == {"node-0", "node-1"}


def test_the_task_of_skypilot_runs(tmp_path: Path) -> None:
    task = yaml.safe_load((REPOSITORY / "deploy" / "skypilot.yaml").read_text())
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").touch()  # the environment of this test is active
    environment = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": LOOPBACK, "SKYPILOT_NUM_NODES": "1"}
    environment |= {"SKYPILOT_NUM_GPUS_PER_NODE": "2", "SKYPILOT_TASK_ID": "sky-1", "HOME": str(tmp_path)}
    environment |= {"CONFIG_FILE": TINY, "DUMP_FOLDER": str(tmp_path / "run")}
    code, output = Command("bash", "-euc", task["run"], cwd=tmp_path, **environment).finish()
    assert code == 0, output
    assert list(numbers(tmp_path / "run")) == [1, 2, 3, 4, 5]
