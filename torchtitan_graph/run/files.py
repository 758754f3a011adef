"""Files that others read while they change, and files that a command is asked to write."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.patience import FULL, is_away
from torchtitan_graph.small_files import BadFile
from torchtitan_graph.small_files import read_json as read_small_json

T = TypeVar("T")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Do as `write_text` with an object as JSON; where there is no room for two, overwrite the one that is there."""
    text = json.dumps(content, indent=1) + "\n"
    try:
        write_text(path, text)
    except OSError as error:
        if error.errno not in FULL or not path.is_file():
            raise
        with path.open("r+", encoding="utf-8") as file:
            file.write(text)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())


def write_text(path: Path, content: str) -> None:
    """Replace a file; a reader, and a kill at any moment, finds the old content or the new. An error leaves the old."""
    tmp = path.with_name(f"{path.name}.tmp")
    try:
        tmp.unlink(missing_ok=True)  # it might be a FIFO, which is not opened before it is read
        with tmp.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)
    except OSError:
        with contextlib.suppress(OSError):
            tmp.unlink()
        raise


def check_result(option: str, path: Path) -> None:
    """Refuse, before the work that fills it, a file that could not be written.

    Raises:
        UserError: it is a folder, or its folder is not there or takes no files; names the option.
    """
    if path.is_dir():
        raise UserError(f"{option} {path}: is a folder; name a file")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}; name a file in one that is there")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{option} {path}: can't be written; name a file in a folder that you may write to")


def write_result(option: str, path: Path, content: str) -> None:
    """Write a file that a command was asked for, as `write_text`; what is no file, as /dev/stdout, as it is.

    Raises:
        UserError: it can't be written; names the option and the reason. Nothing of it is left.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(content, encoding="utf-8")
        else:
            write_text(path, content)
    except OSError as error:
        raise UserError(f"{option} {path}: can't be written: {error.strerror or error}") from error


def read_json(path: Path, schema: type[T]) -> T | None:
    """Return what a file says that only informs; None where there is none, or, with a warning, where it can't be used.

    Raises:
        OSError: storage is away.
    """
    try:
        return read_small_json(path, schema)
    except FileNotFoundError:
        return None
    except (BadFile, OSError) as error:
        if is_away(error):
            raise
        logger.warning(f"{error}: it is ignored")
        return None
