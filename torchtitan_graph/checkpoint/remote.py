"""Upload checkpoints to an address that fsspec opens, such as s3://bucket/run, and fetch them.

Note [Whole at an address]: object stores have no rename. A checkpoint there is whole when it has a `manifest.json`,
which is written last and deleted first, and all files have the sizes in it. Its `train_state.json` is written first and
deleted last: a folder with it and without a manifest is the leftover of a killed upload or deletion.
"""

import contextlib
import functools
import inspect
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
from torchtitan_graph.patience import look_up, retry_io
from torchtitan_graph.small_files import MAX_BYTES, BadFile, sync
from torchtitan_graph.transient import is_transient

T = TypeVar("T")
_BEGIN = "step-"  # of the names of checkpoints' folders
# Keys of what fsspec says of a file that change when it is written again, in one file system or another.
_STAMPS = ("ETag", "LastModified", "etag", "md5Hash", "updated", "content_md5", "last_modified", "mtime", "created")


class Remote:
    """A folder at an address: of a run's checkpoints, or of one of them.

    Every method may raise any error of a file system that is unreachable or refuses; transient ones are retried first.
    """

    def __init__(self, address: str, is_new: bool = False) -> None:
        """`is_new` is as in `retry_io`."""
        self._is_new = is_new
        self.address = address.removesuffix("/")
        self.fs, path = url_to_fs(self.address)  # cached: opening one again costs nothing
        self.path = path.rstrip("/")
        # A store that lists all files with a prefix in one request has no folders; the others have, as disks do.
        self._is_flat = "prefix" in inspect.signature(getattr(self.fs, "_find", self.fs.find)).parameters
        self._read_before: dict[str, Any] = {}  # small files' content, by their place and stamp

    def _retry(self, function: Callable[[], T]) -> T:
        return retry_io(function, self._is_new, self.address)

    def list_steps(self) -> dict[int, "Stored"]:
        """Return the checkpoints in this folder, oldest first, as one listing finds them. See `list_folders`."""
        found = ((step_of(name), stored) for name, stored in self.list_folders().items())
        return dict(sorted((step, stored) for step, stored in found if step is not None))

    def list_folders(self) -> dict[str, "Stored"]:
        """Return the folders in this one whose names begin with "step-", by name.

        An object store is asked once for all of it. What was read of them before, and is as it was, is not read again.
        """
        listed = self._list_flat() if self._is_flat else self._list_each()
        kept: dict[str, Any] = {}
        folders = {name: Stored(f"{self.address}/{name}", entries, kept) for name, entries in listed.items()}
        for folder in folders.values():
            kept |= {key: self._read_before[key] for key in folder.small_files() if key in self._read_before}
        self._read_before = kept
        return folders

    def _list_flat(self) -> dict[str, dict[str, Any]]:
        """Return the entries of each folder, listed in one request; of a large store one for some thousand files."""
        self.fs.invalidate_cache()  # other processes write here too
        found = self._retry(lambda: self.fs.find(self.path, detail=True, prefix=_BEGIN))
        listed: dict[str, dict[str, Any]] = {}
        for path, entry in found.items():
            folder, _, name = path.removeprefix(f"{self.path}/").partition("/")
            if folder.startswith(_BEGIN) and name and "/" not in name:
                listed.setdefault(folder, {})[name] = entry
        return listed

    def _list_each(self) -> dict[str, dict[str, Any]]:
        names = [name for name in self.entries() if name.startswith(_BEGIN)]
        return {name: Remote(f"{self.address}/{name}").entries() for name in names}

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return the entries of this folder by name, as fsspec describes them; none where there is no folder.

        A bucket that does not exist is an error: a run must not start from step 0 because its bucket can't be reached.
        """
        # Not `find` or `glob`, for which unreachable storage is an empty folder.
        self.fs.invalidate_cache()  # other processes write here too
        try:
            entries = self._retry(lambda: self.fs.ls(self.path, detail=True))
        except FileNotFoundError as error:
            if self._is_flat and error.__cause__ is not None:  # the store's own answer: an empty folder has none
                raise
            return {}
        return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in entries}

    def stored(self) -> "Stored":
        """Return the checkpoint that this folder is, as it is listed now."""
        return Stored(self.address, self.entries(), {})

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the files in this folder by name; none where there is no folder."""
        return self.stored().files

    def put(self, folder: Path, names: Iterable[str]) -> None:
        """Upload files of `folder`; raise OSError if one of them is not there then as it was written."""
        if not self._is_flat:
            with contextlib.suppress(PermissionError):  # creating a folder in storage without folders
                self._retry(lambda: self.fs.makedirs(self.path, exist_ok=True))
        for name in names:
            path = f"{self.path}/{name}"
            self._retry(functools.partial(self.fs.put_file, str(folder / name), path))
            self.fs.invalidate_cache()
            found, size = self._retry(functools.partial(look_up, self.fs, path))["size"], (folder / name).stat().st_size
            if found != size:
                problem = f"its file {name} has {found} bytes, not {size}"
                raise OSError(f"{self.address} is not what was written: {problem}")

    def get(self, names: Iterable[str], folder: Path) -> None:
        """Download files of this folder to `folder`; they are plain names, as `read_manifest` checks."""
        for name in names:
            self._retry(functools.partial(self.fs.get_file, f"{self.path}/{name}", str(folder / name)))
            sync(folder / name)

    def read(self, name: str) -> bytes | None:
        """Return a small file's content, None if it is not there; nothing is retried."""
        path = f"{self.path}/{name}"
        self.fs.invalidate_cache()  # other processes write here too
        with _missing_file():
            if (size := look_up(self.fs, path)["size"]) > MAX_BYTES:
                raise BadFile(f"{self.address}/{name}: has {size:,} bytes, more than {MAX_BYTES:,}")
            content: bytes = self.fs.cat_file(path)
            return content
        return None

    def write(self, name: str, content: bytes) -> None:
        """Replace a small file in this folder, which is there; nothing is retried."""
        self.fs.pipe_file(f"{self.path}/{name}", content)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files of this folder; those that are not there are no error."""
        for name in names:
            with _missing_file():  # such as after a first try whose answer was lost
                self._retry(functools.partial(self.fs.rm_file, f"{self.path}/{name}"))

    def delete_folder(self) -> None:
        """Delete this folder, which is empty, where a file system has folders."""
        if not self._is_flat:
            with contextlib.suppress(OSError):  # without its files a folder may not exist
                self.fs.rmdir(self.path)


class Stored(Remote):
    """A checkpoint at an address as it was listed. See Note [Whole at an address]."""

    def __init__(self, address: str, entries: dict[str, dict[str, Any]], read_before: dict[str, Any]) -> None:
        super().__init__(address)
        self._listed, self._read_before = entries, read_before
        self.files = {name: entry["size"] for name, entry in entries.items() if entry["type"] == "file"}

    def find_problem(self) -> str | None:
        """Return the problem that makes this folder no complete checkpoint, or None."""
        try:
            return find_wrong_size(self.read_manifest(), self.files)
        except UserError as error:
            return str(error)

    def is_leftover(self) -> bool:
        """Return whether this is the leftover of a killed upload or deletion."""
        return TRAIN_STATE in self.files and MANIFEST not in self.files

    def read_manifest(self) -> dict[str, File]:
        """Return the manifest, like `folder.read_manifest`."""
        return self._read(MANIFEST, read_manifest)

    def read_train_state(self) -> dict[str, Any]:
        """Return the state, like `folder.read_train_state`."""
        return self._read(TRAIN_STATE, read_train_state)

    def is_model_only(self) -> bool:
        """Return whether this is a checkpoint of the model alone."""
        return self.find_problem() is None and self.read_train_state()["model_only"]

    def copy_to(self, other: Remote) -> None:
        """Copy this checkpoint to another folder of this storage."""
        if not self._is_flat:
            self._retry(lambda: other.fs.makedirs(other.path, exist_ok=True))
        for name in sorted(self.read_manifest(), key=lambda name: name != TRAIN_STATE) + [MANIFEST]:
            self._retry(functools.partial(self.fs.cp_file, f"{self.path}/{name}", f"{other.path}/{name}"))

    def small_files(self) -> list[str]:
        """Return the keys under which the content of this folder's small files is remembered."""
        return [key for name in (MANIFEST, TRAIN_STATE) if (key := self._key(name))]

    def _key(self, name: str) -> str | None:
        """Return a text that is another one once a file is written again; None if the file system has no such."""
        entry = self._listed.get(name, {})
        stamp = [f"{key} {entry[key]}" for key in _STAMPS if key in entry]
        return f"{self.path}/{name} {entry['size']} {stamp}" if stamp else None

    def _read(self, name: str, reader: Callable[[Path], T]) -> T:
        key = self._key(name)
        if key is not None and key in self._read_before:
            known: T = self._read_before[key]
            return known
        if self.files.get(name, 0) > MAX_BYTES:
            raise UserError(f"its {name} has {self.files[name]:,} bytes, more than the {MAX_BYTES:,} that it may have")
        with tempfile.TemporaryDirectory() as folder:
            if name in self.files:  # the reader has the message for a missing file
                with _missing_file():
                    self.get([name], Path(folder))
            found = reader(Path(folder))
        if key is not None:
            self._read_before[key] = found
        return found


