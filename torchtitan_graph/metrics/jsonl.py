"""A file of JSON objects, one per line, each with the step it belongs to."""

import json
import os
from pathlib import Path
from typing import Any

from torchtitan_graph.log import logger


def append(path: Path, record: dict[str, Any]) -> None:
    """Add one line, floats with all their digits; where it can't be written whole, nothing is added."""
    line = (json.dumps(record) + "\n").encode()
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            while line:
                line = line[file.write(line) :]
        except OSError:
            file.truncate(size)
            raise


def drop_after(path: Path, start_step: int) -> None:
    """Move what an earlier run left for steps after `start_step` to `*_dropped.jsonl`.

    A kill here leaves the old file or the new one.
    """
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) <= start_step]
    if len(kept) == len(lines):
        return
    dropped = path.with_name(f"{path.stem}_dropped.jsonl")
    moved = f"moving {len(lines) - len(kept)} lines of {path} to {dropped.name}"
    logger.info(f"{moved}: they are of steps after {start_step}, or torn")
    with dropped.open("a", encoding="utf-8") as file:
        file.writelines(line.rstrip("\n") + "\n" for line in lines if _step_of(line) > start_step)
        file.flush()
        os.fsync(file.fileno())
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
