"""Files that others read while they change, and files that a command is asked to write."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from torchtitan_graph.errors import UserError


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Do as `write_text` with an object as JSON."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, content: str) -> None:
    """Replace a file; a reader, and a kill at any moment, finds the old content or the new."""
    tmp = path.with_name(f"{path.name}.tmp")
    with tmp.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(tmp, path)


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
        with contextlib.suppress(OSError):
            path.with_name(f"{path.name}.tmp").unlink()
        raise UserError(f"{option} {path}: can't be written: {error.strerror or error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return what a file holds; {} where there is none, or one that is no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
