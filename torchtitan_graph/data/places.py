"""Where a corpus is: a file, a folder or a pattern, here or at an address, and the files that it has."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from torchtitan_graph.config.addresses import is_address, is_pattern
from torchtitan_graph.data.addresses import Found, Listing, list_files
from torchtitan_graph.data.files import DataFile
from torchtitan_graph.data.node_cache import NodeCache
from torchtitan_graph.data.remote_file import RemoteFile
from torchtitan_graph.errors import UserError
from torchtitan_graph.patience import near_path, refuse_unreadable


class Place:
    """The files of a corpus by name, in their order; of a folder and a pattern the names are those below its root.

    path    as it was named
    """

    def __init__(self, path: str, is_folder: bool, files: dict[str, Path | Found], cache: NodeCache) -> None:
        self.path, self.is_folder, self._files, self._cache = path, is_folder, files, cache

    @property
    def names(self) -> Sequence[str]:
        return list(self._files)

    @property
    def is_remote(self) -> bool:
        """Whether it is an address."""
        return is_address(self.path)

    def open(self, name: str) -> DataFile:
        """Return a file by its name; raise UserError if there is none, or it is no regular file."""
        if (found := self._files.get(name)) is None:
            raise UserError(f"{self.path.rstrip('/')}/{name} is missing")
        if isinstance(found, Found):
            return RemoteFile(found, self._cache)
        with refuse_unreadable(str(found)):
            return DataFile(found, name)


def find_place(option: str, path: str, cache: NodeCache, listing: Listing | None = None) -> Place:
    """Return the place that an option names, without hidden files; `listing` is that of an address, where it is known.

    Raises UserError if there is nothing, or it can't be listed.
    """
    path = path.removeprefix("file://")
    if is_address(path):
        is_folder, found = listing or list_files(option, path)
        return _place(path, is_folder, {file.name: file for file in found}, cache)
    here = local_path(option, path)
    with refuse_unreadable(f"{option} = {path!r}"):
        if here.is_file():
            return Place(path, False, {here.name: here}, cache)
        if here.is_dir():
            return _place(path, True, _files_in(here, here), cache)
        if here.exists():
            raise UserError(f"{option} = {path!r}: is not a regular file, but a FIFO, a socket or a device")
        if not is_pattern(path):
            raise UserError(f"{option} = {path!r}: there is no such file or folder{near_path(here)}")
        parts = here.parts
        folders = [Path(*parts[:number]) for number in range(len(parts))]
        root = next(each for each in reversed(folders) if each.is_dir())
        files: dict[str, Path | Found] = {}
        for each in map(root.joinpath, sorted(glob.glob(str(here.relative_to(root)), root_dir=root, recursive=True))):
            files |= _files_in(each, root) if each.is_dir() else {str(each.relative_to(root)): each}
        if not files:
            raise UserError(f"{option} = {path!r}: matches no file")
        return _place(path, True, files, cache)


def local_path(option: str, path: str) -> Path:
    """Return a path of the file system; raise UserError if it can't be one."""
    with refuse_unreadable(f"{option} = {path!r}"):
        try:
            found = Path(path).expanduser()
            found.resolve()
        except (RuntimeError, ValueError) as error:  # no such user, a circle of links; a zero byte
            raise UserError(f"{option} = {path!r}: is not a place: {error}") from error
    return found


def same_place(option: str, path: str) -> str:
    """Return what is equal for two names of a place."""
    path = path.removeprefix("file://")
    return path.rstrip("/") if is_address(path) else str(local_path(option, path).resolve())


def _place(path: str, is_folder: bool, files: dict[str, Path | Found], cache: NodeCache) -> Place:
    shown = {name: file for name, file in files.items() if not is_folder or not _is_hidden(name)}
    return Place(path, is_folder, {name: shown[name] for name in sorted(shown, key=lambda x: x.split("/"))}, cache)


def _files_in(folder: Path, root: Path) -> dict[str, Path | Found]:
    files: dict[str, Path | Found] = {}
    for parent, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        folders[:] = [name for name in folders if not _is_hidden(name) and not _leads_back(Path(parent, name))]
        files |= {str(Path(parent, name).relative_to(root)): Path(parent, name) for name in names}
    return files


def _is_hidden(name: str) -> bool:
    *folders, last = name.split("/")
    return last.startswith(".") or any(folder.startswith((".", "__pycache__")) for folder in folders)


def _leads_back(folder: Path) -> bool:
    """Return whether a folder is a link to one that it is in."""
    return folder.is_symlink() and folder.resolve() in (here := folder.parent.resolve(), *here.parents)


def _raise(error: OSError) -> None:  # a folder that can't be listed; os.walk would leave it out
    raise error
