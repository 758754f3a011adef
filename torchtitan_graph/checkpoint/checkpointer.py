"""When to save, what to load, and what a checkpoint holds."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim.lr_scheduler import LRScheduler

from torchtitan_graph.checkpoint.folder import (
    TRAIN_STATE,
    clean_up,
    commit,
    find_problem,
    find_steps,
    prepare,
    prune,
    step_folder,
    write_manifest,
    write_train_state,
)
from torchtitan_graph.checkpoint.tensors import load_tensors, read_metadata, save_tensors, saved_tensors
from torchtitan_graph.config import job
from torchtitan_graph.log import logger

T = TypeVar("T")

# The functions that a save calls, in this order. A kill before, in or after any of them loses no complete checkpoint.
SAVE_POINTS = ("prepare", "save_tensors", "write_train_state", "write_manifest", "commit", "prune")


class Checkpointer:
    """Save and load one run: parameters, optimizer, schedule, and whatever the trainer hands over as `train_state`.

    A checkpoint is a folder `step-N` with the tensors as `model.NAME` and `optim.NAME.KEY`, NAME being a parameter's
    name in the model, and all else in `train_state.json`. Every method is called by all ranks together.
    """

    def __init__(
        self,
        folder: Path,
        config: job.Checkpoint,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: LRScheduler,
    ) -> None:
        self.folder = folder
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler

    def maybe_save(self, step: int, get_train_state: Callable[[], dict[str, Any]], last: bool = False) -> None:
        """Save if `step` is a multiple of `checkpoint.interval`, the last, or the first and that was asked for."""
        first = step == 1 and self.config.enable_first_step_checkpoint
        if first or last or step % self.config.interval == 0:
            self.save(step, get_train_state(), last)

    def save(self, step: int, train_state: dict[str, Any], last: bool = False) -> None:
        """Save the state after `step`, unless checkpoints are off or only loaded.

        `train_state` is JSON-able; rank 0's is the one that is kept. After the last step only the model's tensors are
        saved if `checkpoint.last_save_model_only` says so. See Note [Atomic save].
        """
        if not self.config.enable or self.config.load_only:
            return
        begin = time.perf_counter()
        model_only = last and self.config.last_save_model_only
        final = step_folder(self.folder, step)
        tmp = final.with_suffix(".tmp")
        _on_rank_0(lambda: prepare(tmp))
        save_tensors(tmp, self._tensors(model_only))
        _on_rank_0(lambda: write_train_state(tmp, self._train_state(step, model_only, train_state)))
        _on_rank_0(lambda: write_manifest(tmp))
        _on_rank_0(lambda: commit(tmp))
        _on_rank_0(lambda: prune(final, self.config.keep_latest_k))
        logger.info(f"saved checkpoint {final} in {time.perf_counter() - begin:.1f} s")

    def load(self, num_steps: int | None = None) -> dict[str, Any] | None:
        """Load the newest complete checkpoint, or the one of `checkpoint.load_step`; return its `train_state`.

        Where the folder holds none, `checkpoint.initial_load_path` is loaded. Returns None if training begins at
        step 0: with nothing loaded, or with only the parameters of `initial_load_path`.

        A checkpoint of only the model can't be trained on exactly, so an older full one is loaded instead, unless
        the run is over with it: unless it is of step `num_steps`, the number of steps the run is to have, or later.

        Raises:
            ValueError: there is no such checkpoint, none that can be resumed, or it is of another model.
        """
        if not self.config.enable:
            return None
        path = _on_rank_0(lambda: self._choose(num_steps))
        if path is None:
            return None
        begin = time.perf_counter()
        resumed = path.parent == self.folder
        saved = _read_train_state(path)
        model_only = saved["model_only"] or (not resumed and self.config.initial_load_model_only)
        tensors = self._tensors(model_only)
        metadata = read_metadata(path)
        _check_same_model(path, metadata, tensors, model_only)
        load_tensors(path, metadata, tensors)
        logger.info(
            f"loaded {'the model of ' if model_only else ''}checkpoint {path} in {time.perf_counter() - begin:.1f} s"
        )
        if not resumed and model_only:
            return None
        self.lr_scheduler.load_state_dict(saved["lr_scheduler"])
        return saved["train_state"]

    def _tensors(self, model_only: bool) -> dict[str, torch.Tensor]:
        """Return the live tensors by the names that a checkpoint has for them."""
        tensors = _model_tensors(self.model)
        if model_only:
            return tensors
        mine = {param for group in self.optimizer.param_groups for param in group["params"]}
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                assert param in mine, f"the optimizer lacks {name}: build it with build_optimizer"
                state = self.optimizer.state.get(param, {})  # an optimizer may do without
                tensors |= {f"optim.{name}.{key}": value for key, value in state.items()}
        return tensors

    def _train_state(self, step: int, model_only: bool, train_state: dict[str, Any]) -> dict[str, Any]:
        """Return the content of train_state.json. The last two entries are for a reader, and not loaded."""
        return {
            "step": step,
            "model_only": model_only,
            "train_state": train_state,
            "lr_scheduler": self.lr_scheduler.state_dict(),
            "optimizer": [
                {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
            ],
            "torch": torch.__version__,
        }

    def _choose(self, num_steps: int | None) -> Path | None:
        """Return the checkpoint to load. Rank 0 chooses, so that all ranks agree."""
        if not self.config.load_only:
            clean_up(self.folder)
        steps = find_steps(self.folder)
        if self.config.load_step >= 0:
            return self._choose_load_step(steps, num_steps)
        if not steps:
            return self._choose_initial()
        newest = max(steps)
        full = [step for step, path in steps.items() if not _read_train_state(path)["model_only"]]
        if newest in full or (num_steps is not None and newest >= num_steps):
            return steps[newest]
        if not full:
            raise ValueError(
                f"checkpoint.folder = {str(self.folder)!r}: {steps[newest].name} holds only the model "
                "(checkpoint.last_save_model_only = true), so training can't go on from it exactly; to begin a new run "
                "with its parameters, set checkpoint.initial_load_path to it and use another job.dump_folder"
            )
        logger.warning(
            f"{steps[newest]} holds only the model (checkpoint.last_save_model_only = true): "
            f"going on from {steps[full[-1]].name}"
        )
        return steps[full[-1]]

    def _choose_load_step(self, steps: dict[int, Path], num_steps: int | None) -> Path:
        step = self.config.load_step
        option = f"checkpoint.load_step = {step}"
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise ValueError(f"{option}: no such complete checkpoint in {self.folder}; there are: {there}")
        if _read_train_state(steps[step])["model_only"] and (num_steps is None or step < num_steps):
            raise ValueError(f"{option}: that checkpoint holds only the model, so training can't go on from it exactly")
        if newer := [other for other in steps if other > step]:
            logger.warning(
                f"{option}: checkpoints of later steps ({', '.join(map(str, newer))}) stay in {self.folder}; without "
                "load_step a later run would resume from the newest of them"
            )
        return steps[step]

    def _choose_initial(self) -> Path | None:
        if self.config.initial_load_path is None or self.config.initial_load_in_hf:
            return None  # in Hugging Face's format it is the trainer that loads it
        path = Path(self.config.initial_load_path)
        option = f"checkpoint.initial_load_path = {self.config.initial_load_path!r}"
        if problem := "there is no such folder" if not path.is_dir() else find_problem(path):
            inside = [str(found) for found in find_steps(path).values()]
            hint = f"; did you mean one of {', '.join(inside)}?" if inside else ""
            raise ValueError(f"{option} is no checkpoint: {problem}{hint}")
        if not self.config.initial_load_model_only and _read_train_state(path)["model_only"]:
            raise ValueError(f"{option} holds only the model: set checkpoint.initial_load_model_only = true")
        return path


def save_model(folder: Path, model: nn.Module) -> Path:
    """Save a model as the checkpoint `folder/step-0`, for `checkpoint.initial_load_path`; return that path."""
    final = step_folder(folder, 0)
    if final.exists():
        raise ValueError(f"{final} is there already: name a new folder")
    tmp = final.with_suffix(".tmp")
    prepare(tmp)
    save_tensors(tmp, _model_tensors(model))
    state = {"step": 0, "model_only": True, "train_state": {}, "lr_scheduler": {}, "torch": torch.__version__}
    write_train_state(tmp, state)
    write_manifest(tmp)
    commit(tmp)
    return final


def load_model(path: Path, model: nn.Module) -> None:
    """Fill a model from a checkpoint, complete or of the model only, converting it to the model's dtypes.

    Raises:
        ValueError: `path` is no complete checkpoint, or one of another model.
    """
    if problem := "there is no such folder" if not path.is_dir() else find_problem(path):
        raise ValueError(f"{path} is no checkpoint: {problem}")
    metadata, tensors = read_metadata(path), _model_tensors(model)
    _check_same_model(path, metadata, tensors, model_only=True)
    load_tensors(path, metadata, tensors)


def _model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    kept = model.state_dict().keys()  # lacks buffers that are worked out anew, such as rotary tables
    tensors: dict[str, torch.Tensor] = {f"model.{name}": param for name, param in model.named_parameters()}
    return tensors | {f"model.{name}": buffer for name, buffer in model.named_buffers() if name in kept}


def _read_train_state(path: Path) -> dict[str, Any]:
    return json.loads((path / TRAIN_STATE).read_text())


def _check_same_model(path: Path, metadata: Metadata, tensors: dict[str, torch.Tensor], model_only: bool) -> None:
    """Raise one ValueError with everything in which a checkpoint's tensors and the live ones differ."""
    saved = saved_tensors(metadata)
    if model_only:
        saved = {name: entry for name, entry in saved.items() if name.startswith("model.")}
    problems = [f"missing: {name}" for name in tensors if name not in saved]
    problems += [f"unexpected: {name}" for name in saved if name not in tensors]
    for name, tensor in tensors.items():
        if name in saved and saved[name].size != tensor.shape:
            problems.append(f"{name}: shape {list(saved[name].size)}, but here {list(tensor.shape)}")
        # Parameters alone may start a run in another dtype; a run that goes on would silently lose its bits.
        elif name in saved and not model_only and saved[name].properties.dtype != tensor.dtype:
            problems.append(f"{name}: {saved[name].properties.dtype}, but here {tensor.dtype}")
    if problems:
        more = f"\n  ... and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ValueError(f"checkpoint {path} is of another model:\n  " + "\n  ".join(problems[:20]) + more)


def _on_rank_0(function: Callable[[], T]) -> T:
    """Run `function` on rank 0 and return its result, or raise its error, on every rank."""
    if not dist.is_initialized():
        return function()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
