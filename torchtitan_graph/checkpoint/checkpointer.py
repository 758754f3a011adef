"""When to save, what to load, and the content of a checkpoint."""

import os
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim.lr_scheduler import LRScheduler

from torchtitan_graph.checkpoint.best import write_best
from torchtitan_graph.checkpoint.choose import choose_undamaged
from torchtitan_graph.checkpoint.folder import (
    TMP,
    TRAIN_STATE,
    find_damage,
    find_damage_together,
    find_problem,
    find_steps,
    is_model_only,
    read_train_state,
    step_folder,
    step_of,
)
from torchtitan_graph.checkpoint.metadata import METADATA, read_metadata
from torchtitan_graph.checkpoint.save import SaveError, Saver
from torchtitan_graph.checkpoint.tensors import load_tensors, saved_tensors
from torchtitan_graph.checkpoint.whole import Held, find_gaps, held_by_all, parts_of, unite
from torchtitan_graph.config import job
from torchtitan_graph.errors import FolderLost, UserError
from torchtitan_graph.log import logger
from torchtitan_graph.parallel.agree import RanksFailed, files_group, on_all_ranks, on_rank_0, retry_together
from torchtitan_graph.parallel.chunk import Chunk, chunk_of

DUE, FAILED = 1, 2  # a rank's flags, which all ranks gather in every step: see `Checkpointer.flags`

# The parts of the trainer's state, by their names in checkpoint.exclude_from_loading.
TRAINER_PARTS = {
    "dataloader": ("data",),
    "train_state": ("step", "tokens_seen", "tokens_by_source", "best", "is_unvalidated", "rng", "leaps"),
}

# Suffix of the buffers with float8 delayed scaling's history of earlier steps. A resumed run needs them; a model is
# complete without them.
_HISTORY = ".amax_history"
# Ends of the names of adapters' parameters, see Note [Adapters]: a run with adapters may start from a model without.
_ADAPTERS = ("lora_A", "lora_B", "lora_A.weight", "lora_B.weight")


