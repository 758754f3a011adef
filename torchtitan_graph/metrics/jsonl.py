"""A file of JSON objects, one per line, each with the step it belongs to."""

import json
import os
from pathlib import Path
from typing import Any

from torchtitan_graph.log import logger


class JsonLines:
    """Append to `path`, after dropping what a killed run left there for steps after `start_step`."""

    def __init__(self, path: Path, start_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _drop_after(path, start_step)
        self._file = path.open("a", encoding="utf-8")

    def append(self, record: dict[str, Any]) -> None:
        """Write one line, floats with all their digits, so that readers of the file see it at once."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _drop_after(path: Path, start_step: int) -> None:
    """Keep the lines up to `start_step`; the file is the old or the new one, whenever the process is killed."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) <= start_step]
    if len(kept) == len(lines):
        return
    logger.info(f"dropping {len(lines) - len(kept)} lines of {path}: they are of steps after {start_step}, or torn")
    tmp = path.with_suffix(".tmp")
    with tmp.open("w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(tmp, path)


def _step_of(line: str) -> float:
    """Return the step of a line, or infinity if the line is torn."""
    try:
        return json.loads(line)["step"] if line.endswith("\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")
