"""What is evaluated: a run's checkpoint or a Hugging Face folder, and the job that computes with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

from torchtitan_graph.checkpoint import best_checkpoint, newest_below
from torchtitan_graph.checkpoint.folder import CHECKPOINTS, CONFIG, step_folder
from torchtitan_graph.config import JobConfig, load
from torchtitan_graph.config.addresses import is_address, is_pattern
from torchtitan_graph.config.job import OPTIONS, is_set, put
from torchtitan_graph.config.resolve import COMMAND_LINE
from torchtitan_graph.data.addresses import list_files
from torchtitan_graph.errors import UserError, listed
from torchtitan_graph.open_model import find_files
from torchtitan_graph.patience import near_path, refuse_unreadable

# Options of a run that say how it trained, not what it computes. An evaluation has its own, from the command line.
_OF_TRAINING = (
    *("job.", "profiling.", "metrics.", "optimizer.", "lr_scheduler.", "parallelism.", "checkpoint.", "comm."),
    *("activation_checkpoint.", "compile.", "training.global_batch_size", "training.dynamic_seq_len"),
    *("training.enable_cpu_offload", "training.dataloader.", "validation.best_metric", "validation.patience"),
    *("debug.verify_passes", "debug.dump_graphs", "training.step", "training.step_options", "reference."),
)


class Source(NamedTuple):
    """A job to evaluate with, and its weights: a checkpoint, or a Hugging Face folder."""

    config: JobConfig
    weights: Path
    is_hugging_face: bool


def open_source(where: Path, step: str, sets: Sequence[str], words: Sequence[str]) -> Source:
    """Return the job that evaluates the weights in a folder.

    Args:
        where: a run's folder, a checkpoint in it, or a Hugging Face folder.
        step: of a run: "newest", "best" or a number.
        sets: corpora as NAME=PATH, in place of the run's own.
        words: options of the job, as on the command line of training. Those of a run's parallelism and of the like are
            not the evaluation's.

    Raises:
        UserError: there is no such folder or checkpoint, or an option is wrong.
    """
    if not where.is_dir():
        raise UserError(f"{where}: there is no such folder")
    is_hugging_face = (where / "config.json").is_file()
    if is_hugging_face:
        if step != "newest":
            raise UserError(f"--step {step}: {where} is a Hugging Face folder, which has no checkpoints")
        own = ["--model.hf_assets_path", str(where), "--checkpoint.initial_load_in_hf"]
        config, weights = load([*own, "--training.mixed_precision_param", "float32", *words]), where
    else:
        weights = _checkpoint(where, step)
        config = load(["--job.config_file", str(_config_of(weights, where)), *words])
        for key, option in OPTIONS.items():
            if key.startswith(_OF_TRAINING) and config.sources.get(key) != COMMAND_LINE:
                put(config, key, deepcopy(option.default))
        if config.training.format == "preference":  # what is evaluated are texts: their columns tell
            config.training.format, config.training.columns = None, {}
        find_files(config, weights / CONFIG)
    config.training.seq_len = config.validation.seq_len  # no row is of another length
    _choose_sets(config, sets)
    if config.parallelism.pipeline_parallel_degree > 1:
        raise UserError(
            f"parallelism.pipeline_parallel_degree = {config.parallelism.pipeline_parallel_degree}: an evaluation has "
            "no pipeline; use data_parallel_shard_degree or tensor_parallel_degree, which divide the weights too"
        )
    return Source(config, weights, is_hugging_face)


def _checkpoint(where: Path, step: str) -> Path:
    folder = where / CHECKPOINTS if (where / CHECKPOINTS).is_dir() else where
    if step == "best":
        return best_checkpoint(folder)
    if step == "newest":
        return newest_below(where)
    if not step.isdecimal():
        raise UserError(f"--step {step}: must be newest, best or a number")
    found = step_folder(folder, int(step))
    if not found.is_dir():
        there = sorted(int(number) for path in folder.glob("step-*") if (number := path.name[5:]).isdecimal())
        hint = f"; there are {listed([f'step-{number}' for number in there], 10)}" if there else ""
        raise UserError(f"--step {step}: there is no {found}{hint}")
    return found


def _config_of(checkpoint: Path, where: Path) -> Path:
    for folder in (checkpoint, where):
        if (folder / CONFIG).is_file():
            return folder / CONFIG
    raise UserError(
        f"{where}: holds neither a run, with its {CONFIG} and checkpoints, nor a Hugging Face folder's config.json"
    )


def _choose_sets(config: JobConfig, sets: Sequence[str]) -> None:
    """Set the corpora named on the command line, each as a whole unless validation.steps is given there too; with the
    validation.format and validation.columns that are given there, else as the run's training data are read."""
    validation = config.validation
    validation.enable = True
    if not sets:
        return
    is_limited = config.sources.get("validation.steps") == COMMAND_LINE
    given = [key for key in ("format", "columns") if config.sources.get(f"validation.{key}") == COMMAND_LINE]
    common = {key: getattr(validation, key) for key in given}
    if not is_limited:
        common["steps"] = -1
    rows = []
    for each in sets:
        name, path = named_path("--set", each)
        place = Path(path).expanduser()
        with refuse_unreadable(f"--set {each}"):
            if is_address(path):
                list_files(f"--set {name}", path)  # raises if there is nothing, before anything is traced
            elif not is_pattern(path) and not place.exists():
                raise UserError(f"--set {each}: there is no such file or folder{near_path(place)}")
        rows.append({"name": name, "dataset_path": path, **common})
    try:
        validation.sets = OPTIONS["validation.sets"].accept(rows)
    except UserError as error:
        raise UserError(f"--set: {error}") from error
    validation.dataset = validation.dataset_path = validation.format = None
    validation.columns = {}


def named_path(option: str, given: str) -> tuple[str, str]:
    """Return the two parts of an argument NAME=PATH of an option; raise UserError if it has not both."""
    name, _, path = given.partition("=")
    if not name or not path:
        raise UserError(f"{option} {given}: must be NAME=PATH")
    return name, path


def name_sets(message: str, sets: Sequence[str]) -> str:
    """Return a message on an entry of validation.sets with the --set that made it in that one's place."""
    entry = re.compile(r"validation\.sets, entry (\d+)(?:: validation\.dataset_path = '[^']*')?")
    return entry.sub(lambda found: f"--set {sets[int(found[1]) - 1]}", message) if sets else message


def names_a_corpus(config: JobConfig) -> bool:
    """Return whether a job's options name a corpus to validate on, or one to train on."""
    keys = ("validation.sets", "validation.dataset", "validation.dataset_path")
    return any(is_set(config, key) for key in (*keys, "training.dataset", "training.dataset_path", "training.sources"))
