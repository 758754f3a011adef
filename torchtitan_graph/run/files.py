"""Writing of files that others read meanwhile, and of files that a command is asked for."""

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
    """Write an object as JSON like `write_text`; where the disk has no room for a second file, overwrite the first."""
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
    """Replace a file's content atomically: a reader, or a kill at any moment, finds old or new, an error old."""
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
    """Check that a result file can be written, before the work that fills it.

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
    """Write a command's result file like `write_text`; one that is no regular file, such as /dev/stdout, in place.

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
    """Return the content of an informative file; None where it is missing, or, with a warning, unusable.

    Raises:
        OSError: a transient I/O error.
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
