"""Choice of the checkpoint to resume from: rank 0 chooses, then all ranks fetch it and check for damage."""

import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from torchtitan_graph.checkpoint.best import is_used_up
from torchtitan_graph.checkpoint.folder import (
    TMP,
    clean_up,
    find_below,
    find_damage_together,
    find_problem,
    list_steps,
    read_manifest,
    read_train_state,
    step_folder,
    step_of,
)
from torchtitan_graph.checkpoint.remote import Remote, Stored, fetch, using
from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.parallel.agree import on_rank_0
from torchtitan_graph.patience import retry_io, why_unwritable
from torchtitan_graph.transient import is_transient

INITIAL = "initial"  # folder below the run's checkpoints, where checkpoint.initial_load_path is downloaded to


class Candidate(NamedTuple):
    """A checkpoint that may be loaded."""

    path: Path
    address: str | None = None  # remote address from which it must be downloaded to `path` first
    model_only: bool = False
    since_best: int = 0  # validations since the best one

    @property
    def place(self) -> str:
        """The address if it is remote, else the path."""
        return self.address or str(self.path)


def choose_undamaged(
    folder: Path,
    config: job.Checkpoint,
    num_steps: int | None,
    group: dist.ProcessGroup | None,
    patience: int = 0,
    unfinished: str = TMP,
) -> Path | None:
    """Return the checkpoint to load, None if there is none; all ranks together.

    Every byte of it is read and compared with its checksum. An older one replaces a damaged one. Raises UserError with
    the reason if none may be loaded.
    """
    problems: dict[str, str] = {}
    while True:
        choose = partial(_choose, folder, config, num_steps, problems, patience, unfinished)
        try:
            choice = on_rank_0(partial(retry_io, choose), group)
        except OSError as error:
            if is_transient(error):
                raise
            raise UserError(f"job.dump_folder: {why_unwritable(folder, error)}") from error
        if choice is None:
            return None
        if choice.address is None:
            problem = find_damage_together(choice.path, group)
        else:
            option = "remote_folder" if choice.path.parent == folder else "initial_load_path"
            with using(option, choice.address):
                problem = fetch(choice.address, choice.path, group)
        if not problem:
            return choice.path
        problems[choice.place] = problem
        if choice.path.parent == folder and config.load_step < 0:
            logger.warning(f"skipping checkpoint {choice.place}: {problem}")


def is_new_run(folder: Path, config: job.Checkpoint) -> bool:
    """Return whether it is certain, by names alone, that a run has no checkpoint of its own to resume from."""
    return not config.enable or (config.remote_folder is None and not any(folder.glob("step-*")))


def check_choice(folder: Path, config: job.Checkpoint, num_steps: int) -> None:
    """Check that load_step or initial_load_path can be loaded, by names and small files, before all else.

    Nothing is changed. Rank 0 alone looks at addresses; a load_step there is checked later. Raises UserError as
    `choose_undamaged`.
    """
    unfinished = step_folder(folder, config.load_step).with_suffix(".tmp")
    if config.load_step >= 0 and config.remote_folder is None and not os.path.exists(unfinished):
        problems: dict[str, str] = {}
        _check_load_step(folder, config.load_step, _own_steps(folder, problems), problems, num_steps)
        return
    if config.initial_load_path is None or (config.enable and any(folder.glob("step-*"))):
        return
    is_local = is_new_run(folder, config) and "://" not in config.initial_load_path
    if is_local or (os.environ.get("RANK", "0") == "0" and not _has_copies(config)):
        _choose_initial(folder, config, {})


def _has_copies(config: job.Checkpoint) -> bool:
    if not config.enable or config.remote_folder is None:
        return False
    with using("remote_folder", config.remote_folder):
        return bool(Remote(config.remote_folder, is_new=True).list_folders())


def find_likely(folder: Path, config: job.Checkpoint, num_steps: int, patience: int = 0) -> Path | None:
    """Return the checkpoint that `choose_undamaged` will choose if none is damaged, by names and small files.

    None where these are not enough: for a remote address, or a save that was killed just before its end. Nothing is
    changed. Raises UserError if there are only checkpoints of the model alone.
    """
    if is_new_run(folder, config):
        initial = config.initial_load_path
        return Path(initial) if initial and "://" not in initial and not config.initial_load_in_hf else None
    if config.remote_folder is not None or any(folder.glob("step-*.tmp")):
        return None
    steps = _own_steps(folder, {})
    if config.load_step >= 0:
        return steps[config.load_step].path if config.load_step in steps else None
    return _find_newest(folder, steps, num_steps, patience).path if steps else None


