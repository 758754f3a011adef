"""Files that are packed by gzip or Zstandard, unpacked once on a node, into its cache."""

import gzip
import importlib
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan_graph.data.files import CHUNK, DataFile, Progress, chunks_as_file
from torchtitan_graph.data.node_cache import Entry, NodeCache
from torchtitan_graph.errors import UserError
from torchtitan_graph.transient import is_transient

PACKED_SUFFIXES = (".gz", ".zst")


def is_packed(name: str) -> bool:
    """Return whether a file is packed by its name."""
    return name.lower().endswith(PACKED_SUFFIXES)


def unpacked_name(name: str) -> str:
    """Return the name of a file without `.gz` or `.zst` at its end, in capital letters or small."""
    return name[: name.rindex(".")] if is_packed(name) else name


class UnpackedFile(DataFile):
    """The content of a packed file, in the node's cache. See `NodeCache.make`.

    Raises UserError if it is damaged, or does not fit into the cache.
    """

    def __init__(self, packed: DataFile, cache: NodeCache) -> None:
        self._packed, self._cache = packed, cache
        path = self._make()
        super().__init__(path, unpacked_name(packed.name))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_entry": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make()

    @property
    def key(self) -> str:
        return f"unpacked {self._packed.key}"

    def _make(self) -> Path:
        self._entry: Entry
        path, self._entry = self._cache.make("unpacked", self._packed.key, build=self._unpack)
        return path

    def _unpack(self, path: Path) -> None:
        packed, cache = self._packed, self._cache
        progress = Progress(f"unpacking {packed.path}", packed.size)
        try:
            with _unpacking(packed, progress) as content:
                while chunk := content.read(CHUNK):
                    cache.grow(len(chunk))
                    with cache.refuse_unwritable(), path.open("ab") as file:
                        file.write(chunk)
        except UserError:
            raise
        except (OSError, EOFError, zlib.error) as error:  # a file cut short is an EOFError
            if isinstance(error, OSError) and is_transient(error):
                raise
            raise UserError(f"{packed.path}: could not be unpacked: {error}") from error
        path.touch()  # of no bytes


def _unpacking(packed: DataFile, progress: Progress) -> BinaryIO:
    """Return a stream of what a packed file holds."""
    stream = chunks_as_file(packed, progress)
    if packed.name.lower().endswith(".gz"):
        return gzip.open(stream)  # type: ignore[return-value]
    try:
        arrow = importlib.import_module("pyarrow")
    except ImportError as error:
        raise UserError(
            f"{packed.path}: is unpacked by the package pyarrow, which is missing: pip install pyarrow"
        ) from error
    return arrow.CompressedInputStream(arrow.PythonFile(stream, "r"), "zstd")  # type: ignore[no-any-return]
