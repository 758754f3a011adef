"""Write a Kubernetes manifest of a job: a JobSet, or a TrainJob of Kubeflow Trainer.

    python -m torchtitan_graph.launch --kubernetes jobset --nodes 4 --gpus-per-node 8 --image IMAGE --name NAME \\
        --volume-claim CLAIM -o job.yaml -- --job.config_file my.toml --job.dump_folder /shared/NAME

Options after -- are those of training. They are checked for all ranks, and travel in a ConfigMap of the manifest.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from torchtitan_graph.command import check_result, make_parser, write_result
from torchtitan_graph.config import JobConfig, check, check_beginning, load
from torchtitan_graph.config.dump import dump_changes
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.nearest import did_you_mean
from torchtitan_graph.run.failure import FINAL

KINDS = ("jobset", "trainjob")
NODE = "node"  # the name of the replicated job and of its container; Kubeflow Trainer expects both
PORT = 29400
CONFIG = "/etc/torchtitan_graph"
GROUP = 10001  # of the user in deploy/Dockerfile
NATIVE = ("cpu", "memory", "ephemeral-storage")  # resources whose names have no domain
OWN_ENVIRONMENT = ("POD_IP", "JOBSET_RESTART_ATTEMPT", "JOB_COMPLETION_INDEX")
_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_QUANTITY = r"\d+(\.\d+)?(m|k|[KMGTPE]i|[MGTPE])?"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options before --."""
    epilog = "Options after -- are those of python -m torchtitan_graph.train --help."
    made = make_parser(__doc__, prog="python -m torchtitan_graph.launch", allow_abbrev=False, epilog=epilog)
    made.add_argument("--kubernetes", nargs="?", const="", metavar="KIND", help="what to write: jobset or trainjob")
    made.add_argument("--nodes", type=int, default=1, help="the number of pods, a node each (default 1)")
    made.add_argument("--gpus-per-node", type=int, default=8, metavar="GPUS", help="GPUs, and processes, of a pod (8)")
    made.add_argument("--image", help="the image, with torchtitan_graph installed: see deploy/Dockerfile")
    made.add_argument("--name", help="the name of the job, its pods and its ConfigMap")
    made.add_argument("--namespace", help="the namespace of all of it; not set: kubectl's")
    made.add_argument("--volume-claim", metavar="CLAIM", help="the claim of a volume that all nodes can write to")
    made.add_argument("--mount-path", default="/shared", metavar="PATH", help="where it is mounted (default /shared)")
    made.add_argument(
        "--resource",
        action="append",
        default=[],
        metavar="NAME=QUANTITY",
        help="another resource of each pod, several times: cpu=96, memory=900Gi, vpc.amazonaws.com/efa=32",
    )
    made.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="an environment variable, several times"
    )
    made.add_argument("--secret", help="a Secret whose keys become environment variables, such as WANDB_API_KEY")
    made.add_argument(
        "--ipc-lock",
        action="store_true",
        help="run as root with the capability IPC_LOCK, to register memory with RDMA devices",
    )
    made.add_argument(
        "--restarts", type=int, default=10, help="how often the job is started again after a failure (default 10)"
    )
    made.add_argument(
        "--grace-seconds",
        type=int,
        default=600,
        metavar="SECONDS",
        help="the time from SIGTERM to SIGKILL, for a step and a checkpoint (default 600)",
    )
    made.add_argument("-o", "--out", type=Path, metavar="FILE", help="where to write the manifest; else it is printed")
    return made


def main(words: Sequence[str]) -> int:
    """Write the manifest that the arguments ask for, and return 0.

    Raises:
        UserError: an option of the manifest or of training is wrong.
    """
    at = words.index("--") if "--" in words else len(words)
    options = parser().parse_args(words[:at])
    _check(options)
    config = load(words[at + 1 :])
    if config.fault_tolerance.enable:
        raise UserError(
            "fault_tolerance.enable = true: manifests of replica groups are not made; make one of each group, with its"
            " fault_tolerance.replica, and a lighthouse (python -m torchtitan_graph.launch.lighthouse), by hand"
        )
    for notice in check(config, options.nodes * options.gpus_per_node):
        logger.warning(notice)
    check_beginning(config, is_new=False)  # whether the job's volume has a checkpoint is not known here
    _check_dump_folder(options, config)
    if not config.checkpoint.enable:
        logger.warning("checkpoint.enable = false: when the job is started again, it begins at the first step")
    text = in_yaml(manifest(options, config))
    print(text, end="") if options.out is None else write_result("--out", options.out, text)
    return 0


