"""Weights & Biases: TensorBoard's numbers, uploaded, or kept in a folder that `wandb sync` uploads later."""

import importlib.util
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.metrics.run_id import keep_id, read_id
from torchtitan_graph.patience import refuse_unwritable

KEPT = "wandb_run_id"


def check_wandb(enabled: bool) -> None:
    """Raise UserError if `metrics.enable_wandb` is on and wandb is not installed."""
    if enabled and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "metrics.enable_wandb = true: the package wandb is not installed; pip install wandb, or use "
            "metrics.enable_tensorboard = true, which shows the same"
        )


class WeightsAndBiases:
    """A run at Weights & Biases, which continues when training is resumed.

    WANDB_PROJECT and WANDB_NAME name it. Without WANDB_API_KEY (or another WANDB_MODE) nothing leaves the machine.

    Args:
        folder: of wandb's files, and of the file with the run's id.
        settings: every option of the run, to search and compare runs by.
    """

    def __init__(self, folder: Path, start_step: int, settings: Mapping[str, Any]) -> None:
        import wandb

        with refuse_unwritable(f"metrics.enable_wandb = true: {folder / KEPT}", folder):
            run_id = _run_id(folder / KEPT, new=start_step == 0)
        mode: Any = os.environ.get("WANDB_MODE", "online" if "WANDB_API_KEY" in os.environ else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "torchtitan_graph"),
            name=os.environ.get("WANDB_NAME"),
            id=run_id,
            resume="allow",
            dir=str(folder),
            mode=mode,
            config=dict(settings),
        )
        if mode == "offline":
            logger.info(
                f"Weights & Biases: kept in {folder / 'wandb'}, as WANDB_API_KEY is not set; `wandb sync` sends it"
            )
        # An axis of our own: wandb's drops the steps that a resumed run repeats.
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to the curve of each tag."""
        self._run.log({"step": step, **values})

    def texts(self, step: int, values: Mapping[str, str]) -> None:
        """Add a text to the series of each tag."""
        self._run.log({"step": step, **values})

    def close(self, failed: bool = False) -> None:
        self._run.finish()


def _run_id(kept: Path, new: bool) -> str:
    """Return the run id in a file; if it holds none, a new one, which is stored there."""
    if not new and (found := read_id(kept, "Weights & Biases")):
        return found
    run_id = uuid.uuid4().hex
    keep_id(kept, run_id)
    return run_id
