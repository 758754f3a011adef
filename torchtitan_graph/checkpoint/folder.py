"""Checkpoint folders on disk: checks that they are complete, and their atomic creation and deletion.

Note [Atomic save]: a save is written into `step-N.tmp`. Its last file is `manifest.json`, which lists every file with
its size and checksum: a folder that matches its manifest is whole. Then it is renamed to `step-N`, and a folder is
renamed to `step-N.deleting` before anything in it is deleted. Every file, and every folder after a rename, is flushed
to disk (fsync) before the next step. So a kill at any moment leaves all `step-N` whole, and leftovers that are
recognised by name.
"""

import contextlib
import errno
import functools
import itertools
import json
import os
import re
import shutil
import zlib
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch.distributed as dist

from torchtitan_graph.checkpoint.metadata import METADATA, read_metadata
from torchtitan_graph.config import JobConfig, run_folder
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.parallel.agree import RanksFailed, gather_from_ranks
from torchtitan_graph.patience import retry_io
from torchtitan_graph.small_files import (
    ANY_SIZE,
    BadFile,
    Count,
    check_type,
    open_small,
    read_json,
    sync,
    write_text,
)
from torchtitan_graph.transient import is_transient

MANIFEST = "manifest.json"
TRAIN_STATE = "train_state.json"
CONFIG = "config.toml"
TMP = ".tmp"  # suffix of a save that is not finished; a replica group's has its number behind it
CHECKPOINTS = "checkpoint"  # the folder of a run's checkpoints


def checkpoint_folder(config: JobConfig) -> Path:
    """Return the folder of a run's checkpoints: of replica groups that are equal after each step, one for all; of those
    that meet after several, one for each."""
    alone = config.fault_tolerance.semi_sync_method is not None
    return (run_folder(config) if alone else Path(config.job.dump_folder)) / CHECKPOINTS


# Schemas of the JSON files. Fields with a default need not be there.
class _Manifest(msgspec.Struct):
    files: dict[str, Count]
    crc32: dict[str, str] = {}


class _MixturePosition(msgspec.Struct):
    weights: list[float]
    since: Count
    given_before: list[Count]
    given: list[Count]


class _DataPosition(msgspec.Struct):
    rows: Count
    lanes: list[tuple[Count, Count, Count, Count]]
    mixture: _MixturePosition | msgspec.UnsetType = msgspec.UNSET


class _Best(msgspec.Struct):
    metric: str
    step: Count
    value: float
    since: Count


class _TrainerState(msgspec.Struct):
    step: Count = 0
    tokens_seen: Count = 0
    tokens_by_source: dict[str, Count] = {}
    data: _DataPosition | msgspec.UnsetType = msgspec.UNSET
    best: _Best | msgspec.UnsetType = msgspec.UNSET
    rng: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})*$")] = ""


class _Schedule(msgspec.Struct):
    num_steps_done: Count = 0


class _State(msgspec.Struct):
    step: Count
    model_only: bool
    train_state: _TrainerState
    lr_scheduler: _Schedule


_OF_A_RUN = {"tokens_seen", "data", "rng"}  # a run saves all of them; a model saved by itself has none


class File(NamedTuple):
    """A file's entry in the manifest: its size in bytes, and its checksum, which old manifests lack."""

    size: int
    crc32: str | None


