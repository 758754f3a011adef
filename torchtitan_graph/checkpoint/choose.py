"""Which checkpoint a run goes on from: rank 0 chooses by the folders, all ranks together look for damage."""

from pathlib import Path

import torch.distributed as dist

from torchtitan_graph.checkpoint.folder import (
    check_writable,
    clean_up,
    find_damage,
    find_problem,
    find_steps,
    list_steps,
    read_manifest,
    read_train_state,
)
from torchtitan_graph.config import job
from torchtitan_graph.log import logger
from torchtitan_graph.parallel.agree import RanksFailed, gather_from_ranks, on_rank_0


def choose_undamaged(
    folder: Path, config: job.Checkpoint, num_steps: int | None, group: dist.ProcessGroup | None
) -> Path | None:
    """Return the checkpoint to load, None if there is none; all ranks together.

    Every byte of it has been read and found to be what was written. An older one is taken where that is not so.

    Raises:
        ValueError: there is none that may be loaded; the message says why not.
    """
    problems: dict[Path, str] = {}
    while True:
        try:
            path = on_rank_0(lambda: _choose(folder, config, num_steps, problems), group)
        except OSError as error:
            raise ValueError(f"checkpoint.folder = {config.folder!r}: {error}") from error
        if path is None or not (problem := _find_damage_together(path, group)):
            return path
        problems[path] = problem
        if path.parent == folder and config.load_step < 0:
            logger.warning(f"skipping checkpoint {path}: {problem}")


def _find_damage_together(path: Path, group: dist.ProcessGroup | None) -> str | None:
    """Do as `find_damage`, each rank with a part of the files."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    try:
        found = gather_from_ranks(lambda: find_damage(path, sorted(read_manifest(path))[rank::world_size]), group)
    except RanksFailed as error:
        return str(error)
    return next(filter(None, found), None)


def _choose(folder: Path, config: job.Checkpoint, num_steps: int | None, problems: dict[Path, str]) -> Path | None:
    """Choose by names and small files. `problems` are of checkpoints that are not to be taken; more are added."""
    if not config.load_only:
        check_writable(folder)
        clean_up(folder)
    steps = {}
    for step, path in list_steps(folder).items():
        if path not in problems and (problem := find_problem(path) or _find_wrong_name(path, step)):
            problems[path] = problem
            logger.warning(f"skipping checkpoint {path}: {problem}")
        if path not in problems:
            steps[step] = path
    if config.load_step >= 0:
        return _choose_load_step(folder, config.load_step, steps, problems, num_steps)
    if steps:
        return _choose_newest(folder, steps, num_steps)
    if problems and all(path.parent == folder for path in problems):
        listed = "\n  ".join(f"{path.name}: {problem}" for path, problem in problems.items())
        raise ValueError(
            f"checkpoint.folder = {config.folder!r}: {folder} holds no checkpoint that is whole:\n  {listed}\n"
            "to begin anew, name another job.dump_folder"
        )
    return _choose_initial(config, problems)


def _find_wrong_name(path: Path, step: int) -> str | None:
    saved = read_train_state(path)["step"]
    return None if saved == step else f"it is of step {saved}, and was renamed"


def _choose_newest(folder: Path, steps: dict[int, Path], num_steps: int | None) -> Path:
    newest = max(steps)
    full = [step for step, path in steps.items() if not read_train_state(path)["model_only"]]
    if newest in full or (num_steps is not None and newest >= num_steps):
        return steps[newest]
    if not full:
        raise ValueError(
            f"checkpoint.folder = {str(folder)!r}: {steps[newest].name} holds only the model "
            "(checkpoint.last_save_model_only = true), so training can't go on from it exactly; to begin a new run "
            "with its parameters, set checkpoint.initial_load_path to it and use another job.dump_folder"
        )
    logger.warning(
        f"{steps[newest]} holds only the model (checkpoint.last_save_model_only = true): "
        f"going on from {steps[full[-1]].name}"
    )
    return steps[full[-1]]


def _choose_load_step(
    folder: Path, step: int, steps: dict[int, Path], problems: dict[Path, str], num_steps: int | None
) -> Path:
    option = f"checkpoint.load_step = {step}"
    if step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        bad = {path.name: problem for path, problem in problems.items()}.get(f"step-{step}")
        why = f"that checkpoint is not whole: {bad}" if bad else f"no such complete checkpoint in {folder}"
        raise ValueError(f"{option}: {why}; there are: {there}")
    if read_train_state(steps[step])["model_only"] and (num_steps is None or step < num_steps):
        raise ValueError(f"{option}: that checkpoint holds only the model, so training can't go on from it exactly")
    if newer := [other for other in steps if other > step]:
        logger.warning(
            f"{option}: checkpoints of later steps ({', '.join(map(str, newer))}) stay in {folder}; without "
            "load_step a later run would resume from the newest of them"
        )
    return steps[step]


def _choose_initial(config: job.Checkpoint, problems: dict[Path, str]) -> Path | None:
    if config.initial_load_path is None or config.initial_load_in_hf:
        return None  # in Hugging Face's format it is the trainer that loads it
    path = Path(config.initial_load_path)
    option = f"checkpoint.initial_load_path = {config.initial_load_path!r}"
    if problem := "there is no such folder" if not path.is_dir() else problems.get(path) or find_problem(path):
        inside = [str(found) for found in find_steps(path).values()]
        hint = f"; did you mean one of {', '.join(inside)}?" if inside else ""
        raise ValueError(f"{option} is no checkpoint: {problem}{hint}")
    if not config.initial_load_model_only and read_train_state(path)["model_only"]:
        raise ValueError(f"{option} holds only the model: set checkpoint.initial_load_model_only = true")
    return path
