"""Files at addresses that fsspec opens, such as s3://bucket/corpus: which there are, and which version each is of."""

import contextlib
import difflib
import itertools
import re
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs
from fsspec.utils import glob_translate

from torchtitan_graph.config.addresses import find_bad_address, is_pattern, path_of
from torchtitan_graph.errors import UserError
from torchtitan_graph.patience import look_up, retry_io
from torchtitan_graph.transient import causes, is_missing_bucket, is_refused, is_transient

# What file systems call the version of a file; the first few tell by content.
_VERSION = ("ETag", "etag", "blob_id", "md5Hash", "crc32c", "content_md5", "version_id", "generation", "mtime")
_FIND_OF_FSSPEC = [(AbstractFileSystem.find, _find) for _find in (None, AsyncFileSystem._find)]
_TIME = ("LastModified", "Last-Modified", "last_modified", "updated", "created")


class Found(NamedTuple):
    """A file at an address.

    address    of the file itself
    name       below the folder that was asked for, or of the file alone
    version    changes when the file is rewritten, as far as its file system shows
    """

    address: str
    name: str
    size: int
    version: tuple[tuple[str, str], ...]


class Listing(NamedTuple):
    """The files at an address, and whether it is a folder, or a pattern, and not the one file itself."""

    is_folder: bool
    files: list[Found]


def list_files(option: str, address: str, is_new: bool = True) -> Listing:
    """Return the files at an address: one, those that a pattern matches, or all in a folder, at any depth.

    is_new: as in `retry_io`.

    Raises UserError, which begins with the option, if there is none, or the address can't be listed.
    """
    what = f"{option} = {address!r}"
    with refuse_unlisted(what):
        return retry_io(lambda: _list_files(option, address), is_new, what)


def find_change(fs: Any, path: str, file: Found) -> str | None:
    """Return how a file of a file system differs from what was listed, None if it does not."""
    fs.invalidate_cache()  # other processes may have written since
    info = look_up(fs, path)
    if (size := int(info["size"] or 0)) != file.size:
        return f"had {file.size:,} bytes when it was opened, and has {size:,} now"
    if any(value != _text(info[key]) for key, value in file.version if info.get(key) is not None):
        return "was written since it was opened"
    return None