def step_folder(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step`."""
    return folder / f"step-{step}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint's folder, None for any other name."""
    match = re.fullmatch(r"step-(0|[1-9]\d*)", name, re.ASCII)
    return int(match[1]) if match else None


def list_steps(folder: Path) -> dict[int, Path]:
    """Return the folders with a checkpoint's name in `folder`, oldest first."""
    steps = ((step_of(path.name), path) for path in folder.glob("step-*"))
    return dict(sorted((step, path) for step, path in steps if step is not None))


def find_steps(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints in `folder`, oldest first; warn about each that is not complete."""
    found = {}
    for step, path in list_steps(folder).items():
        if problem := find_problem(path):
            logger.warning(f"skipping checkpoint {path}: {problem}")
        else:
            found[step] = path
    return found


def find_below(path: Path) -> list[Path]:
    """Return the complete checkpoints in `path`, or if it has none, those in its subfolders, up to two levels deep."""
    for folders in ([path], path.glob("*"), path.glob("*/*")):
        found = [step for folder in sorted(folders) if folder.is_dir() for step in find_steps(folder).values()]
        if found:
            return found
    return []


def newest_below(path: Path) -> Path:
    """Return `path`, or the newest checkpoint of the run in it; raise UserError if it has several runs."""
    found = find_below(path) if os.path.isdir(path) and not (path / MANIFEST).exists() else []
    if len({step.parent for step in found}) > 1:
        raise UserError(f"{path} is not a checkpoint; did you mean one of {', '.join(map(str, found))}?")
    if found:
        logger.info(f"reading {found[-1]}, the newest checkpoint there")
    return found[-1] if found else path


def find_problem(path: Path) -> str | None:
    """Return the problem that makes a folder no complete checkpoint, None if there is none. Reads only small files."""
    try:
        files = read_manifest(path)
        read_train_state(path)
    except UserError as error:
        return str(error)
    return find_wrong_size(files, {name: (path / name).stat().st_size for name in files if (path / name).is_file()})


def find_wrong_size(files: dict[str, File], sizes: dict[str, int]) -> str | None:
    """Return a message about the first file of a manifest that `sizes` lacks or has with another size, or None."""
    for name, file in files.items():
        if name not in sizes:
            return f"its file {name} is missing"
        if sizes[name] != file.size:
            return f"its file {name} has {sizes[name]} bytes, not {file.size}"
    return None


def find_damage(path: Path, names: Iterable[str] | None = None) -> str | None:
    """Read files of a checkpoint (default: all), and return a message about the first damaged one, or None."""
    files = read_manifest(path)
    for name in files if names is None else names:
        try:
            if files[name].crc32 not in (None, retry_io(functools.partial(checksum, path / name))):
                return f"its file {name} is damaged: it is not what was written"
        except (OSError, BadFile) as error:
            if is_transient(error):
                raise
            return f"its file {name} can't be read: {error}"
    return None


def find_damage_together(path: Path, group: dist.ProcessGroup | None) -> str | None:
    """Run `find_damage` on all ranks, each with a part of the files. Raises RanksFailed for transient errors alone."""
    try:
        found = gather_from_ranks(lambda: find_damage(path, part_of_rank(read_manifest(path))), group)
    except RanksFailed as error:
        if is_transient(error):
            raise  # an older checkpoint is no better
        return str(error)
    return next(filter(None, found), None)


def part_of_rank(names: Iterable[str]) -> list[str]:
    """Return this rank's share of files that all ranks process together."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return sorted(names)[rank::world_size]


def read_manifest(path: Path) -> dict[str, File]:
    """Return the files of a checkpoint by name; raise UserError if `path` has no manifest, or an invalid one."""
    content = _read_json(path / MANIFEST, _Manifest)
    if not {TRAIN_STATE, METADATA} <= content["files"].keys():
        raise UserError(f"its {MANIFEST} does not list its files")
    for name, size in content["files"].items():
        if Path(name).name != name or name in ("", "..") or "\0" in name or len(name.encode()) > 255:
            raise UserError(f"its {MANIFEST} says {size} of {name[:100]!r}, which is not a file of this folder")
    sums = content.get("crc32", content["files"])  # old manifests have none; a damaged key would drop them
    if not content.keys() <= {"files", "crc32"} or sums.keys() != content["files"].keys():
        raise UserError(f"its {MANIFEST} is damaged: it has not a checksum of each of its files")
    return {name: File(size, content.get("crc32", {}).get(name)) for name, size in content["files"].items()}


def read_train_state(path: Path) -> dict[str, Any]:
    """Return everything of a checkpoint that is not a tensor; raise UserError if that is missing or invalid."""
    state = _read_json(path / TRAIN_STATE, _State)
    held = state["train_state"].keys()
    lacking = sorted(_OF_A_RUN - held) if held & _OF_A_RUN else []
    if not state["model_only"] and "num_steps_done" not in state["lr_scheduler"]:
        lacking.append("num_steps_done")
    if lacking:
        raise UserError(f"its {TRAIN_STATE} lacks {', '.join(lacking)}")
    return state


def checksum(path: Path) -> str:
    """Return a file's CRC-32: it finds damage, not forgery."""
    crc = 0
    with open_small(path, ANY_SIZE) as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


def clean_up(folder: Path, unfinished: str = TMP) -> None:
    """Create the folder of a run's checkpoints; finish or delete the leftovers of a killed save in it.

    `unfinished` is the suffix of the saves of this run, or of this replica group's: others may be saving.

    Raises OSError if nothing can be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} can't be written to")
    for path in folder.glob(f"step-*{unfinished}"):
        if find_problem(path) is None and find_problem(path.with_suffix("")):
            logger.warning(f"finishing the save of {path.with_suffix('')}, which was killed when it was all but done")
            commit(path)
        else:
            logger.warning(f"deleting {path}, which a killed save left unfinished")
            _delete(path)
    for path in folder.glob("step-*.deleting"):
        _delete(path)


def prepare(tmp: Path) -> None:
    """Create the empty folder of a save."""
    clean_up(tmp.parent, tmp.suffix)
    tmp.mkdir()


def write_train_state(tmp: Path, state: dict[str, Any]) -> None:
    """Write everything except tensors."""
    write_text(tmp / TRAIN_STATE, json.dumps(state, indent=1))


def write_manifest(tmp: Path, sums: dict[str, str]) -> None:
    """Mark `tmp` as complete, after a check. `sums` are checksums that other ranks computed."""
    metadata = read_metadata(tmp)
    for name in sorted({info.relative_path for info in metadata.storage_data.values()}):
        if not (tmp / name).is_file():
            raise UserError(
                f"{tmp / name} was written by another rank, and rank 0 can't see it: "
                "job.dump_folder must be on storage that all nodes share"
            )
    files = sorted(tmp.iterdir())
    sizes = {path.name: path.stat().st_size for path in files}
    manifest = {"files": sizes, "crc32": {path.name: sums.get(path.name) or checksum(path) for path in files}}
    write_text(tmp / MANIFEST, json.dumps(manifest, indent=1))
    sync(tmp)


def commit(tmp: Path) -> None:
    """Rename a complete folder to its final name. A checkpoint with that name is deleted, or if it has only the model,
    as the last one of a shorter run, renamed."""
    final = tmp.with_suffix("")
    while True:
        with contextlib.suppress(FileNotFoundError):  # another replica group has deleted it
            if os.path.lexists(final):  # a dangling link too
                kept = name_for_model(final.name, {path.name for path in final.parent.iterdir()})
                _rename(final, final.with_name(kept) if is_model_only(final) else final.with_suffix(".deleting"))
        try:
            return _rename(tmp, final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another group has saved the same step
                raise


def is_model_only(path: Path) -> bool:
    """Return whether a folder is a checkpoint of the model alone."""
    return find_problem(path) is None and read_train_state(path)["model_only"]


def name_for_model(name: str, taken: Container[str]) -> str:
    """Return the new name of the model in `name`: `step-N-model`, or that with a number."""
    kept = f"{name}-model"
    return next(
        free for free in itertools.chain([kept], (f"{kept}-{n}" for n in itertools.count(2))) if free not in taken
    )


def prune(newest: Path, keep_latest_k: int, keep_every: int, keep_best: bool = False) -> None:
    """Delete all complete checkpoints except `newest`, just written, and the `keep_latest_k - 1` of the highest steps.

    0 keeps all. Those of a multiple of `keep_every` steps, where that is not 0, are never deleted; nor are those of the
    model alone, nor with `keep_best` the best one.
    """
    steps = {step: path for step, path in find_steps(newest.parent).items() if not is_model_only(path)}
    for step in excess_steps(steps, step_of(newest.name), keep_latest_k, keep_every, best_step(newest, keep_best)):
        with contextlib.suppress(FileNotFoundError):  # another replica group deletes it
            _rename(steps[step], steps[step].with_suffix(".deleting"))
    for path in newest.parent.glob("step-*.deleting"):
        _delete(path)


def best_step(newest: Path, keep_best: bool) -> int | None:
    """Return the step of the best checkpoint of a run whose newest one this is, None without one to keep."""
    best = read_train_state(newest)["train_state"].get("best") if keep_best else None
    return best and best["step"]


def excess_steps(
    steps: Iterable[int], newest: int | None, keep_latest_k: int, keep_every: int, best: int | None = None
) -> list[int]:
    """Return the steps whose checkpoints `prune` deletes, here and at an address."""
    others = sorted(step for step in steps if step != newest)
    excess = others[: max(len(others) - (keep_latest_k - 1), 0)] if keep_latest_k else []
    return [step for step in excess if step != best and (not keep_every or step % keep_every)]


def _delete(path: Path) -> None:
    """Delete a folder, a file of that name, or a link but not its target."""
    with contextlib.suppress(FileNotFoundError):  # another replica group deletes it
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _rename(old: Path, new: Path) -> None:
    os.rename(old, new)
    sync(new.parent)


def _read_json(path: Path, schema: type) -> dict[str, Any]:
    """Return the content of a JSON file, with all its keys, after a check of those of `schema`."""
    where = f"its {path.name}"
    try:
        found = retry_io(lambda: read_json(path, dict[str, Any], where=where))
    except FileNotFoundError:
        raise UserError(f"it has no {path.name}") from None
    except OSError as error:
        if is_transient(error):
            raise  # an older checkpoint is no better
        raise UserError(f"{where} can't be read ({error!r})") from error
    check_type(found, schema, where)
    return found
