"""A run's folder apart from its graphs: progress, metrics, files."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import quote

from torchtitan_graph.errors import without_secrets
from torchtitan_graph.log import logger
from torchtitan_graph.metrics.jsonl import read_records
from torchtitan_graph.small_files import BadFile, read_json, read_text

MAX_POINTS, MAX_FILES, MAX_WORDS = 2000, 1000, 500
# Fields of status.json, by their names on the page.
_STATUS = {
    "state": "state",
    "reason": "reason",
    "step": "steps done",
    "total_steps": "steps asked for",
    "loss": "loss",
    "restarts": "started again",
    "host": "host",
    "time_utc": "last sign of life",
    "time_left": "time left",
}


def run_data(folder: Path, page: Path) -> dict[str, Any]:
    """Return the page's data of a run. Unreadable files are left out, with a warning.

    Args:
        page: where the page is written: links to the run's files lead from there.
    """
    curves = _or_nothing(folder / "metrics.jsonl", lambda path: _curves(read_records(path)), {})
    status = _or_nothing(folder / "status.json", lambda path: read_json(path, dict[str, Any]), {})
    facts = [[words, _brief(status[key])] for key, words in _STATUS.items() if status.get(key) not in (None, "")]
    if isinstance(times := status.get("times"), dict):
        facts.append(["time went into", ", ".join(f"{_brief(key)} {_brief(x)}" for key, x in list(times.items())[:20])])
    if measured := [value for _, value in curves.get("memory_gib", ())]:
        facts.append(["peak memory, measured (rank 0; on a CPU of the whole process)", f"{max(measured):.3f} GiB"])
    config = without_secrets(_or_nothing(folder / "config.toml", read_text, ""))
    return {"folder": str(folder), "facts": facts, "curves": curves, "files": _files(folder, page), "config": config}


def _or_nothing(path: Path, read: Any, nothing: Any) -> Any:
    """Read an informative file, or return `nothing` where it is missing or, with a warning, unusable."""
    try:
        return read(path)
    except FileNotFoundError:
        return nothing
    except (BadFile, OSError) as error:
        logger.warning(f"{error}; the page is made without it")
        return nothing


def _brief(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= MAX_WORDS else text[:MAX_WORDS] + "..."


def _curves(records: Iterable[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return the numeric metrics by name, as [step, value]; those of long runs are thinned out, the last is kept."""
    found: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        if not _is_number(step := record.get("step")):
            continue
        for name, value in record.items():
            if name != "step" and _is_number(value):
                found.setdefault(name, []).append((step, value))
    return {name: points[: -1 : -(len(points) // -MAX_POINTS)] + points[-1:] for name, points in found.items()}


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)  # type: ignore[arg-type, operator]


def _files(folder: Path, page: Path) -> list[tuple[str, str, int]]:
    """Return a run's files by their names in its folder, each with its link from the page, and its bytes."""
    start = page.absolute().parent
    return [
        (str(path.relative_to(folder)), quote(os.fsencode(os.path.relpath(path.absolute(), start))), size)
        for path, size in itertools.islice(_walk(folder), MAX_FILES)
    ]


def _walk(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield the regular files below a folder, and their bytes; a run may delete some meanwhile."""
    for place, folders, names in os.walk(folder):  # follows no links
        folders.sort()
        for path in (Path(place, name) for name in sorted(names)):
            with contextlib.suppress(OSError):
                found = path.lstat()
                if stat.S_ISREG(found.st_mode):
                    yield path, found.st_size