def manifest(options: argparse.Namespace, config: JobConfig) -> list[dict[str, Any]]:
    """Return the documents of the manifest: the ConfigMap and the JobSet, or the ConfigMap, a runtime and a TrainJob.

    API versions: jobset.x-k8s.io/v1alpha2 and trainer.kubeflow.org/v1alpha1.
    """
    metadata = {"name": options.name} | ({"namespace": options.namespace} if options.namespace else {})
    kinds = {"apiVersion": "v1", "kind": "ConfigMap"}
    documents: list[dict[str, Any]] = [{**kinds, "metadata": metadata, "data": {"job.toml": dump_changes(config)}}]
    job_set = _job_set(options, config)
    if options.kubernetes == "jobset":
        kinds = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
        return [*documents, {**kinds, "metadata": metadata, "spec": job_set}]
    # The runtime has what a TrainJob has no fields for: the failure policy, the grace period, the volumes.
    kinds = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainingRuntime"}
    runtime = {"mlPolicy": {"numNodes": options.nodes}, "template": {"spec": job_set}}
    documents.append({**kinds, "metadata": metadata, "spec": runtime})
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": options.name}
    kinds["kind"] = "TrainJob"
    job = {"runtimeRef": reference, "trainer": {"numNodes": options.nodes}}
    return [*documents, {**kinds, "metadata": metadata, "spec": job}]


def _job_set(options: argparse.Namespace, config: JobConfig) -> dict[str, Any]:
    """Return the specification of a JobSet: one Job with a pod for each node."""
    codes = {"containerName": NODE, "operator": "In", "values": list(FINAL)}
    job = {
        "completionMode": "Indexed",
        "completions": options.nodes,
        "parallelism": options.nodes,
        "backoffLimit": 0,  # a pod that fails ends the Job, and the JobSet starts all pods again
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
        "template": {"spec": _pod(options, config)},
    }
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"} if options.kubernetes == "trainjob" else {}
    template = {**({"metadata": {"labels": labels}} if labels else {}), "spec": job}
    final = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": options.restarts, "rules": [final]},
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": template}],
    }


def _pod(options: argparse.Namespace, config: JobConfig) -> dict[str, Any]:
    """Return the specification of a pod."""
    name = options.name
    launcher = [
        f"--nnodes={options.nodes}",
        f"--nproc-per-node={options.gpus_per_node}",
        "--max-restarts=3",
        f"--rdzv-id={name}",
        f"--rdzv-endpoint={name}-{NODE}-0-0.{name}:{PORT}",  # the stable name of the first pod
    ]
    attempt = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
    environment: list[dict[str, Any]] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "JOBSET_RESTART_ATTEMPT", "valueFrom": {"fieldRef": {"fieldPath": attempt}}},
    ]
    environment += [{"name": name, "value": value} for name, value in map(_pair, options.env)]
    resources = {"nvidia.com/gpu": str(options.gpus_per_node)} | dict(map(_pair, options.resource))
    container = {
        "name": NODE,
        "image": options.image,
        "command": ["python", "-m", "torchtitan_graph.launch.pod"],
        "args": [*launcher, "--", f"--job.config_file={CONFIG}/job.toml"],
        "env": environment,
        "resources": {"limits": resources, "requests": resources},
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG, "readOnly": True},
            {"name": "shared", "mountPath": options.mount_path},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    if options.secret:
        container["envFrom"] = [{"secretRef": {"name": options.secret}}]
    if options.ipc_lock:
        container["securityContext"] = {"runAsUser": 0, "capabilities": {"add": ["IPC_LOCK"]}}
    return {
        "restartPolicy": "Never",  # as podFailurePolicy demands
        "terminationGracePeriodSeconds": options.grace_seconds,
        "securityContext": {"fsGroup": GROUP, "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": name}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": options.volume_claim}},
            # The runtime's own has 64 MiB: too little for data workers and NCCL.
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def in_yaml(documents: list[dict[str, Any]]) -> str:
    """Return documents as YAML, in the order of their keys, texts of several lines as blocks."""
    import yaml  # only this command needs it

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        # kubectl reads 1e3 as a number where PyYAML sees none.
        style = "|" if "\n" in text else '"' if re.match(r"[-+.]?\d", text) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)

    Dumper.add_representer(str, represent)
    text: str = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=120, allow_unicode=True)
    return text


