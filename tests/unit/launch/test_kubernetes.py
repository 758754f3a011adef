"""Manifests are what the schemas of Kubernetes say, and do what the options ask for."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import problems
from torch.distributed import run

from torchtitan_graph.config import load
from torchtitan_graph.errors import UserError
from torchtitan_graph.launch import __main__ as launcher
from torchtitan_graph.launch import kubernetes, pod
from torchtitan_graph.run.failure import CONFIGURATION, FINAL

NEEDED = ["--image", "registry.example.com/t:1", "--name", "first", "--volume-claim", "claim"]
ALL = [
    *["--nodes", "4", "--gpus-per-node", "2", "--namespace", "team", "--secret", "tokens", "--ipc-lock"],
    *["--resource", "vpc.amazonaws.com/efa=32", "--resource", "memory=1.5Ti", "--resource", "hugepages-2Mi=5120Mi"],
    *["--env", "NCCL_DEBUG=INFO", "--env", "EMPTY=", "--restarts", "3", "--grace-seconds", "120"],
]
TRAINING = ["--job.dump_folder", "/shared/first", "--training.steps", "7", "--checkpoint.enable"]


def written(capsys: pytest.CaptureFixture, *words: str, training: list[str] = TRAINING) -> list[dict[str, Any]]:
    assert kubernetes.main([*words, *NEEDED, "--", *training]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def job_set(documents: list[dict[str, Any]]) -> dict[str, Any]:
    spec = documents[1]["spec"]
    return spec if documents[1]["kind"] == "JobSet" else spec["template"]["spec"]


def container(documents: list[dict[str, Any]]) -> dict[str, Any]:
    template = job_set(documents)["replicatedJobs"][0]["template"]["spec"]["template"]
    return template["spec"]["containers"][0]


@pytest.mark.parametrize("options", [[], ALL], ids=["few options", "all options"])
@pytest.mark.parametrize(
    ("kind", "kinds"),
    [("jobset", ["ConfigMap", "JobSet"]), ("trainjob", ["ConfigMap", "TrainingRuntime", "TrainJob"])],
)
def test_a_manifest_has_the_fields_of_the_schemas(
    kind: str, kinds: list[str], options: list[str], capsys: pytest.CaptureFixture
) -> None:
    documents = written(capsys, "--kubernetes", kind, *options)
    assert [document["kind"] for document in documents] == kinds
    assert [found for document in documents for found in problems(document, document["kind"])] == []


@pytest.mark.parametrize(
    ("path", "change", "found"),
    [
        ([], {"maxRestart": 3}, "is not a field of FailurePolicy"),
        ([], {"maxRestarts": "3"}, "is not of type integer"),
        (["rules", 0], {"action": "FailJob"}, "is not one of FailJobSet|"),
        (["rules"], {0: {"action": "FailJobSet"}}, "name: is missing"),
    ],
)
def test_a_mistake_in_a_manifest_is_found(
    path: list[Any], change: dict[Any, Any], found: str, capsys: pytest.CaptureFixture
) -> None:
    """Negative control."""
    document = copy.deepcopy(written(capsys, "--kubernetes", "jobset")[1])
    place = document["spec"]["failurePolicy"]
    for step in path:
        place = place[step]
    for name, value in change.items():
        place[name] = value
    (problem,) = problems(document, "JobSet")
    assert found in problem


def test_the_configuration_in_it_is_that_of_the_arguments(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    training = ["--job.config_file", "llama3_8b.toml", *TRAINING]
    documents = written(capsys, "--kubernetes", "jobset", training=training)
    (tmp_path / "job.toml").write_text(documents[0]["data"]["job.toml"])
    carried, given = load(["--job.config_file", str(tmp_path / "job.toml")]), load(training)
    for config in (carried, given):
        config.job.config_file, config.sources = "", {}
    assert dataclasses.asdict(carried) == dataclasses.asdict(given)


@pytest.mark.parametrize("kind", kubernetes.KINDS)
def test_torchrun_takes_what_a_pod_is_started_with(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    args = container(written(capsys, "--kubernetes", kind, *ALL))["args"]
    for name, value in {"JOB_COMPLETION_INDEX": "0", "JOBSET_RESTART_ATTEMPT": "1", "POD_IP": "10.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    words = [*args[: args.index("--")], *pod.of_this_pod(tmp_path), "-m", "nothing"]
    config, _, _ = run.config_from_args(run.parse_args(words))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (4, 4, 2, 3)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "first-node-0-0.first:29400")
    assert config.rdzv_configs["is_host"] == "true" and config.local_addr == "10.0.0.1"


def test_final_exit_codes_end_the_job_and_all_options_have_their_effect(capsys: pytest.CaptureFixture) -> None:
    documents = written(capsys, "--kubernetes", "jobset", *ALL)
    assert {document["metadata"]["namespace"] for document in documents} == {"team"}
    spec = job_set(documents)
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == list(FINAL)
    assert spec["failurePolicy"]["maxRestarts"] == 3
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (4, 4, 0)
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] == 120
    node = container(documents)
    asked = {"nvidia.com/gpu": "2", "vpc.amazonaws.com/efa": "32", "memory": "1.5Ti", "hugepages-2Mi": "5120Mi"}
    assert node["resources"] == {"limits": asked, "requests": asked}
    values = {each["name"]: each.get("value") for each in node["env"]}
    assert values == {"POD_IP": None, "JOBSET_RESTART_ATTEMPT": None, "NCCL_DEBUG": "INFO", "EMPTY": ""}
    assert node["envFrom"] == [{"secretRef": {"name": "tokens"}}]
    assert node["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kubernetes", "jobst"], "--kubernetes jobst: must be jobset or trainjob; did you mean jobset?"),
        (["--nodes", "0"], "--nodes 0: must be a whole number of at least 1"),
        (["--grace-seconds", "5"], "--grace-seconds 5: must be a whole number of at least 30"),
        (["--name", "First"], "--name First: must be at most 48 of the characters a-z, 0-9 and -"),
        (["--name", "f" * 49], "must be at most 48"),
        (["--nodes", "1000", "--name", "f" * 47], "must be at most 46"),
        (["--image", ""], "--image is missing: it names an image"),
        (["--image", "a b"], "--image a b: must be an image's name"),
        (["--namespace", "my_team"], "--namespace my_team: must be the name of an object"),
        (["--mount-path", "shared"], "--mount-path shared: must be an absolute path"),
        (["--resource", "memroy=3Gi"], "did you mean memory?"),
        (["--resource", "memory=3GB"], "--resource memory=3GB: the quantity must be a number"),
        (["--resource", "memory"], "--resource memory: must be NAME=VALUE"),
        (["--resource", "nvidia.com/gpu=8"], "is what --gpus-per-node says"),
        (["--env", "A=1", "--env", "A=2"], "--env A=2: is given twice"),
        (["--env", "A-B=1"], "the name must be letters, digits and _"),
        (["--env", "POD_IP=1"], "--env POD_IP=1: is set for each pod"),
        (["--out", "/nowhere/job.yaml"], "--out /nowhere/job.yaml: there is no folder /nowhere"),
        (["--", "--job.dump_folder", "outputs"], "add --job.dump_folder /shared/first after --"),
        (["--", *TRAINING, "--training.stepz", "3"], "did you mean training.steps?"),
        (["--", *TRAINING, "--parallelism.tensor_parallel_degree", "3"], "the degrees must multiply"),
        (["--", *TRAINING, "--fault_tolerance.enable"], "manifests of replica groups are not made"),
    ],
)
def test_what_is_wrong_is_named(words: list[str], said: str) -> None:
    at = words.index("--") if "--" in words else len(words)
    with pytest.raises(UserError) as refusal:
        kubernetes.main(["--kubernetes", "jobset", *NEEDED, *words[:at], *(words[at:] or ["--", *TRAINING])])
    assert said in str(refusal.value)


def test_the_launcher_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.stop, "install", lambda: False)
    out = tmp_path / "job.yaml"
    assert launcher.main(["--kubernetes=jobset", *NEEDED, "-o", str(out), "--", *TRAINING]) == 0
    assert out.read_text().startswith("apiVersion: v1\nkind: ConfigMap\n")
    assert launcher.main(["--kubernetes", "jobset", "--", *TRAINING]) == CONFIGURATION
    assert "--image is missing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        launcher.main(["--kubernetes", "--nods", "3"])
    assert "did you mean --nodes?" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1e3", "12", "0x1f", "on", "null", "~", "a: b", "two\nlines\n", "tab\t\n", "é", ""])
def test_texts_are_texts_in_yaml_too(text: str) -> None:
    assert yaml.safe_load(kubernetes.in_yaml([{"key": text}])) == {"key": text}
    assert not text[:1].isdigit() or f'"{text}"' in kubernetes.in_yaml([{"key": text}])
