"""Documents by number: what every source of them is, several as one, and the digest of their files."""

import bisect
import hashlib
import itertools
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from torchtitan_graph.data.document import Document
from torchtitan_graph.data.files import DataFile
from torchtitan_graph.errors import UserError

# Corpora up to this size are read once when they are opened: their digest covers every byte, and corrupt input is found
# before training. For larger ones the digest covers names, sizes and both ends of each file, and a corrupt document is
# found when it is read.
SMALL_CORPUS_BYTES = 64 * 2**20
_END_BYTES = 4096
_AT_ONCE = 16  # files


class Source(Protocol):
    """Documents that can be read in any order.

    `digest` is equal for two sources with the same documents under the same numbers. `identity` names a document by its
    place, or is the hash of that (see `corpus.document_key`); it decides the split into train and validation. Documents
    of a source with `is_whole` are `Tokens`. An instance can be pickled.

    Where documents are read from addresses, one at a time, a source has `prepare`, too, which begins to read what a
    document needs.
    """

    digest: str
    is_whole: bool

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document: ...

    def identity(self, index: int) -> str | int: ...


class Chain:
    """The documents of several sources, one after another; names are those of their files, for an error."""

    def __init__(self, sources: list[Source], names: Sequence[str]) -> None:
        self.sources, self.is_whole = sources, sources[0].is_whole
        kinds = {source.is_whole: name for source, name in zip(reversed(sources), reversed(names), strict=True)}
        if len(kinds) > 1:
            raise UserError(
                f"{kinds[False]} holds text, which is packed wherever rows end, and {kinds[True]} conversations or"
                " answers, which are packed whole: they can't be one corpus: name them one by one in training.sources"
            )
        self._ends = list(itertools.accumulate(len(source) for source in sources))
        self.digest = _hash(source.digest for source in sources)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Document:
        source, index = self._find(index)
        return source[index]

    def identity(self, index: int) -> str | int:
        source, index = self._find(index)
        return source.identity(index)

    @property
    def is_remote(self) -> bool:
        """Whether documents are read from addresses, one at a time: then `prepare` begins to."""
        return any(map(is_remote, self.sources))

    def prepare(self, index: int) -> None:
        source, index = self._find(index)
        if is_remote(source):
            source.prepare(index)  # type: ignore[attr-defined]

    def _find(self, index: int) -> tuple[Source, int]:
        which = bisect.bisect_right(self._ends, index)
        return self.sources[which], index - (self._ends[which - 1] if which else 0)


def is_remote(source: Source) -> bool:
    """Return whether a source reads documents from addresses, one at a time. It then has `prepare`, which begins to
    read what a document needs, and does not wait."""
    return getattr(source, "is_remote", False)


def is_small(size: int) -> bool:
    """Return whether a corpus of so many bytes is read when it is opened."""
    return size <= SMALL_CORPUS_BYTES


def digest_files(files: Sequence[DataFile], names: Sequence[str]) -> str:
    """Return a hash of names, and of the sizes and contents of files: all of it, or both ends of large ones."""
    whole = sum(file.size for file in files) <= SMALL_CORPUS_BYTES
    with ThreadPoolExecutor(_AT_ONCE) as pool:  # each waits for its server, if it is at an address
        contents = pool.map(partial(_contents, whole), files)
        parts: list[list[str | bytes]] = [
            [os.fsencode(name), str(file.size), *found]
            for name, file, found in zip(names, files, contents, strict=True)
        ]
    return _hash(part for each in parts for part in each)


def _contents(whole: bool, file: DataFile) -> list[bytes]:
    if whole:
        return [hashlib.sha256(file.read()).digest()]
    return [file.read_part(0, _END_BYTES), file.read_part(max(0, file.size - _END_BYTES), _END_BYTES)]


def _hash(parts: Iterable[str | bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        total.update(len(content).to_bytes(8, "little") + content)
    return total.hexdigest()