@contextlib.contextmanager
def _missing_file() -> Iterator[None]:
    """Go on without a file that is not there; a bucket that is gone is an error."""
    try:
        yield
    except FileNotFoundError as error:
        if is_transient(error):
            raise


@contextlib.contextmanager
def using(option: str, address: str) -> Iterator[None]:
    """Convert an error in using a remote address at a run's start into a UserError, unless it is transient."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or is_transient(error):
            raise
        raise UserError(
            f"checkpoint.{option}: {address} can't be used ({describe(error)}); a run does not go on without it, from "
            "an older checkpoint or from none: check the address, the credentials and the connection"
        ) from error


class Copies:
    """The copies of a run's checkpoints at checkpoint.remote_folder."""

    def __init__(self, config: job.Checkpoint, group: dist.ProcessGroup | None) -> None:
        assert config.remote_folder is not None
        self._config, self._group = config, group
        self._remote = Remote(config.remote_folder)

    def update(self, newest: Path) -> None:
        """Upload every checkpoint that the address lacks, then prune there; all ranks together.

        `newest` was just saved. Checkpoints are compared by manifest, and so by checksum: a step that was saved again
        is uploaded again. An error on one rank is raised on all. Checkpoints that were whole there still are, except
        perhaps a step that was saved again.
        """
        there: dict[str, Stored] = {}  # on rank 0
        missing, excess = on_rank_0(lambda: self._compare(newest, there), self._group)
        for step in missing:
            self._upload(newest.with_name(f"step-{step}"), there)
        for step in excess:
            self._delete(f"step-{step}", there)

    def _compare(self, newest: Path, there: dict[str, Stored]) -> tuple[list[int], list[int]]:
        """Return the steps to upload, and those to delete at the address; `there` becomes what is listed there."""
        config = self._config
        there |= self._remote.list_folders()
        steps = {step: stored for name, stored in there.items() if (step := step_of(name)) is not None}
        here = {step: path for step, path in list_steps(newest.parent).items() if find_problem(path) is None}
        whole = {step for step, stored in steps.items() if stored.find_problem() is None}
        full = {step for step, path in here.items() if not is_model_only(path)}
        full |= {step for step in whole.difference(here) if not steps[step].is_model_only()}
        best = best_step(newest, config.keep_best)
        excess = set(excess_steps(full, step_of(newest.name), config.keep_latest_k, config.keep_every, best))
        missing = [
            step
            for step, path in here.items()
            if step not in excess and (step not in whole or steps[step].read_manifest() != read_manifest(path))
        ]
        leftovers = {step for step, stored in steps.items() if step not in missing and stored.is_leftover()}
        return missing, sorted(excess & whole | leftovers)

    def _upload(self, path: Path, there: dict[str, Stored]) -> None:
        remote = Remote(f"{self._remote.address}/{path.name}")
        on_rank_0(lambda: _keep_model(path.name, there), self._group)
        self._delete(path.name, there)
        names = on_rank_0(lambda: _begin_upload(path, remote), self._group)
        on_all_ranks(lambda: remote.put(path, part_of_rank(names)), self._group)
        on_rank_0(lambda: remote.put(path, [MANIFEST]), self._group)
        logger.info(f"copied checkpoint {path} to {remote.address}")

    def _delete(self, name: str, there: dict[str, Stored]) -> None:
        """Delete a folder there, if it is there. See Note [Whole at an address]."""
        remote, group = Remote(f"{self._remote.address}/{name}"), self._group
        files = on_rank_0(lambda: [*there[name].files] if name in there else [], group)
        if not files:
            return
        others = [file for file in files if file not in (MANIFEST, TRAIN_STATE)]
        on_rank_0(lambda: remote.delete(file for file in files if file == MANIFEST), group)
        on_all_ranks(lambda: remote.delete(part_of_rank(others)), group)
        on_rank_0(lambda: remote.delete(file for file in files if file == TRAIN_STATE), group)
        on_rank_0(remote.delete_folder, group)


def _keep_model(name: str, there: dict[str, Stored]) -> None:
    """Copy the folder of that name, if it is a checkpoint of the model alone, to another name."""
    if name in there and there[name].is_model_only():
        folder = there[name].address.rpartition("/")[0]
        there[name].copy_to(Remote(f"{folder}/{name_for_model(name, there)}"))


def _begin_upload(path: Path, remote: Remote) -> list[str]:
    """Upload a checkpoint's first file, and return the names of those that follow, but the last."""
    remote.put(path, [TRAIN_STATE])
    return [name for name in read_manifest(path) if name != TRAIN_STATE]


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
    names = list(Remote(address).stored().read_manifest())
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