class Checkpointer:
    """Save and load one run: parameters, optimizer, schedule, and the trainer's `train_state`.

    A checkpoint is a folder `step-N` with the tensors as `model.NAME` and `optim.NAME.KEY`, NAME being a parameter's
    name in the model, all else in `train_state.json`, and `run_config` in `config.toml`. All ranks call each method
    together, except `flags`. Used as a context, it waits at the end for the running save.
    """

    def __init__(
        self,
        folder: Path,
        config: job.Checkpoint,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: LRScheduler,
        run_config: str = "",
        unfinished: str = TMP,
        outer: Mapping[str, Chunk] | None = None,
    ) -> None:
        """`outer` are this rank's parts of the state of DiLoCo, where there is any."""
        self.folder, self.outer = folder, outer or {}
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.group = files_group() if config.enable or config.initial_load_path else None
        self.saver = Saver(config, self.group, run_config, unfinished)
        self._begin = time.monotonic()  # start of the time of checkpoint.interval_minutes
        self._time_is_up = False
        self.loaded_optimizer = False  # whether `load` has loaded the optimizer's state

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, FolderLost):
            return  # a save may hang in a file system that does not answer
        try:
            self.saver.wait()
        except SaveError as failure:
            if error is None:
                raise
            logger.error(str(failure))  # the run ends with another error

    def flags(self) -> int:
        """Return this rank's flags: DUE if a save is due by the clock, FAILED if a save failed."""
        minutes = self.config.interval_minutes
        due = minutes > 0 and time.monotonic() - self._begin >= 60 * minutes
        return DUE * due + FAILED * self.saver.has_failed()

    def check_flags(self, by_rank: list[int]) -> None:
        """Apply the flags that all ranks gathered in this step. Rank 0's clock counts for all.

        If a save failed, raises SaveError on all ranks in the same step, so that none waits for the others; FolderLost
        if it found that the folder is another run's.
        """
        self._time_is_up = bool(by_rank[0] & DUE)
        if failed := [rank for rank, flags in enumerate(by_rank) if flags & FAILED]:
            self.saver.wait()
            raise SaveError(f"saving a checkpoint failed on ranks {failed}, whose logs say why")

    def maybe_save(
        self, step: int, get_train_state: Callable[[], dict[str, Any]], last: bool = False, is_best: bool = False
    ) -> None:
        """Save if `step` is due by steps or by time, a milestone, the last, or the best of a run that keeps it."""
        config = self.config
        if not config.enable or config.load_only:
            return  # before all ranks gather their state
        milestone = config.keep_every and step % config.keep_every == 0
        if last or (is_best and config.keep_best) or milestone or step % config.interval == 0 or self._time_is_up:
            self.save(step, get_train_state(), last)

    def save(self, step: int, train_state: dict[str, Any], last: bool = False) -> None:
        """Save the state after `step`, unless checkpoints are off or only loaded.

        `train_state` can be written as JSON; rank 0's is saved. After the last step the call waits for the save, and
        with `checkpoint.last_save_model_only` only the model's tensors are saved, in `checkpoint.export_dtype` unless
        another folder is the export. Raises SaveError if this save failed, or the previous one, which was running.
        """
        if not self.config.enable or self.config.load_only:
            return
        self._begin, self._time_is_up = time.monotonic(), False
        model_only = last and self.config.last_save_model_only
        state = self._train_state(step, model_only, train_state)
        tensors = self._exported() if model_only else tensors_of(self.model, self.optimizer)
        outer = {} if model_only else self.outer
        self.saver.save(step_folder(self.folder, step), {**tensors, **outer}, state, last=last)
        if last:
            self.saver.wait()

    def copy_last(self, step: int) -> None:
        """Upload the checkpoint of a run that has no step left to do, where its address lacks it."""
        if self.config.enable and not self.config.load_only:
            self.saver.copy(step_folder(self.folder, step))

    def wait(self) -> None:
        """Wait for the running save; raise `SaveError` if it fails."""
        self.saver.wait()

    def load(self, num_steps: int | None = None, patience: int = 0) -> dict[str, Any] | None:
        """Load the newest whole checkpoint, or the one of `checkpoint.load_step`; return its `train_state`.

        The folder and `checkpoint.remote_folder` are searched. Where there is none, or checkpoints are off,
        `checkpoint.initial_load_path` is loaded. Returns None if training begins at step 0: with nothing loaded, or
        with only the parameters of `initial_load_path`. The parts in `checkpoint.exclude_from_loading` are neither
        loaded nor returned. A run can't be resumed exactly from a checkpoint of only the model, so an older full one is
        loaded instead, unless the run has ended: it is of the last step, `num_steps`, or later, or `patience`, where
        that is not 0, validations have followed the best one.

        Raises UserError if there is no such checkpoint, none that can be resumed, it is damaged or of another model, or
        an address can't be read.
        """
        choose = partial(
            choose_undamaged, self.folder, self.config, num_steps, self.group, patience, self.saver.unfinished
        )
        path = choose()
        while path is not None:
            try:
                return retry_together(partial(self._load, path), self.group)
            except RanksFailed as error:
                # Another replica group may have saved newer ones, and removed this one.
                newer = None if on_rank_0(path.exists, self.group) else choose()
                if newer is None:
                    raise UserError(f"checkpoint {path} can't be read ({error})") from error
                logger.warning(f"checkpoint {path} was removed while it was read")
                path = newer
        return None

    def _load(self, path: Path) -> dict[str, Any] | None:
        """Load a checkpoint, and return what `load` does. Raises RanksFailed if it can't be read."""
        begin = time.perf_counter()
        saved, metadata = on_all_ranks(lambda: (read_train_state(path), read_metadata(path)), self.group)
        resumed, model_only, excluded = _selection(path, self.folder, self.config, saved)
        self.loaded_optimizer = not model_only and "optimizer" not in excluded
        optimizer = self.optimizer if self.loaded_optimizer else None
        outer = self.outer if self.loaded_optimizer else {}
        tensors: dict[str, torch.Tensor | Chunk] = {**outer}
        tensors |= _tensors_to_load(self.model, optimizer, model_only, metadata)
        kinds = ("model", *["optim"] * self.loaded_optimizer, *["outer"] * bool(outer))
        _check_same_model(path, metadata, tensors, kinds, convert=model_only, group=self.group)
        load_tensors(path, metadata, tensors, self.group)
        what = "the model of " if model_only else f"all but {', '.join(excluded)} of " if excluded else ""
        logger.info(f"loaded {what}checkpoint {path} in {time.perf_counter() - begin:.1f} s")
        if not resumed and model_only:
            return None
        if resumed and self.config.keep_best and not self.config.load_only:
            on_rank_0(lambda: write_best(self.folder, saved["train_state"]), self.group)
        if "lr_scheduler" not in excluded:
            self.lr_scheduler.load_state_dict(saved["lr_scheduler"])
        left_out = {key for part in excluded for key in TRAINER_PARTS.get(part, ())}
        return {key: value for key, value in saved["train_state"].items() if key not in left_out}

    def roll_back(self, step: int) -> int | None:
        """Load the weights and the optimizer's state of the newest checkpoint before `step`, and return its step; None
        if there is none. All else goes on.

        Only checkpoints that are due by steps count, if there is one: a run that was stopped in between, and saved
        there, goes back to the same as one that was not. Raises SaveError if the running save fails.
        """
        self.saver.wait()
        damaged: list[Path] = []
        while (path := on_rank_0(lambda: self._newest_before(step, damaged), self.group)) is not None:
            if problem := find_damage_together(path, self.group):
                logger.warning(f"skipping checkpoint {path}: {problem}")
                damaged.append(path)
                continue
            try:
                metadata = on_all_ranks(partial(read_metadata, path), self.group)
                tensors = _tensors_to_load(self.model, self.optimizer, False, metadata)
                _check_same_model(path, metadata, tensors, ("model", "optim"), convert=False, group=self.group)
                load_tensors(path, metadata, tensors, self.group)
            except RanksFailed as error:
                raise UserError(f"checkpoint {path} can't be read ({error})") from error
            return step_of(path.name)
        return None

    def _newest_before(self, step: int, damaged: Collection[Path]) -> Path | None:
        config = self.config
        paths = {
            number: path
            for number, path in find_steps(self.folder).items()
            if number < step and path not in damaged and not is_model_only(path)
        }
        periods = [config.interval, *([config.keep_every] if config.keep_every else [])]
        due = [number for number in paths if any(number % period == 0 for period in periods)]
        return paths[max(due or paths)] if paths else None

    def _exported(self) -> dict[str, torch.Tensor]:
        """Return the model's tensors in the dtype of the save after the last step."""
        tensors, dtype = tensors_of(self.model, None), getattr(torch, self.config.export_dtype)
        if dtype == torch.float32 or self.config.last_save_in_hf:
            return tensors
        return {name: x.detach().to(dtype) if isinstance(x, nn.Parameter) else x for name, x in tensors.items()}

    def _train_state(self, step: int, model_only: bool, train_state: dict[str, Any]) -> dict[str, Any]:
        """Return the content of train_state.json. The last two entries are for a human reader, and not loaded."""
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


