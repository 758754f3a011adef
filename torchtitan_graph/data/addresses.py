"""Files at addresses that fsspec opens, such as s3://bucket/corpus: which there are, and which version each is of."""

import contextlib
import difflib
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple

from fsspec.core import url_to_fs

from torchtitan_graph.config.addresses import find_bad_address, is_pattern
from torchtitan_graph.errors import UserError
from torchtitan_graph.patience import retry_io
from torchtitan_graph.transient import is_transient

# What file systems call the version of a file; the first few tell by content.
_VERSION = ("ETag", "etag", "blob_id", "md5Hash", "crc32c", "content_md5", "version_id", "generation", "mtime")
_TIME = ("LastModified", "last_modified", "updated", "created")


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
    with refuse_unlisted(f"{option} = {address!r}"):
        return retry_io(lambda: _list_files(option, address), is_new)


def find_change(fs: Any, path: str, file: Found) -> str | None:
    """Return how a file of a file system differs from what was listed, None if it does not."""
    fs.invalidate_cache()  # other processes may have written since
    info = fs.info(path)
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
        said = str(error) or type(error).__name__
        hint = "; check the address, the credentials and the connection"
        raise UserError(f"{what}: can't be read: {said}{hint}") from error


def _list_files(option: str, address: str) -> Listing:
    where = f"{option} = {address!r}"
    if problem := find_bad_address(address):
        raise UserError(f"{where}: {problem}")
    fs, path = url_to_fs(address)
    fs.invalidate_cache()  # other processes may have written since
    if is_pattern(address):
        root = path[: min(path.index(mark) for mark in "*?[" if mark in path)].rpartition("/")[0]
        found = fs.glob(path, detail=True)
        for folder in [name for name, info in found.items() if info["type"] == "directory"]:
            found |= fs.find(folder, detail=True)
        if not found:
            raise UserError(f"{where}: matches no file")
    else:
        try:
            info = fs.info(path)
        except FileNotFoundError as error:
            if is_transient(error):  # a web server that is away
                raise
            raise UserError(f"{where}: there is no such file or folder{_near(fs, path)}") from error
        if info["type"] != "directory":
            if info["size"] is None:
                raise UserError(f"{where}: its server does not tell its size: copy it to where it can be read by parts")
            return Listing(False, [_found(fs, info, path, "")])
        root, found = path.rstrip("/"), fs.find(path, detail=True)
    files = [_found(fs, info, name, root) for name, info in found.items() if info["type"] == "file"]
    return Listing(True, [file for file in files if file.name])  # some stores have an object for the folder itself


def _found(fs: Any, info: dict[str, Any], path: str, root: str) -> Found:
    name = path[len(root) :].lstrip("/") if root else path.rpartition("/")[2]
    version = _version(info) or _version(fs.info(path))  # some tell less in a list
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