def _check(options: argparse.Namespace) -> None:
    """Raise a UserError for the first option that is missing or not legal."""
    kind = options.kubernetes
    if kind not in KINDS:
        raise UserError(f"--kubernetes {kind}: must be {' or '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    for option, least in {"nodes": 1, "gpus_per_node": 1, "restarts": 0, "grace_seconds": 30}.items():
        if (number := getattr(options, option)) < least:
            raise UserError(f"{_flag(option)} {number}: must be a whole number of at least {least}")
    for option, what in {
        "image": "an image, such as registry.example.com/torchtitan_graph:1",
        "name": "the name of the job",
        "volume_claim": "the claim of a volume that all nodes can write to: checkpoints and the run's files go there",
    }.items():
        if not getattr(options, option):
            raise UserError(f"{_flag(option)} is missing: it names {what}")
    # A pod is called NAME-node-0-INDEX-xxxxx; a label, which that becomes, has at most 63 characters.
    longest = 63 - len(f"-{NODE}-0-{options.nodes - 1}-xxxxx")
    if not re.fullmatch(f"[a-z]{_NAME}|[a-z]", options.name) or len(options.name) > longest:
        legal = f"at most {longest} of the characters a-z, 0-9 and -, the first a letter, the last not -"
        raise UserError(f"--name {options.name}: must be {legal}")
    for option in ("namespace", "volume_claim", "secret"):
        given = getattr(options, option)
        if given is not None and not (re.fullmatch(_NAME, given) and len(given) <= 63):
            legal = "the name of an object: at most 63 of the characters a-z, 0-9 and -, first and last not -"
            raise UserError(f"{_flag(option)} {given}: must be {legal}")
    if re.search(r"\s", options.image):
        raise UserError(f"--image {options.image}: must be an image's name, without spaces")
    if not re.fullmatch(r"(/[\w.-]+)+", options.mount_path):
        raise UserError(f"--mount-path {options.mount_path}: must be an absolute path, such as /shared")
    _check_pairs("--resource", options.resource, _problem_of_resource)
    _check_pairs("--env", options.env, _problem_of_variable)
    if options.out is not None:
        check_result("--out", options.out)


def _check_pairs(option: str, given: list[str], problem: Callable[[str, str], str]) -> None:
    names: set[str] = set()
    for word in given:
        name, value = _pair(word)
        if "=" not in word:
            raise UserError(f"{option} {word}: must be NAME=VALUE")
        if why := "is given twice" if name in names else problem(name, value):
            raise UserError(f"{option} {word}: {why}")
        names.add(name)


def _problem_of_resource(name: str, quantity: str) -> str:
    if name == "nvidia.com/gpu":
        return "is what --gpus-per-node says"
    is_known = name in NATIVE or re.fullmatch(r"hugepages-\d+[KMG]i", name)
    if not is_known and not re.fullmatch(r"[a-z0-9.-]+\.[a-z]+/[\w.-]+|rdma/[\w.-]+", name):
        known = f"{', '.join(NATIVE)}, hugepages-2Mi, or DOMAIN/NAME, such as vpc.amazonaws.com/efa or rdma/ib"
        return f"the name must be one of {known}{did_you_mean(name, NATIVE)}"
    if not re.fullmatch(_QUANTITY, quantity):
        return "the quantity must be a number, with or without a unit such as m, Mi or Gi"
    return ""


def _problem_of_variable(name: str, value: str) -> str:
    if name in OWN_ENVIRONMENT:
        return "is set for each pod"
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        return "the name must be letters, digits and _, the first no digit"
    return ""


def _check_dump_folder(options: argparse.Namespace, config: JobConfig) -> None:
    folder, mount = PurePosixPath(config.job.dump_folder), PurePosixPath(options.mount_path)
    if mount not in folder.parents or ".." in folder.parts:
        raise UserError(
            f"job.dump_folder = {config.job.dump_folder!r}: must be a folder in the volume, which is mounted at "
            f"{mount}: add --job.dump_folder {mount}/{options.name} after --"
        )


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _pair(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name, value
