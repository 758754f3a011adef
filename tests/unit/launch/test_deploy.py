"""The recipes in deploy/ name what there is."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchtitan_graph.launch.kubernetes import GROUP
from torchtitan_graph.run.failure import BAD_NODE, FINAL, FOLDER_LOST, STORAGE_UNAVAILABLE
from torchtitan_graph.small_files import read_toml

REPOSITORY = Path(__file__).parents[3]
PROJECT = read_toml(REPOSITORY / "pyproject.toml")
# https://docs.skypilot.co/en/latest/reference/yaml-spec.html, as of SkyPilot 0.14.1
TASK = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "volumes", "file_mounts", "setup", "run"}
RESOURCES = {"infra", "accelerators", "cpus", "memory", "use_spot", "disk_size", "network_tier", "image_id"}
RESOURCES |= {"job_recovery", "any_of", "ordered", "labels", "autostop", "ports"}
# https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html
VARIABLES = {"SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES", "SKYPILOT_NUM_GPUS_PER_NODE"}
VARIABLES |= {"SKYPILOT_TASK_ID"}


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile: word and arguments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


RECIPE = instructions((REPOSITORY / "deploy" / "Dockerfile").read_text())


def test_the_image_is_made_of_what_the_package_needs() -> None:
    assert {word for word, _ in RECIPE} == {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
    copied = [path for word, rest in RECIPE if word == "COPY" for path in rest.split()[:-1]]
    assert [path for path in copied if not (REPOSITORY / path).exists()] == []
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    needed = {*wheel, PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "pyproject.toml"}
    assert needed == set(copied)
    sent = (REPOSITORY / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in sent if line.startswith("!")} == needed and "*" in sent


def test_the_image_installs_extras_that_exist_and_torch_that_is_supported() -> None:
    (install,) = (rest for word, rest in RECIPE if word == "RUN" and "pip install" in rest)
    assert install.endswith('".[${EXTRAS}]"')
    defaults = dict(rest.split("=", 1) for word, rest in RECIPE if word == "ARG")
    extras = defaults["EXTRAS"].split(",")
    assert set(extras) <= set(PROJECT["project"]["optional-dependencies"]) - {"dev", "docs"}
    version = re.search(r"pytorch/pytorch:(\d+)\.(\d+)", defaults["BASE"])
    bounds = re.search(r"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)", " ".join(PROJECT["project"]["dependencies"]))
    assert version and bounds
    low, high = tuple(map(int, bounds.groups()[:2])), tuple(map(int, bounds.groups()[2:]))
    assert low <= tuple(map(int, version.groups())) < high


def test_the_image_runs_as_a_user_whose_group_gets_the_volume() -> None:
    users = [rest for word, rest in RECIPE if word == "USER"]
    assert users == [str(GROUP)]
    assert any(f"useradd --uid {GROUP} " in rest for word, rest in RECIPE if word == "RUN")


def unknown_of(task: dict[str, Any]) -> set[str]:
    """Return the fields of a task, and the variables of its scripts, that SkyPilot does not document."""
    used = set(re.findall(r"SKYPILOT_\w+", task["setup"] + task["run"]))
    return (task.keys() - TASK) | (task["resources"].keys() - RESOURCES) | (used - VARIABLES)


def skypilot_task() -> dict[str, Any]:
    task = yaml.safe_load((REPOSITORY / "deploy" / "skypilot.yaml").read_text())
    assert isinstance(task, dict)
    return task


def test_the_skypilot_task_uses_what_skypilot_documents() -> None:
    task = skypilot_task()
    assert unknown_of(task) == set()
    assert set(re.findall(r"SKYPILOT_\w+", task["run"])) == VARIABLES
    assert set(re.findall(r"\$([A-Z_]+)", task["run"])) - VARIABLES == set(task["envs"])
    (mounted,) = task["volumes"]
    assert task["envs"]["DUMP_FOLDER"].startswith(f"{mounted}/")
    for script in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=task[script], text=True, check=True)


def test_the_skypilot_task_recovers_from_what_may_pass() -> None:
    codes = skypilot_task()["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert {BAD_NODE, STORAGE_UNAVAILABLE, FOLDER_LOST, 143} == set(codes) and not set(codes) & set(FINAL)


@pytest.mark.parametrize(
    ("field", "value"), [("num_node", 2), ("resources", {"accelerator": "H100:8"}), ("run", "echo $SKYPILOT_NODE_RNK")]
)
def test_a_mistake_in_a_skypilot_task_is_found(field: str, value: Any) -> None:
    """Negative control."""
    assert unknown_of({**skypilot_task(), field: value})
