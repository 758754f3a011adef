"""Comparison of a run's saved configuration with the one it resumes with."""

from pathlib import Path
from typing import Any

from torchtitan_graph.config import JobConfig, load
from torchtitan_graph.config.check import RUN_DEFINING
from torchtitan_graph.config.dump import in_toml
from torchtitan_graph.config.job import OPTIONS, get
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger

_NOT_COMPARED = ("job.config_file", "job.allow_changed", "fault_tolerance.lighthouse")  # about one start only


def check_drift(saved: Path, config: JobConfig, place: str | None = None) -> None:
    """Log how `config` differs from the configuration in `saved`, which messages call `place` (default: its path).

    Raises UserError if an option of RUN_DEFINING differs and `job.allow_changed` does not name it.
    """
    place = place or str(saved)
    changes = _changes(saved, config, place)
    for key, (old, new) in changes.items():
        logger.info(f"changed since the run was started: {key} = {in_toml(new)}, was {in_toml(old)}")
    refused = [key for key in changes if key in RUN_DEFINING and key not in config.job.allow_changed]
    if refused:
        other = "job.dump_folder" + (" and checkpoint.remote_folder" if config.checkpoint.remote_folder else "")
        lines = [f"{key} = {in_toml(changes[key][1])}, was {in_toml(changes[key][0])}" for key in refused]
        raise UserError(
            "\n  ".join([f"this would go on with another model, tokenizer or data than {place} says:", *lines])
            + f"\n  set them back, use another {other}, or, if you know that the checkpoint fits, add "
            f"--job.allow_changed {','.join(refused)}"
        )


def _changes(saved: Path, config: JobConfig, place: str) -> dict[str, tuple[Any, Any]]:
    try:
        before = load(["--job.config_file", str(saved)])
    except UserError as error:  # of another version, or edited
        logger.warning(f"{place} can't be compared with this run's configuration: {error}")
        return {}
    pairs = {key: (get(before, key), get(config, key)) for key in OPTIONS if key not in _NOT_COMPARED}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
