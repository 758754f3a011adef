"""Bounded, checked reads of small files from any source, and atomic writes.

Every reader of an index, a configuration or a state opens its file here. No file makes the reader wait endlessly (a
FIFO, a device), use memory without bound (a sparse file of terabytes, a small archive of a huge text, millions of empty
lists), or raise an error of another type than `BadFile`.
"""

import contextlib
import functools
import json
import math
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import msgspec

from torchtitan_graph.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # for schemas

MAX_BYTES = 64 * 2**20
ANY_SIZE = 2**63 - 1  # for files that are read piece by piece
MAX_TOML = 2**20  # bytes; more than a person writes
MAX_VALUES = 4_000_000  # of Python objects in one JSON text: about 400 MB at most
MAX_DEPTH = 100
NOT_FINITE = "not_finite"  # the key of a record's numbers that JSON has no word for, as text, by their places
MAX_DIGITS = 300  # of the longest float, written out


class BadFile(UserError):
    """Error: a file is not what its reader needs; the message begins with the path."""


def open_small(path: Path, max_bytes: int = MAX_BYTES) -> BinaryIO:
    """Open a regular file of at most `max_bytes` for reading.

    Raises BadFile if it is something else (a FIFO, a device, a folder), or larger; OSError as `open`.
    """
    # Without O_NONBLOCK, opening a FIFO waits until a process writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
            raise BadFile(f"{path}: is not a regular file, but {kind}")
        if found.st_size > max_bytes:
            raise BadFile(f"{path}: has {found.st_size:,} bytes, more than the {max_bytes:,} that such a file may have")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read_small(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file of at most `max_bytes`; raises like `open_small`."""
    with open_small(path, max_bytes) as file:
        content = file.read(max_bytes + 1)  # it may grow meanwhile
    if len(content) > max_bytes:
        raise BadFile(f"{path}: has more than {max_bytes:,} bytes, the most that such a file may have")
    return content


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return a small file's text, without a byte-order mark; raises like `open_small`, and BadFile if not UTF-8."""
    try:
        return read_small(path, max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise BadFile(f"{path}: is not UTF-8 ({error.reason} at byte {error.start}, in line {line})") from error


def gunzip(content: bytes, where: Path | str, max_bytes: int = MAX_BYTES) -> bytes:
    """Return unpacked gzip; raise BadFile if it is not gzip, is not whole, or is larger than `max_bytes` unpacked."""
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        text = unpacker.decompress(content, max_bytes + 1)
    except zlib.error as error:
        raise BadFile(f"{where}: is not gzip: {error}") from error
    if len(text) > max_bytes:
        raise BadFile(f"{where}: has more than {max_bytes:,} bytes once unpacked, the most that it may have")
    if not unpacker.eof or unpacker.unused_data:
        raise BadFile(f"{where}: is not one whole gzip file")
    return text


def read_json(path: Path, schema: type[T], max_bytes: int = MAX_BYTES, where: str = "") -> T:
    """Return a small JSON file's content, of a type such as a TypedDict; raises like `open_small` and `parse_json`.

    where: the file's name in messages about its content; by default its path.
    """
    content = read_small(path, max_bytes)
    found = parse_json(content, schema, where or path)
    if re.search(rb"\\u[dD][89a-fA-F]", content):  # seldom: a pair is a character beyond the first 65,536
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise _lone_surrogate(error, where or path) from error
    return found


def parse_json(content: bytes | str, schema: type[T], where: Path | str, max_values: int = MAX_VALUES) -> T:
    """Return the value of a JSON text, checked against a type: `dict[str, Any]`, a TypedDict, ...

    Keys that a TypedDict doesn't name are left out. The caller bounds the size of the text; this bounds the number of
    its values, their depth, and the length of its integers. Raises BadFile with the place if the text is not JSON, or
    not of that type.
    """
    if isinstance(content, str):
        content = content.encode(errors="surrogatepass")
    check_values(content, where, max_values)
    try:
        found = _decoder().decode(content.decode("utf-8-sig"))
        _check_depth(found)
    except RecursionError as error:
        raise BadFile(f"{where}: has lists or objects more than {MAX_DEPTH} deep") from error
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError among them
        raise BadFile(f"{where}: is not JSON: {error}") from error
    return check_type(found, schema, where)


def check_type(value: Any, schema: type[T], where: Path | str) -> T:
    """Return a parsed value converted to a type, like `parse_json`; raise BadFile if it is of another."""
    try:
        return msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        raise BadFile(f"{where}: has invalid content: {_in_words(str(error))}") from error
    except UnicodeEncodeError as error:
        raise _lone_surrogate(error, where) from error


def check_values(content: bytes, where: Path | str, max_values: int = MAX_VALUES) -> None:
    """Raise BadFile where a JSON text has more than `max_values` values; nothing is parsed."""
    if _count_values(content) > max_values:  # an upper bound, since strings' content counts as well
        without_strings = re.sub(rb'"[^"]*"', b"", content.replace(rb"\\", b"").replace(rb"\"", b""))
        if _count_values(without_strings) > max_values:
            raise BadFile(f"{where}: holds more than {max_values:,} values, the most that it may hold")


def _count_values(content: bytes) -> int:
    return sum(content.count(mark) for mark in (b",", b"[", b"{", b":"))  # a value follows one, or begins the text


def to_json(record: Mapping[str, Any], indent: int | None = None) -> str:
    """Return an object as JSON. A number that is not finite becomes null, and its text is under NOT_FINITE."""
    note: dict[str, str] = {}
    finite = _with_null(record, "", note)
    return json.dumps(finite | {NOT_FINITE: note} if note else finite, indent=indent, allow_nan=False)


def _with_null(value: Any, place: str, note: dict[str, str]) -> Any:
    """Return a value with None for each float that is not finite, and write these into `note`, by their places."""
    if isinstance(value, float) and not math.isfinite(value):
        note[place] = str(value)
        return None
    if isinstance(value, Mapping):
        return {key: _with_null(x, f"{place}.{key}" if place else str(key), note) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_null(x, f"{place}[{number}]", note) for number, x in enumerate(value)]
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file; raises like `open_small` and `parse_toml`."""
    return parse_toml(read_text(path, MAX_TOML), path)


def parse_toml(text: str, where: Path | str) -> dict[str, Any]:
    """Return the content of a TOML text; raise BadFile if it is not TOML, or is nested too deeply."""
    # A name of very many parts takes tomllib quadratic time and memory. Parts have other characters in quotes only:
    # such names are found by their depth.
    names = re.split(r"[^\w\"' \t.-]+|\.\.+", text)
    try:
        if max(name.count(".") for name in names) > MAX_DEPTH:
            raise RecursionError
        found = tomllib.loads(text)
        _check_depth(found)
    except RecursionError as error:
        raise BadFile(f"{where}: is not valid TOML: nested more than {MAX_DEPTH} levels deep") from error
    except ValueError as error:  # TOMLDecodeError among them, and an integer of thousands of digits
        raise BadFile(f"{where}: is not valid TOML: {error}") from error
    return found


def write_text(path: Path, content: str, check: Callable[[], None] = lambda: None) -> None:
    """Replace a file's content like `write_bytes`, in UTF-8."""
    write_bytes(path, content.encode(), check)


def write_bytes(path: Path, content: bytes, check: Callable[[], None] = lambda: None) -> None:
    """Replace a file's content atomically: a reader, or a kill at any moment, finds old or new, an error old. `check`
    is called once the new content is on disk, and may raise to keep the old one."""
    tmp = path.with_name(f"{path.name}.tmp")
    try:
        tmp.unlink(missing_ok=True)  # a FIFO of that name would block
        with tmp.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        check()
        os.replace(tmp, path)
    except OSError:
        with contextlib.suppress(OSError):
            tmp.unlink()
        raise


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


@functools.cache
def _decoder() -> json.JSONDecoder:  # json.loads makes one for each text
    return json.JSONDecoder(parse_int=_parse_int)


def _check_depth(value: Any) -> None:
    """Raise RecursionError where values are nested deeper than MAX_DEPTH; Python's own limit depends on the stack."""
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise RecursionError
        depth += 1
        level = [
            child
            for each in level
            if isinstance(each, (dict, list))
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, (dict, list))
        ]


def _lone_surrogate(error: UnicodeEncodeError, where: Path | str) -> BadFile:
    half = ascii(error.object[error.start])[1:-1]
    return BadFile(f"{where}: is not JSON: {half} is half of a surrogate pair, and no character")


def _in_words(error: str) -> str:
    """Return msgspec's message with the place first, as a key, from "Expected `int`, got `str` - at `$.step`"."""
    message, _, place = error.partition(" - at ")
    where = place.strip("`").removeprefix("$").removeprefix(".")
    return f"{where}: {message}" if where else message
