"""Parquet files (extra `hf`): the columns that are used, written once to the node's cache as Arrow.

Note [Parquet at an address]: of a large file both ends are kept, where its digest and its list of columns are read; of
the rest the used columns are read, row group by row group, some parts ahead, and not kept. A small file is read whole
for its digest, and so is one of a web server that gives whole files alone.
"""

import bisect
import contextlib
import importlib
import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan_graph.data.files import CHUNK, DataFile, Progress
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.hugging_face import Rows, form_of_features, import_datasets, used_columns
from torchtitan_graph.data.node_cache import NodeCache
from torchtitan_graph.data.remote_file import AT_ONCE, EndsFile, RemoteFile, ahead
from torchtitan_graph.data.sources import Source, digest_files, is_small
from torchtitan_graph.errors import UserError
from torchtitan_graph.transient import is_transient

_ROWS_OF_ARROW = 1000  # in a batch; a row is read by its batch's place
_END, _LONGEST_END = 2**16, 2**28  # bytes; what pyarrow asks for first
_GAP = 2**20  # bytes, which come sooner than the answer to one more request


def open_parquet(file: DataFile, reading: RowFormat) -> Source:
    """Open a Parquet file, of which the used columns are written to the node's cache as Arrow first, once, for reading
    in any order."""
    datasets = import_datasets(file.path)
    arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    if isinstance(file, RemoteFile) and not is_small(file.size) and file.finds_ranges():
        file = EndsFile(file, _END, _find_end)
    bytes_of = _Bytes(file)
    try:
        with parquet.ParquetFile(arrow.PythonFile(bytes_of, "r") if file.is_remote else file.local()) as table:
            schema = _known_to(datasets, table.schema_arrow, file.path)
            features = datasets.Features.from_arrow_schema(schema)
            form = form_of_features(features, reading, file.path)
            used = {*used_columns(features, form)}
            schema = arrow.schema([field for field in schema if field.name in used], schema.metadata)
            bytes_of.expect(_parts(table.metadata, used))
            write = partial(_write_arrow, table, schema, file, reading.cache)
            path, entry = reading.cache.make("arrow", file.key, *schema.names, build=write)
        rows = datasets.Dataset.from_file(str(path))
    except (arrow.ArrowException, OSError) as error:
        if is_transient(error):
            raise
        file.check()
        raise UserError(f"{file.path}: not a Parquet file that can be read: {error}") from error
    digest = digest_files([file], [file.base])
    return Rows(rows, form, reading, file.path, digest, entry)


def _known_to(datasets: Any, schema: Any, path: str) -> Any:
    """Return a schema without the columns whose types `datasets` does not know, which are not read, and without a
    description in its own words that it can't read.

    Raises UserError if two columns have the same name.
    """
    arrow = importlib.import_module("pyarrow")
    if twice := [name for name, number in Counter(schema.names).items() if number > 1]:
        raise UserError(f"{path}: two columns are named {twice[0]!r}: rename one")
    fields = []
    for field in schema:
        with contextlib.suppress(ValueError):
            datasets.Features.from_arrow_schema(arrow.schema([field]))
            fields.append(field)
    try:
        features = datasets.Features.from_arrow_schema(arrow.schema(fields, schema.metadata))
    except Exception:  # of many types: anybody may have written the description
        features = datasets.Features.from_arrow_schema(arrow.schema(fields))
    return arrow.schema(fields, features.arrow_schema.metadata)


def _write_arrow(table: Any, schema: Any, file: DataFile, cache: NodeCache, path: Path) -> None:
    """Write columns of a Parquet file as a stream of Arrow."""
    arrow = importlib.import_module("pyarrow")
    progress = Progress(f"writing {file.path} as Arrow", file.size)
    num_bytes = file.size / max(1, table.metadata.num_rows)  # of a row
    with arrow.OSFile(str(path), "wb") as sink, arrow.ipc.new_stream(sink, schema) as writer:
        # By one thread, which asks for parts in their order.
        for batch in table.iter_batches(_ROWS_OF_ARROW, columns=schema.names, use_threads=not file.is_remote):
            cache.grow(batch.nbytes)
            with cache.refuse_unwritable():
                writer.write_batch(batch)
            progress.add(int(num_bytes * len(batch)))
    file.check()


def _find_end(last: bytes) -> int:
    """Return how many bytes at its end list what a Parquet file has, from its last ones."""
    size = int.from_bytes(last[-8:-4], "little") + 8
    return size if size <= _LONGEST_END else 0


def _parts(metadata: Any, used: set[str]) -> Iterator[tuple[int, int]]:
    """Yield the parts of a Parquet file, their first byte and their size, that columns are read by."""
    paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    numbers = [n for n, path in enumerate(paths) if path in used or any(path.startswith(f"{name}.") for name in used)]
    for group in range(metadata.num_row_groups):
        for number in numbers:
            column = metadata.row_group(group).column(number)
            starts = filter(None, [column.data_page_offset, column.dictionary_page_offset])
            yield min(starts, default=0), column.total_compressed_size


def _joined(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return where the parts begin and end that hold others, those with little between them together."""
    spans: list[tuple[int, int]] = []
    for start, count in sorted(parts):
        begin = spans.pop()[0] if spans and start - spans[-1][1] <= _GAP else start
        spans.append((begin, start + count))
    return spans


class _Bytes(io.RawIOBase):
    """A file for pyarrow; the parts that it is expected to ask for are read ahead, in the order of the file."""

    def __init__(self, file: DataFile) -> None:
        self._file, self._place = file, 0
        self._expected: list[tuple[int, int]] = []
        self._coming: Iterator[tuple[int, bytes]] = iter(())
        self._first, self._came = 0, bytearray()  # what came last, from which byte of the file on

    def expect(self, parts: Iterable[tuple[int, int]]) -> None:
        """Read parts ahead, from the first time that one is asked for."""
        self._expected = _joined(part for part in parts if 0 <= part[0] < sum(part) <= self._file.size)
        starts = [(at, min(CHUNK, end - at)) for begin, end in self._expected for at in range(begin, end, CHUNK)]
        contents = ahead([partial(self._file.read_part, *part) for part in starts], AT_ONCE)
        self._coming = ((start, content) for (start, _), content in zip(starts, contents, strict=True))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        self._place = place + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._file.size}[whence]
        return self._place

    def read(self, count: int = -1) -> bytes:
        start, count = self._place, self._file.size - self._place if count < 0 else count
        which = bisect.bisect_right(self._expected, (start, self._file.size)) - 1
        if start >= self._first and which >= 0 and start + count <= self._expected[which][1]:
            content = self._take(start, count)
        else:
            content = self._file.read_part(start, count)
        self._place += len(content)
        return content

    def _take(self, start: int, count: int) -> bytes:
        while start + count > self._first + len(self._came):
            first, content = next(self._coming)
            if first != self._first + len(self._came):
                self._first, self._came = first, bytearray()
            self._came += content
            del self._came[: max(0, start - self._first)]
            self._first = max(self._first, start)
        return bytes(self._came[start - self._first :][:count])
