"""Reading of metrics.jsonl."""

from pathlib import Path
from typing import TypeVar

from torchtitan_graph.small_files import check_values, parse_json, read_small

T = TypeVar("T")

MAX_BYTES = 2**28
MAX_VALUES = 10_000_000  # some 300,000 records, and less than a GiB


def read_records(path: Path, schema: type[T]) -> list[T]:
    """Return a metrics file's records; a last line without its end is left out: it is torn or being written.

    Raises:
        BadFile: it is no such file, or a line is no record of that type, such as `dict[str, Any]`; names the line.
        OSError: as `open`.
    """
    content = read_small(path, MAX_BYTES)
    check_values(content, path, MAX_VALUES)
    *lines, _ = content.split(b"\n")
    return [parse_json(line, schema, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]
