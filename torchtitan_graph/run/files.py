"""JSON records of a run, which others read while it writes them."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torchtitan_graph.log import logger
from torchtitan_graph.patience import FULL
from torchtitan_graph.small_files import BadFile, read_json, to_json, write_text
from torchtitan_graph.transient import is_transient

T = TypeVar("T")


def write_json(path: Path, content: Mapping[str, Any], check: Callable[[], None] = lambda: None) -> None:
    """Write `to_json` of an object like `write_text`; where the disk has no room for a second file, overwrite the
    first."""
    text = to_json(content, indent=1) + "\n"
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
