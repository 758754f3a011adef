"""Upload checkpoints to an address that fsspec opens, such as s3://bucket/run, and fetch them.

Note [Whole at an address]: object stores have no rename. A checkpoint there is whole when it has a `manifest.json`,
which is written last and deleted first, and all files have the sizes in it. Its `train_state.json` is written first and
deleted last: a folder with it and without a manifest is the leftover of a killed upload or deletion.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from fsspec.core import url_to_fs

from torchtitan_graph.checkpoint.folder import (
    MANIFEST,
    TRAIN_STATE,
    File,
    best_step,
    commit,
    excess_steps,
    find_damage_together,
    find_problem,
    find_wrong_size,
    is_model_only,
    list_steps,
    name_for_model,
    part_of_rank,
    read_manifest,
    read_train_state,
    step_of,
)
from torchtitan_graph.config import job
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.parallel.agree import describe, on_all_ranks, on_rank_0
from torchtitan_graph.small_files import MAX_BYTES, sync

T = TypeVar("T")


class Remote:
    """A folder at an address: of a run's checkpoints, or of one of them.

    Every method may raise any error of a file system that is unreachable or refuses.
    """

    def __init__(self, address: str) -> None:
        self.address = address.removesuffix("/")
        self.fs, path = url_to_fs(self.address)  # cached: opening one again costs nothing
        self.path = path.rstrip("/")

    def list_steps(self) -> dict[int, "Remote"]:
        """Return the folders with a checkpoint's name in this folder, oldest first."""
        steps = sorted(step for name in self.entries() if (step := step_of(name)) is not None)
        return {step: Remote(f"{self.address}/step-{step}") for step in steps}

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the files in this folder by name; none where there is no folder."""
        return {name: entry["size"] for name, entry in self.entries().items() if entry["type"] == "file"}

    def find_problem(self) -> str | None:
        """Return the problem that makes this folder no complete checkpoint, or None. See Note [Whole at an address]."""
        try:
            return find_wrong_size(self.read_manifest(), self.sizes())
        except UserError as error:
            return str(error)

    def is_leftover(self) -> bool:
        """Return whether this is the leftover of a killed upload or deletion. See Note [Whole at an address]."""
        sizes = self.sizes()
        return TRAIN_STATE in sizes and MANIFEST not in sizes

    def read_manifest(self) -> dict[str, File]:
        """Return the manifest, like `folder.read_manifest`."""
        return self._read(MANIFEST, read_manifest)

    def read_train_state(self) -> dict[str, Any]:
        """Return the state, like `folder.read_train_state`."""
        return self._read(TRAIN_STATE, read_train_state)

    def put(self, folder: Path, names: Iterable[str]) -> None:
        """Upload files of `folder`."""
        with contextlib.suppress(PermissionError):  # creating a folder in storage without folders
            self.fs.makedirs(self.path, exist_ok=True)
        for name in names:
            self.fs.put_file(str(folder / name), f"{self.path}/{name}")

    def get(self, names: Iterable[str], folder: Path) -> None:
        """Download files of this folder to `folder`; they are plain names, as `read_manifest` checks."""
        for name in names:
            self.fs.get_file(f"{self.path}/{name}", str(folder / name))
            sync(folder / name)

    def is_model_only(self) -> bool:
        """Return whether this is a checkpoint of the model alone."""
        return self.find_problem() is None and self.read_train_state()["model_only"]

    def copy_to(self, other: "Remote") -> None:
        """Copy the checkpoint in this folder to another of this storage. See Note [Whole at an address]."""
        with contextlib.suppress(PermissionError):
            other.fs.makedirs(other.path, exist_ok=True)
        for name in sorted(self.read_manifest(), key=lambda name: name != TRAIN_STATE) + [MANIFEST]:
            self.fs.cp_file(f"{self.path}/{name}", f"{other.path}/{name}")

    def delete(self) -> None:
        """Delete this folder, if it is there. See Note [Whole at an address]."""
        for name in sorted(self.sizes(), key=lambda name: (name != MANIFEST, name == TRAIN_STATE)):
            self.fs.rm_file(f"{self.path}/{name}")
        with contextlib.suppress(OSError):  # without its files a folder may not exist
            self.fs.rmdir(self.path)

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return the entries of this folder by name, as fsspec describes them; none where there is no folder."""
        # Not `find` or `glob`, for which unreachable storage is an empty folder.
        self.fs.invalidate_cache()  # other processes write here too
        try:
            entries = self.fs.ls(self.path, detail=True)
        except FileNotFoundError:
            return {}
        return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in entries}

    def _read(self, name: str, reader: Callable[[Path], T]) -> T:
        sizes = self.sizes()
        if sizes.get(name, 0) > MAX_BYTES:
            raise UserError(f"its {name} has {sizes[name]:,} bytes, more than the {MAX_BYTES:,} that it may have")
        with tempfile.TemporaryDirectory() as folder:
            if name in sizes:  # the reader has the message for a missing file
                with contextlib.suppress(FileNotFoundError):
                    self.get([name], Path(folder))
            return reader(Path(folder))