def _selection(path: Path, folder: Path, config: job.Checkpoint, saved: dict[str, Any]) -> tuple[bool, bool, list[str]]:
    """Return whether the run resumes from a checkpoint, whether only its model is loaded, and the excluded parts."""
    resumed = config.enable and path.parent == folder
    excluded = config.exclude_from_loading if not resumed or config.load_step >= 0 else []
    return resumed, saved["model_only"] or (not resumed and config.initial_load_model_only), excluded


def check_loadable(
    path: Path, folder: Path, config: job.Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:
    """Check that a checkpoint has the names and shapes of this model and optimizer, before a step is built for it. A
    damaged one passes: `Checkpointer.load` may use an older one. Raises UserError as that does.

    Args:
        path, folder: the checkpoint to load, and the folder of the run's own checkpoints.
        model: the whole model, on meta.
        optimizer: that model's, with its state; None if that is not known yet, and so not compared.
    """
    if find_damage(path, (TRAIN_STATE, METADATA)):
        return
    saved, metadata = read_train_state(path), read_metadata(path)
    _, model_only, excluded = _selection(path, folder, config, saved)
    if model_only or "optimizer" in excluded:
        optimizer = None
    tensors, entries = _tensors_to_load(model, optimizer, model_only, metadata), saved_tensors(metadata)
    # The parameters' storage dtype is not known yet.
    tensors = {name: x.to(entries[name].properties.dtype) if name in entries else x for name, x in tensors.items()}
    here = unite([parts_of({name: chunk_of(tensor) for name, tensor in tensors.items()})])
    kinds = ("model",) if optimizer is None else ("model", "optim")
    _refuse_differences(path, _find_differences(metadata, here, kinds, convert=model_only))


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Return the tensors of a model, and of its optimizer if given, by their names in a checkpoint."""
    tensors = _model_tensors(model)
    if optimizer is None:
        return tensors
    mine = {param for group in optimizer.param_groups for param in group["params"]}
    for name, param in model.named_parameters():
        if param.requires_grad:
            assert param in mine, f"the optimizer lacks {name}: build it with build_optimizer"
            state = optimizer.state.get(param, {})  # an optimizer may have none
            tensors |= {f"optim.{name}.{key}": value for key, value in state.items()}
    return tensors


def save_model(folder: Path, model: nn.Module) -> Path:
    """Save a model as the checkpoint `folder/step-0`, for `checkpoint.initial_load_path`; return that path."""
    path = step_folder(folder, 0)
    if path.exists():
        raise UserError(f"{path} is there already: name a new folder")
    state = {"step": 0, "model_only": True, "train_state": {}, "lr_scheduler": {}, "torch": torch.__version__}
    Saver(job.Checkpoint(keep_latest_k=0), None).save(path, _model_tensors(model), state)
    return path


def load_model(
    path: Path, model: nn.Module, group: dist.ProcessGroup | None = None, instead: str | None = None
) -> None:
    """Load a checkpoint, complete or of the model only, into a model, converted to the model's dtypes; where its
    parameters are sharded, all ranks together, through the process group of files. `instead` names state of the
    optimizer, such as "average", to load in place of the weights that have it.

    Raises UserError if `path` is not a whole checkpoint, or one of another model, or has no such state.
    """
    problem = "there is no such folder" if not os.path.isdir(path) else find_problem(path) or find_damage(path)
    if problem:
        raise UserError(f"{path} is not a checkpoint: {problem}")
    metadata = read_metadata(path)
    tensors = _tensors_to_load(model, None, True, metadata)
    _check_same_model(path, metadata, tensors, ("model",), convert=True, group=group)
    if instead is not None:
        keys = {f"optim.{name}.{instead}": f"model.{name}" for name, _ in model.named_parameters()}
        found = [key for key in keys if key in saved_tensors(metadata)]
        if not found:
            raise UserError(f"{path} has no {instead} of the weights: the run that saved it kept none")
        tensors |= {key: tensors.pop(keys[key]) for key in found}
    load_tensors(path, metadata, tensors, group)


def _model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    kept = model.state_dict().keys()  # without buffers that are computed again, such as rotary tables
    tensors: dict[str, torch.Tensor] = {f"model.{name}": param for name, param in model.named_parameters()}
    return tensors | {f"model.{name}": buffer for name, buffer in model.named_buffers() if name in kept}


def _tensors_to_load(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, model_only: bool, metadata: Metadata
) -> dict[str, torch.Tensor]:
    """Return the tensors to load; of only a model, without float8 histories that the checkpoint lacks, and without
    adapters if it has none."""
    tensors, saved = tensors_of(model, optimizer), saved_tensors(metadata)
    has_adapters = any(name.endswith(_ADAPTERS) for name in saved)
    ends = (_HISTORY,) if has_adapters else (_HISTORY, *_ADAPTERS)
    return {name: x for name, x in tensors.items() if not model_only or name in saved or not name.endswith(ends)}


def _check_same_model(
    path: Path,
    metadata: Metadata,
    tensors: Mapping[str, torch.Tensor | Chunk],
    kinds: Collection[str],
    convert: bool,
    group: dist.ProcessGroup | None,
) -> None:
    """Raise on every rank one UserError with all differences between a checkpoint's tensors and those of all ranks.

    Only the `kinds` that are loaded are compared: "model", and perhaps "optim" and "outer".
    """
    here = held_by_all({name: chunk_of(tensor) for name, tensor in tensors.items()}, group)
    _refuse_differences(path, on_rank_0(lambda: _find_differences(metadata, here, kinds, convert), group))


def _refuse_differences(path: Path, problems: list[str]) -> None:
    """Raise a UserError with the problems, if any, and with advice where the run's configuration has changed."""
    if not problems:
        return
    lines, kind = problems[:20], "model"
    if len(problems) > 20:
        lines.append(f"... and {len(problems) - 20} more")
    if all("optim." in problem for problem in problems):
        kind = "optimizer"
        lines.append(
            "go on with the run's own [optimizer], or without its state: checkpoint.load_step = N, with"
            " checkpoint.exclude_from_loading = ['optimizer']"
        )
    elif all("outer." in problem for problem in problems):
        kind = "method"
        lines.append(
            "outer is what fault_tolerance.semi_sync_method = 'diloco' keeps: set that table as the run had it, or"
            " begin another run from its parameters, by checkpoint.initial_load_path"
        )
    elif any(problem.endswith(_HISTORY) for problem in problems):
        lines.append(
            "amax_history is state of the recipe tensorwise_delayed: set model.converters and [quantize] as the run"
            " had them, or begin another run from its parameters, by checkpoint.initial_load_path"
        )
    raise UserError(f"checkpoint {path} is of another {kind}:\n  " + "\n  ".join(lines))


def _find_differences(metadata: Metadata, here: dict[str, Held], kinds: Collection[str], convert: bool) -> list[str]:
    """Return the differences between a checkpoint's tensors of these kinds and those of all ranks together."""
    saved = {name: entry for name, entry in saved_tensors(metadata).items() if name.partition(".")[0] in kinds}
    problems = [f"missing: {name}" for name in here if name not in saved]
    # Parameters that start a run may come from one with histories.
    problems += [f"unexpected: {x}" for x in saved if x not in here and not (convert and x.endswith(_HISTORY))]
    problems += find_gaps(here)
    for name, held in here.items():
        if name not in saved or len(held.shapes) > 1 or len(held.dtypes) > 1:
            continue
        (shape,), (dtype,), entry = held.shapes, held.dtypes, saved[name]
        if tuple(entry.size) != shape:
            problems.append(f"{name}: shape {list(entry.size)}, but here {list(shape)}")
        # Parameters alone may start a run in another dtype; a resumed run would silently lose its bits.
        elif not convert and entry.properties.dtype != dtype:
            problems.append(f"{name}: {entry.properties.dtype}, but here {dtype}")
    return problems
