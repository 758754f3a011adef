"""Checks that no two options name the same place in a run's folder, nor one that the run itself uses."""

import re
from pathlib import PurePath

from torchtitan_graph.config.job import OPTIONS, JobConfig, get
from torchtitan_graph.config.job import named as _name

_FILE, _CHECKPOINTS = "job.save_config_file", "checkpoint.folder"
_FOLDERS = (
    _CHECKPOINTS,
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
    "comm.save_traces_folder",
)
# Files that a run writes under names of its own. The last pattern is of temporary files, before they are renamed.
_OWN = (
    r"run\.(lock|reserve).*|(status|requeue)\.json|metrics(_rank\d+)?(_dropped)?\.jsonl|failures|graphs|wandb.*|"
    r"\.preflight-.*|.*\.tmp"
)


def find_problems(config: JobConfig) -> list[str]:
    """Return a line for each option whose file or folder collides with the run's own or with another option's."""
    places = {key: PurePath(get(config, key)) for key in (_FILE, *_FOLDERS) if get(config, key) or key != _FILE}
    problems = []
    for key, place in places.items():
        if place.parts and re.fullmatch(_OWN, place.parts[0]):
            problems.append(f"{_name(config, key)}: {place.parts[0]} is what the run itself writes; {_use(key)}")
    for key, place in places.items():
        for other in (other for other in places if other != key):
            if why := _conflict(key, place, other, places[other]):
                problems.append(f"{_name(config, key)}: {why}; {_use(key)}")
    return problems


def _conflict(key: str, place: PurePath, other: str, others: PurePath) -> str | None:
    """Return why a place conflicts with another option's, None if it doesn't."""
    said = f"{other} = {str(others)!r}"
    if place == others:
        return f"{said} is the same" if key > other else None  # once for two
    if other == _FILE and others in place.parents:
        return f"{said} is a file"
    inside = others in place.parents and place.relative_to(others).parts[0]
    if other == _CHECKPOINTS and inside and inside.startswith("step-"):
        return f"{said} holds the checkpoints, of which {inside} is called as one"
    return None


def _use(key: str) -> str:
    return f"use another name, such as {OPTIONS[key].default}"