@contextlib.contextmanager
def refuse_unlisted(what: str) -> Iterator[None]:
    """Raise a UserError that begins with `what` for any error of a file system; transient ones pass through."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of many types: each file system has its own
        if is_transient(error):
            raise
        first = [*causes(error)][-1]
        said = " ".join(str(first).split()) or type(first).__name__
        hint = "; check the address, the credentials and the connection"
        raise UserError(f"{what}: can't be read: {said}{hint}") from error


def _list_files(option: str, address: str) -> Listing:
    where = f"{option} = {address!r}"
    if problem := find_bad_address(address):
        raise UserError(f"{where}: {problem}")
    fs, path = url_to_fs(address)
    fs.invalidate_cache()  # other processes may have written since
    if is_pattern(address) and not _is_there(fs, path):
        root = path[: min(path.index(mark) for mark in "*?[" if mark in path)].rpartition("/")[0]
        found = _matching(fs, root, path)
        if not found:
            raise UserError(f"{where}: matches no file")
    else:
        try:
            info = look_up(fs, path)
        except FileNotFoundError as error:
            if is_transient(error) or is_refused(error):  # of a web server that is away, or asks for a password
                raise
            kind = "file or folder" if "/" in path else "bucket"
            raise UserError(f"{where}: there is no such {kind}{_near(fs, path)}") from error
        if info["type"] != "directory":
            if info["size"] is None:
                raise UserError(f"{where}: its server does not tell its size: copy it to where it can be read by parts")
            return Listing(False, [_found(fs, info, path, "")])
        root, found = path.rstrip("/"), _files_in(fs, path)
    files = [_found(fs, info, name, root) for name, info in found.items() if info["type"] == "file"]
    by_name: dict[str, Found] = {}
    for file in files:
        if (other := by_name.setdefault(file.name, file)) is not file:
            raise UserError(f"{where}: {other.address} and {file.address} are both {file.name!r}: rename one")
    return Listing(True, [file for file in files if file.name])  # some stores have an object for the folder itself


def _is_there(fs: Any, path: str) -> bool:
    """Return whether something has a pattern as its name."""
    try:
        return bool(fs.info(path))
    except FileNotFoundError as error:
        if is_missing_bucket(error) or is_transient(error):
            raise
        return False


def _matching(fs: Any, root: str, pattern: str) -> dict[str, dict[str, Any]]:
    """Return the files below `root` that a pattern matches, or whose folder it does.

    Not by `fs.glob`, for which a folder whose listing fails is an empty one.
    """
    if "**" in pattern:
        whole = re.compile(glob_translate(pattern))
        return {name: info for name, info in _files_in(fs, root).items() if any(map(whole.match, _beginnings(name)))}
    found: dict[str, dict[str, Any]] = {}
    folders = [root]
    for depth in range(root.count("/") + 2 if root else 1, pattern.count("/") + 2):
        part = re.compile(glob_translate("/".join(pattern.split("/")[:depth])))
        entries = [entry for folder in folders for entry in _ls(fs, folder) if part.match(entry["name"].rstrip("/"))]
        folders = [entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory"]
        found = {entry["name"]: entry for entry in entries if entry["type"] == "file"}
    for folder in folders:
        found |= _files_in(fs, folder)
    return found


def _beginnings(name: str) -> Iterator[str]:
    return itertools.accumulate(name.split("/"), "{}/{}".format)


def _files_in(fs: Any, folder: str) -> dict[str, dict[str, Any]]:
    """Return the files in a folder, at any depth; for fsspec's own `find`, one whose listing fails is an empty one."""
    kind = type(fs)
    if (kind.find, getattr(kind, "_find", None)) not in _FIND_OF_FSSPEC:
        found: dict[str, dict[str, Any]] = fs.find(folder, detail=True)
        return found
    files: dict[str, dict[str, Any]] = {}
    folders = [folder.rstrip("/")]
    for each in folders:  # it grows
        entries = _ls(fs, each)
        files |= {entry["name"]: entry for entry in entries if entry["type"] == "file"}
        folders += [entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory"]
    return files


def _ls(fs: Any, folder: str) -> list[dict[str, Any]]:
    """Return what is in a folder, without the object that some stores have for itself."""
    try:
        return [entry for entry in fs.ls(folder, detail=True) if entry["name"].rstrip("/") != folder]
    except FileNotFoundError as error:
        if is_missing_bucket(error) or is_transient(error):
            raise
        return []


def _found(fs: Any, info: dict[str, Any], path: str, root: str) -> Found:
    name = path[len(root) :].lstrip("/") if root else path_of(path).rpartition("/")[2]
    if "::" in path:
        raise UserError(f"{path}: in an address '::' is between two protocols: give the file a name without it")
    version = _version(info) or _version(fs.info(path))  # some tell less in a list
    version = version or (("listed", str(time.time_ns())),)  # a server without any: what is kept is of this start
    return Found(fs.unstrip_protocol(path), name, int(info["size"] or 0), version)


def _version(info: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    for keys in (_VERSION, _TIME):
        if stamps := tuple((key, _text(info[key])) for key in keys if info.get(key) is not None):
            return stamps
    return ()


def _text(value: Any) -> str:
    return str(value.timestamp() if isinstance(value, datetime) else value)  # of one file both forms are met


def _near(fs: Any, path: str) -> str:
    """Return the end of a message about a file that is not there: what it may have been called."""
    folder, _, name = path.rstrip("/").rpartition("/")
    with contextlib.suppress(Exception):
        there = {each.rstrip("/").rpartition("/")[2]: each for each in fs.ls(folder, detail=False)}
        if nearest := difflib.get_close_matches(name, there, n=1):
            return f"; did you mean {fs.unstrip_protocol(there[nearest[0]])}?"
    return ""