@contextlib.contextmanager
def using(option: str, address: str) -> Iterator[None]:
    """Convert any error in using a remote address at a run's start into a UserError."""
    try:
        yield
    except Exception as error:
        raise UserError(
            f"checkpoint.{option}: {address} can't be used ({describe(error)}); a run does not go on without it, from "
            "an older checkpoint or from none: check the address, the credentials and the connection"
        ) from error


def upload(newest: Path, config: job.Checkpoint, group: dist.ProcessGroup | None) -> None:
    """Upload every checkpoint that checkpoint.remote_folder lacks, then prune there; all ranks together.

    `newest` was just saved. Checkpoints are compared by manifest, and so by checksum: a step that was saved again is
    uploaded again. An error on one rank is raised on all. Checkpoints that were whole there still are, except perhaps a
    step that was saved again.
    """
    assert config.remote_folder is not None
    address = config.remote_folder.removesuffix("/")
    missing, excess = on_rank_0(lambda: _compare(newest, address, config), group)
    for step in missing:
        _upload_one(newest.with_name(f"step-{step}"), f"{address}/step-{step}", group)
    for step in excess:
        on_rank_0(Remote(f"{address}/step-{step}").delete, group)


def _compare(newest: Path, address: str, config: job.Checkpoint) -> tuple[list[int], list[int]]:
    """Return the steps to upload to `address`, and those to delete there."""
    here = {step: path for step, path in list_steps(newest.parent).items() if find_problem(path) is None}
    there = Remote(address).list_steps()
    whole = {step for step, remote in there.items() if remote.find_problem() is None}
    full = {step for step, path in here.items() if not is_model_only(path)}
    full |= {step for step in whole.difference(here) if not there[step].is_model_only()}
    excess = set(
        excess_steps(
            full,
            step_of(newest.name),
            config.keep_latest_k,
            config.keep_every,
            best_step(newest, config.keep_best),
        )
    )
    missing = [
        step
        for step, path in here.items()
        if step not in excess and (step not in whole or there[step].read_manifest() != read_manifest(path))
    ]
    leftovers = {step for step, remote in there.items() if step not in missing and remote.is_leftover()}
    return missing, sorted(excess & whole | leftovers)


def _upload_one(path: Path, address: str, group: dist.ProcessGroup | None) -> None:
    names = on_rank_0(lambda: _begin_upload(path, address), group)
    on_all_ranks(lambda: Remote(address).put(path, part_of_rank(names)), group)
    on_rank_0(lambda: _finish_upload(path, address), group)
    logger.info(f"copied checkpoint {path} to {address}")


def _begin_upload(path: Path, address: str) -> list[str]:
    remote = Remote(address)
    if remote.is_model_only():
        folder = Remote(address.rpartition("/")[0])
        remote.copy_to(Remote(f"{folder.address}/{name_for_model(path.name, folder.entries())}"))
    remote.delete()
    remote.put(path, [TRAIN_STATE])
    return [name for name in read_manifest(path) if name != TRAIN_STATE]


def _finish_upload(path: Path, address: str) -> None:
    remote = Remote(address)
    if problem := find_wrong_size(read_manifest(path), remote.sizes()):
        raise OSError(f"{address} is not what was written: {problem}")
    remote.put(path, [MANIFEST])


def fetch(address: str, path: Path, group: dist.ProcessGroup | None) -> str | None:
    """Download the checkpoint at `address` to `path`, if it is undamaged; else return its problem.

    All ranks together: an error on one is raised on all. A folder at `path` is replaced. See Note [Atomic save].
    """
    tmp = path.with_suffix(".tmp")
    names = on_rank_0(lambda: _begin_fetch(address, tmp), group)
    on_all_ranks(lambda: Remote(address).get(part_of_rank(names), tmp), group)
    problem = on_rank_0(lambda: _finish_fetch(address, tmp, names), group) or find_damage_together(tmp, group)
    on_rank_0(lambda: shutil.rmtree(tmp) if problem else commit(tmp), group)
    if not problem:
        logger.info(f"fetched checkpoint {path} from {address}")
    return problem


def _begin_fetch(address: str, tmp: Path) -> list[str]:
    names = list(Remote(address).read_manifest())
    tmp.parent.mkdir(parents=True, exist_ok=True)
    for leftover in (tmp, tmp.with_suffix(".deleting")):
        if leftover.exists():
            shutil.rmtree(leftover)
    tmp.mkdir()
    return names


def _finish_fetch(address: str, tmp: Path, names: list[str]) -> str | None:
    for name in names:
        if not (tmp / name).is_file():
            raise FileNotFoundError(
                f"{tmp / name} was fetched by another rank, and rank 0 can't see it: job.dump_folder must be on "
                "storage that all nodes share"
            )
    Remote(address).get([MANIFEST], tmp)  # last, so that no partial checkpoint can be taken for a whole one
    sync(tmp)
    return find_problem(tmp)
