"""Runs as they are compared: each folder's configuration, state and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_graph.checkpoint.folder import CONFIG
from torchtitan_graph.config import JobConfig, load
from torchtitan_graph.errors import UserError, listed
from torchtitan_graph.log import logger
from torchtitan_graph.metrics.jsonl import read_records
from torchtitan_graph.nearest import nearest
from torchtitan_graph.run.status import read_status
from torchtitan_graph.small_files import BadFile

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Run:
    """A run: its name in reports, its configuration (None: it can't be read), and its metrics by step."""

    name: str
    config: JobConfig | None
    state: str
    steps: dict[int, dict[str, Any]]

    def curve(self, key: str) -> dict[int, float]:
        """Return the values of a metric by step, where it is a number."""
        return {step: x[key] for step, x in self.steps.items() if type(x.get(key)) in (int, float)}


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Return the runs in folders, of which each is named once.

    Raises:
        UserError: there are fewer than two, one is no run, or its metrics are not what a run writes.
    """
    if len(paths) < 2:
        raise UserError("name the folders of two runs, or more")
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError(f"a run is named twice among {', '.join(map(str, paths))}")
    for path in paths:
        _check_run(path)
    names = [path.resolve().name for path in paths]
    return [_read(path, name if names.count(name) == 1 else str(path)) for path, name in zip(paths, names, strict=True)]


def _check_run(path: Path) -> None:
    if (path / METRICS).exists() or (path / CONFIG).exists():
        return
    inside = sorted(str(file.parent) for file in path.glob(f"*/{METRICS}"))
    others = [file.parent.name for file in path.absolute().parent.glob(f"*/{METRICS}")]
    near = nearest(path.name, sorted(others))
    hint = f"; did you mean {path.parent / near}?" if near else ""
    if inside:
        hint = f"; these are runs: {listed(inside, 5)}"
    raise UserError(f"{path}: is not a run's folder, for it has neither {METRICS} nor {CONFIG}{hint}")


def _read(path: Path, name: str) -> Run:
    try:
        config = load(["--job.config_file", str(path / CONFIG)])
    except UserError as error:  # of another version, edited, or not there
        logger.warning(f"the configuration of {name} is not compared: {error}")
        config = None
    status = read_status(path)
    return Run(name, config, status["state"] if status else "of unknown state", _read_metrics(path / METRICS))


def _read_metrics(file: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics by step: those of a training step, and of validations after it."""
    try:
        return _by_step(file)
    except FileNotFoundError:
        return {}


def _by_step(file: Path) -> dict[int, dict[str, Any]]:
    steps: dict[int, dict[str, Any]] = {}
    last = 0
    for line, record in enumerate(read_records(file), start=1):
        step = record.pop("step", None)
        if type(step) is not int or step < last:
            raise BadFile(f"{file}, line {line}: step = {step!r} is not a number of at least {last}, the step before")
        before = steps.setdefault(last := step, {})
        if twice := next((key for key in record if key in before), None):
            raise BadFile(f"{file}, line {line}: {twice} of step {step} is there twice")
        if word := next((key for key, value in record.items() if isinstance(value, (str, bool))), None):
            raise BadFile(f"{file}, line {line}: {word} = {record[word]!r} is not a number")
        before |= record
    return steps
