"""metrics.jsonl: a JSON object per line, each with the step it belongs to."""

import itertools
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

from torchtitan_graph.log import logger
from torchtitan_graph.patience import refuse_unwritable
from torchtitan_graph.small_files import ANY_SIZE, NOT_FINITE, BadFile, check_type, open_small, parse_json, to_json

BLOCK = 2**20
_NUMBERS = ("nan", "inf", "-inf")
MAX_LINE, MAX_MOVED = 2**24, 2**30  # bytes


class Line(TypedDict):
    """The field that every line has."""

    step: int


def append(path: Path, record: dict[str, Any]) -> None:
    """Append one line, floats with all their digits, by `to_json`; if it can't be written whole, nothing is added."""
    line = (to_json(record) + "\n").encode()
    with open(path, "ab", buffering=0, opener=_open_at_once) as file:
        size = file.tell()
        try:
            while line:
                line = line[file.write(line) :]
        except OSError:
            file.truncate(size)
            raise


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)  # a FIFO without a reader is an error


def begin(path: Path, start_step: int) -> None:
    """Prepare a file for appending, after the lines of steps up to `start_step`.

    What follows the last of these, an earlier run's later steps or a torn line, is moved to `*_dropped.jsonl`; a kill
    may leave it in both. Raises UserError if the file can't be written, or is no such file.
    """
    with refuse_unwritable(str(path), path):
        if not path.exists():
            path.touch()
        with open_small(path, ANY_SIZE) as file, path.open("ab"):
            size = os.fstat(file.fileno()).st_size
            end = _end_of_kept(file, path, size, start_step) if start_step else 0
            if end < size:
                _move(file, path, end, size)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a metrics file's records, with the numbers that are not finite in their places; a last line without its end
    is left out: it is torn or being written. The file may be of any size: it is read line by line.

    Raises BadFile with the line if one is not a record; OSError as `open`.
    """
    with open_small(path, ANY_SIZE) as file:
        for number in itertools.count(1):
            line, where = file.readline(MAX_LINE + 1), f"{path}, line {number}"
            if len(line) > MAX_LINE:
                raise BadFile(f"{where}: has more than {MAX_LINE:,} bytes")
            if not line.endswith(b"\n"):
                return
            # Millions of records have the same names.
            record = {sys.intern(key): x for key, x in parse_json(line, dict[str, Any], where).items()}
            note = check_type(record.pop(NOT_FINITE, {}), dict[str, str], where)
            yield record | {key: float(text) for key, text in note.items() if key in record and text in _NUMBERS}


def _move(file: BinaryIO, path: Path, end: int, size: int) -> None:
    if size - end > MAX_MOVED:
        raise BadFile(f"{path}: {size - end:,} bytes of it are of later steps, or torn; move the file away")
    dropped = path.with_name(f"{path.stem}_dropped.jsonl")
    logger.info(f"moving lines of {path} that are of later steps, or torn, to {dropped.name}: {size - end:,} bytes")
    if dropped.exists() and not dropped.is_file():
        raise BadFile(f"{dropped}: is not a regular file")
    with dropped.open("a+b") as moved:
        _end_line(moved)  # a kill may have torn the last line
        file.seek(end)
        shutil.copyfileobj(file, moved)
        _end_line(moved)
        moved.flush()
        os.fsync(moved.fileno())
    os.truncate(path, end)


def _end_line(file: BinaryIO) -> None:
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def _end_of_kept(file: BinaryIO, path: Path, size: int, start_step: int) -> int:
    """Return the end of the last line of a step up to `start_step`, 0 if there is none. The file is read backward."""
    begin, end, rest = size, size, b""  # `rest` is the bytes between the two
    while begin:
        if len(rest) > MAX_LINE or size - begin > MAX_MOVED:
            raise BadFile(f"{path}: its end is not lines of this run; move the file away")
        file.seek(max(0, begin - BLOCK))
        rest, begin = file.read(begin - file.tell()) + rest, max(0, begin - BLOCK)
        first, *lines = rest.split(b"\n")
        if begin == 0:
            first, lines = b"", [first, *lines]
        if not lines:
            continue
        end -= len(lines.pop())  # no newline follows
        for line in reversed(lines):
            if _step_of(line) <= start_step:
                return end
            end -= len(line) + 1
        rest = first + b"\n"
    return 0


def _step_of(line: bytes) -> float:
    """Return the step of a line, or infinity if it has none."""
    try:
        return parse_json(line, Line, "line")["step"]
    except BadFile:
        return float("inf")