def find_train_state(folder: Path) -> dict[str, Any]:
    """Return the trainer's state in the newest whole checkpoint of a run, by names and small files; {} without one."""
    for path in reversed(list_steps(folder).values()):
        if not find_problem(path):
            state: dict[str, Any] = read_train_state(path)["train_state"]
            return state
    return {}


def _choose(
    folder: Path,
    config: job.Checkpoint,
    num_steps: int | None,
    problems: dict[str, str],
    patience: int,
    unfinished: str,
) -> Candidate | None:
    """Choose by names and small files. `problems` maps excluded places to reasons; more are added."""
    if not config.enable:
        return _choose_initial(folder, config, problems)
    if not config.load_only:
        clean_up(folder, unfinished)
    known = set(problems)
    steps = _own_steps(folder, problems)
    for place in [place for place in problems if place not in known]:
        logger.warning(f"skipping checkpoint {place}: {problems[place]}")
    if config.remote_folder is not None:
        with using("remote_folder", config.remote_folder):
            steps = dict(sorted((_find_remote(folder, config, steps, problems) | steps).items()))
    if config.load_step >= 0:
        _check_load_step(folder, config.load_step, steps, problems, num_steps)
        if newer := [step for step in steps if step > config.load_step]:
            logger.warning(
                f"checkpoint.load_step = {config.load_step}: checkpoints of later steps ({', '.join(map(str, newer))}) "
                "stay where they are; without load_step a later run would resume from the newest of them"
            )
        return steps[config.load_step]
    if steps:
        chosen, newest = _find_newest(folder, steps, num_steps, patience), max(steps)
        if chosen is not steps[newest]:
            logger.warning(
                f"{steps[newest].place} holds only the model (checkpoint.last_save_model_only = true): going on from "
                f"{chosen.path.name}; it is kept, as step-{newest}-model where step {newest} is saved again"
            )
        return chosen
    initial = _initial_places(folder, config)
    if own := [f"{place}: {problem}" for place, problem in problems.items() if place not in initial]:
        where, other = f"{folder} holds", "another job.dump_folder"
        if config.remote_folder is not None:
            where = f"{folder} and {config.remote_folder} hold"
            other += " and another checkpoint.remote_folder"
        listed = "\n  ".join(own)
        raise UserError(
            f"job.dump_folder: {where} no checkpoint that is whole:\n  {listed}\nto begin a new run, name {other}"
        )
    return _choose_initial(folder, config, problems)


def _own_steps(folder: Path, problems: dict[str, str]) -> dict[int, Candidate]:
    """Return the loadable checkpoints of `folder`, oldest first; add incomplete ones to `problems`."""
    steps = {}
    for step, path in list_steps(folder).items():
        if str(path) in problems:
            continue
        if problem := find_problem(path) or _find_wrong_name(read_train_state(path), step):
            problems[str(path)] = problem
        else:
            steps[step] = _candidate(path, read_train_state(path))
    return steps


def _find_remote(
    folder: Path, config: job.Checkpoint, steps: dict[int, Candidate], problems: dict[str, str]
) -> dict[int, Candidate]:
    """Return the checkpoints in checkpoint.remote_folder that `folder` lacks: with load_step all, else newer ones."""
    assert config.remote_folder is not None
    full = [step for step, candidate in steps.items() if not candidate.model_only]
    oldest = max(full, default=-1) + 1 if config.load_step < 0 else 0
    found = {}
    for step, remote in Remote(config.remote_folder, is_new=not steps).list_steps().items():
        if step < oldest or step in steps or remote.address in problems:
            continue
        candidate = _inspect(remote, step_folder(folder, step), step)
        if isinstance(candidate, Candidate):
            found[step] = candidate
            continue
        logger.warning(f"skipping checkpoint {remote.address}: {candidate}")
        if not remote.is_leftover():  # of a killed save, so nothing can be lost
            problems[remote.address] = candidate
    return found


def _inspect(remote: Stored, path: Path, step: int) -> Candidate | str:
    """Return the checkpoint at an address, to be downloaded to `path`, or its problem."""
    if problem := remote.find_problem():
        return problem
    try:
        state = remote.read_train_state()
    except UserError as error:
        return str(error)
    return _find_wrong_name(state, step) or _candidate(path, state, remote.address)


