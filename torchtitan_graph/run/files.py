"""JSON records of a run, which others read while it writes them, and the result files of commands."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.patience import FULL
from torchtitan_graph.small_files import BadFile, read_json, write_text
from torchtitan_graph.transient import is_transient

T = TypeVar("T")


def write_json(path: Path, content: Mapping[str, Any], check: Callable[[], None] = lambda: None) -> None:
    """Write an object as JSON like `write_text`; where the disk has no room for a second file, overwrite the first."""
    text = json.dumps(content, indent=1) + "\n"
    try:
        write_text(path, text, check)
    except OSError as error:
        if error.errno not in FULL or not path.is_file():
            raise
        check()
        with path.open("r+", encoding="utf-8") as file:
            file.write(text)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())


def check_result(option: str, path: Path) -> None:
    """Check that a result file can be written, before the work that fills it; raise a UserError naming the option."""
    if path.is_dir():
        raise UserError(f"{option} {path}: is a folder; name a file")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}; name a file in one that is there")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{option} {path}: can't be written; name a file in a folder that you may write to")


def write_result(option: str, path: Path, content: str) -> None:
    """Write a command's result file like `write_text`; one that is not a regular file, such as /dev/stdout, in place.

    Raises a UserError with the option and the reason if it can't be written; nothing of it is left.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(content, encoding="utf-8")
        else:
            write_text(path, content)
    except OSError as error:
        raise UserError(f"{option} {path}: can't be written: {error.strerror or error}") from error


def read_record(path: Path, schema: type[T]) -> T | None:
    """Return a run's record; None if it is missing, or, with a warning, unusable. Raises transient I/O errors."""
    try:
        return read_json(path, schema)
    except FileNotFoundError:
        return None
    except (BadFile, OSError) as error:
        if is_transient(error):
            raise
        logger.warning(f"{error}: it is ignored")
        return None
