"""The best validation of a run, and the file that names its checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from torchtitan_graph.checkpoint.folder import step_folder
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.small_files import Count, read_json, write_text

BEST = "best.json"


class Best(NamedTuple):
    """The lowest value of a metric so far.

    step   of the validation that found it
    since  validations after it, none of which was lower
    """

    metric: str
    step: int
    value: float
    since: int = 0


def find_best(best: Best | None, metric: str, step: int, value: float) -> Best | None:
    """Return the best after one more validation, None while no value was finite."""
    if math.isfinite(value) and (best is None or value < best.value):
        return Best(metric, step, value)
    return best and best._replace(since=best.since + 1)


def is_used_up(patience: int, since: int) -> bool:
    """Return whether `since` validations without a better one use up validation.patience, which 0 turns off."""
    return 0 < patience <= since


def best_of(train_state: dict[str, Any], metric: str) -> Best | None:
    """Return the best in a checkpoint's train_state; None if there is none, or it is of another metric."""
    if "best" not in train_state:
        return None
    best = Best(**train_state["best"])
    if best.metric != metric:
        logger.info(f"validation.best_metric = {metric}: was {best.metric} before, so the next validation is the best")
        return None
    return best


class _Record(msgspec.Struct):
    metric: str
    step: Count
    value: float


def write_best(folder: Path, train_state: dict[str, Any]) -> None:
    """Name in best.json the best checkpoint of a run whose newest one has this `train_state`.

    It is written after that checkpoint and before older ones are deleted, so it always names one that is there. A kill
    in between leaves it naming the previous best; the resumed run corrects it. A best that was not saved, since
    checkpoint.keep_best was not set yet, is not named.
    """
    best = train_state.get("best")
    if best is None or not step_folder(folder, best["step"]).is_dir():
        (folder / BEST).unlink(missing_ok=True)
        return
    write_text(folder / BEST, json.dumps({key: best[key] for key in ("metric", "step", "value")}) + "\n")


def best_checkpoint(folder: Path) -> Path:
    """Return the checkpoint that best.json in the folder of a run's checkpoints names.

    Raises:
        UserError: there is no such file, or no such checkpoint.
    """
    path = folder / BEST
    try:
        best = read_json(path, _Record)
    except FileNotFoundError:
        raise UserError(
            f"{path}: there is no such file; a run with checkpoint.keep_best = true writes it with its first best "
            "validation"
        ) from None
    found = step_folder(folder, best.step)
    if not found.is_dir():
        raise UserError(f"{path} names {found.name}, which is not there")
    return found