def _candidate(path: Path, state: dict[str, Any], address: str | None = None) -> Candidate:
    since_best = state["train_state"].get("best", {}).get("since", 0)
    return Candidate(path, address, state["model_only"], since_best)


def _find_wrong_name(state: dict[str, Any], step: int) -> str | None:
    return None if state["step"] == step else f"it is of step {state['step']}, and was renamed"


def _find_newest(folder: Path, steps: dict[int, Candidate], num_steps: int | None, patience: int) -> Candidate:
    """Return the newest that can be resumed exactly, or the newest of all if nothing is left to train."""
    newest = max(steps)
    full = [step for step, candidate in steps.items() if not candidate.model_only]
    is_end = (num_steps is not None and newest >= num_steps) or is_used_up(patience, steps[newest].since_best)
    if newest in full or is_end:
        return steps[newest]
    if not full:
        raise UserError(
            f"job.dump_folder: {steps[newest].path} holds only the model "
            "(checkpoint.last_save_model_only = true), so training can't go on from it exactly; to begin a new run "
            "with its parameters, set checkpoint.initial_load_path to it and use another job.dump_folder"
        )
    return steps[full[-1]]


def _check_load_step(
    folder: Path, step: int, steps: dict[int, Candidate], problems: dict[str, str], num_steps: int | None
) -> None:
    option = f"checkpoint.load_step = {step}"
    if step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        bad = [problem for place, problem in problems.items() if place.endswith(f"/step-{step}")]
        why = f"that checkpoint is not whole: {bad[0]}" if bad else f"no such complete checkpoint in {folder}"
        raise UserError(f"{option}: {why}; there are: {there}")
    if steps[step].model_only and (num_steps is None or step < num_steps):
        raise UserError(f"{option}: that checkpoint holds only the model, so training can't go on from it exactly")


def _initial_places(folder: Path, config: job.Checkpoint) -> list[str]:
    """Return the place of checkpoint.initial_load_path, and of a remote one the path that it is downloaded to."""
    given = config.initial_load_path or ""
    if "://" not in given:
        return [str(Path(given))]
    address = given.removesuffix("/")
    return [address, str(folder / INITIAL / address.rpartition("/")[2])]


def _choose_initial(folder: Path, config: job.Checkpoint, problems: dict[str, str]) -> Candidate | None:
    if config.initial_load_path is None or config.initial_load_in_hf:
        return None  # in Hugging Face's format, the trainer loads it
    place, *fetched = _initial_places(folder, config)
    option = f"checkpoint.initial_load_path = {config.initial_load_path!r}"
    if fetched:
        with using("initial_load_path", place):
            initial = _find_initial(Remote(place, is_new=True).stored(), Path(fetched[0]), problems)
            inside = [remote.address for remote in Remote(place).list_steps().values()]
    else:
        path = Path(place)
        is_folder = os.path.isdir(path)  # false for a name that is too long, too
        problem = problems.get(place) or find_problem(path) if is_folder else "there is no such folder"
        initial = problem or Candidate(path, model_only=read_train_state(path)["model_only"])
        inside = list(map(str, find_below(path))) if problem and is_folder else []
        if problem and os.path.isfile(path / "config.json"):
            initial = f"{problem}; if it is in Hugging Face's format, set checkpoint.initial_load_in_hf = true"
    if not isinstance(initial, Candidate):
        hint = f"; did you mean one of {', '.join(inside)}?" if inside else ""
        raise UserError(f"{option} is not a checkpoint: {initial}{hint}")
    if not config.initial_load_model_only and initial.model_only:
        raise UserError(f"{option} holds only the model: set checkpoint.initial_load_model_only = true")
    return initial


def _find_initial(remote: Stored, path: Path, problems: dict[str, str]) -> Candidate | str:
    """Return the checkpoint at an address, or its copy at `path` if that has the same manifest, or its problem."""
    if remote.address in problems:
        return problems[remote.address]
    step = step_of(path.name)
    if step is None:
        return "there is no such folder, step-N"
    found = _inspect(remote, path, step)
    if isinstance(found, Candidate) and str(path) not in problems and find_problem(path) is None:
        same = read_manifest(path) == remote.read_manifest()
        return found._replace(address=None) if same else found
    return found
