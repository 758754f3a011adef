"""Documents as token ids in files of arrays, written once by `torchtitan_graph.pretokenize`.

A folder holds `shards.json` and, for each shard of consecutive documents, three arrays of NumPy's format (nothing is
pickled): `tokens-N.npy`, all token ids; `ends-N.npy`, where each document ends in it; `keys-N.npy`, a hash of each
document's identity, which decides between training and validation. Conversations, whose documents are whole, have a
fourth: `targets-N.npy`, 1 for each token that is learned, and 2 more for the first token of each further context of the
same document. With them the rows of a run are bitwise those of the
text itself, so a run may switch from the text to its shards, or back, when it is resumed.

Note [Shards in the making]: they are written into `FOLDER.part`, each array under another name first, its keys last: a
shard with keys is whole, and after a kill the script continues after the last such. `shards.json` is written last, and
then the folder is renamed.
"""

import bisect
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np

from torchtitan_graph.data.document import Contexts, Tokens
from torchtitan_graph.data.files import DataFile
from torchtitan_graph.data.places import Place
from torchtitan_graph.data.sources import digest_files
from torchtitan_graph.data.tokenizer import Tokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.patience import refuse_unreadable
from torchtitan_graph.small_files import read_json, read_small, sync

INDEX = "shards.json"
FORMATS = {False: "token shards 1", True: "token shards with targets 2"}  # by whether documents are packed whole
_OLDER = "token shards with targets 1"  # without further contexts
_LEARNED, _BEGINS = 1, 2  # of targets
_ARRAYS = ("tokens", "ends", "keys", "targets")  # the last in the second format only


def is_shards(names: Collection[str]) -> bool:
    """Return whether a folder with files of these names was written by `write_shards`."""
    return INDEX in names


class Index(TypedDict):
    """The content of `shards.json`."""

    format: str
    source: str
    splits: list[Literal["train", "validation", "all"]]
    shards: int
    tokenizer: str
    files: str


class Shards:
    """Documents as token ids, by number; a `Source`.

    Raises UserError if the folder is not whole, or its ids are of another tokenizer.
    """

    def __init__(self, place: Place, tokenizer: Tokenizer | None) -> None:
        self._folder = folder = place.path.rstrip("/")
        index_file, where = place.open(INDEX), f"{folder}/{INDEX}"
        with refuse_unreadable(where):
            index = read_json(index_file.local(), Index, where=where)
        self.digest, self.splits, num_shards = index["source"], list(index["splits"]), index["shards"]
        if index["format"] not in (*FORMATS.values(), _OLDER):
            known = " or ".join(map(repr, FORMATS.values()))
            raise UserError(f"{where}: is not of the format {known}; pretokenize it again")
        self.is_whole = index["format"] != FORMATS[False]
        names = _names(self.is_whole)
        if num_shards < 1 or not self.splits:
            raise UserError(f"{where}: names no shard or no split; pretokenize it again")
        if tokenizer is None:
            raise UserError(f"{folder}: holds token ids, and no text; name the corpus that they were made from")
        if index["tokenizer"] != tokenizer.digest:
            raise UserError(
                f"{folder}: its token ids are of another tokenizer than model.hf_assets_path names (theirs"
                f" {index['tokenizer']!r}, here {tokenizer.digest!r}). Name theirs, or pretokenize it again"
            )
        # A damaged index may say any number: the first missing file ends this.
        self._files = [[place.open(_name(name, shard)) for name in names] for shard in range(num_shards)]
        if _files_digest([file for files in self._files for file in files]) != index["files"]:
            raise UserError(f"{folder}: its files are not those that {INDEX} was written for; make it again")
        self._vocab_size = tokenizer.vocab_size
        self._open()
        for (tokens, *targets), (ends, keys), files in zip(self._long, self._mapped, self._files, strict=True):
            whole = [array.dtype.kind for array in (tokens, ends, keys)] == ["u", "i", "u"] and len(ends) > 0
            if not whole or len(ends) != len(keys) or np.any(np.diff(ends, prepend=0) < 0) or ends[-1] != tokens.length:
                raise UserError(f"{files[1].path}: does not say where the documents of its shard end")
            if targets and (targets[0].dtype != np.uint8 or targets[0].length != tokens.length):
                raise UserError(f"{files[3].path}: does not say which tokens of its shard are learned")

    def _open(self) -> None:
        self._long = [[_Array(file) for file in (files[0], *files[3:])] for files in self._files]
        self._mapped = [[_Array(file).mapped() for file in files[1:3]] for files in self._files]
        self._first_documents = list(itertools.accumulate((len(ends) for ends, _ in self._mapped), initial=0))

    def __getstate__(self) -> dict[str, Any]:  # mapped files are opened again, not copied
        return {name: value for name, value in self.__dict__.items() if name not in ("_long", "_mapped")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return self._first_documents[-1]

    def __getitem__(self, index: int) -> np.ndarray | Tokens | Contexts:
        shard, number = self._find(index)
        (tokens, *targets), (ends, _) = self._long[shard], self._mapped[shard]
        self._files[shard][1].check_at_times()
        begin, end = int(ends[number - 1]) if number else 0, int(ends[number])
        ids = tokens.part(begin, end)
        if len(ids) and ids.max() >= self._vocab_size:
            raise UserError(f"{self._folder}, document {index + 1}: its token ids are not of this tokenizer")
        if not targets:
            return ids
        marks = targets[0].part(begin, end)
        is_target, begins = marks & _LEARNED != 0, np.flatnonzero(marks & _BEGINS)
        if not len(begins):
            return Tokens(ids.astype(np.int64), is_target)
        return Contexts(
            tuple(
                Tokens(*part)
                for part in zip(np.split(ids.astype(np.int64), begins), np.split(is_target, begins), strict=True)
            )
        )

    @property
    def is_remote(self) -> bool:
        return self._files[0][0].is_remote

    def prepare(self, index: int) -> None:
        shard, number = self._find(index)
        ends = self._mapped[shard][0]
        for array in self._long[shard]:
            array.prepare(int(ends[number - 1]) if number else 0, int(ends[number]))

    def identity(self, index: int) -> int:
        shard, number = self._find(index)
        self._files[shard][2].check_at_times()
        return int(self._mapped[shard][1][number])

    def _find(self, index: int) -> tuple[int, int]:
        shard = bisect.bisect_right(self._first_documents, index) - 1
        return shard, index - self._first_documents[shard]


def write_shards(
    folder: Path,
    documents: Callable[[int], Iterable[tuple[int, np.ndarray | Tokens | Contexts]]],
    *,
    is_whole: bool = False,
    source_digest: str,
    splits: list[str],
    tokenizer: Tokenizer,
    tokens_per_shard: int = 2**26,
) -> Iterator[tuple[int, int]]:
    """Write token ids to a new folder, and yield the numbers of documents and tokens so far, after each document.

    `documents(start)` gives the key and the ids of each document from number `start` on, which is not 0 after a killed
    writer of the same source: see Note [Shards in the making]. They are `Tokens` or `Contexts` where `is_whole`.
    `splits` are those of the documents: "train" and "validation" if each document is in one of them by its key, else
    the one that all are in.

    Raises UserError if the folder exists, or the leftover is of another source or tokenizer.
    """
    if folder.exists():
        raise UserError(f"{folder} is there already; name another folder, or delete it")
    part = folder.with_name(folder.name + ".part")
    job = {"source": source_digest, "tokenizer": tokenizer.digest, "splits": splits, "format": FORMATS[is_whole]}
    _begin(part, job)
    shard, num_documents, num_tokens = _whole_shards(part)
    yield num_documents, num_tokens
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    ids_of: list[np.ndarray] = []
    targets_of: list[np.ndarray] = []
    keys: list[int] = []
    tokens_in_shard = 0
    for key, document in documents(num_documents):
        ids, *targets = _arrays_of(document)
        ids_of.append(np.asarray(ids, dtype))
        targets_of += targets
        keys.append(key)
        tokens_in_shard += len(ids)
        num_documents, num_tokens = num_documents + 1, num_tokens + len(ids)
        yield num_documents, num_tokens
        if tokens_in_shard >= tokens_per_shard:
            _write_shard(part, shard, ids_of, targets_of, keys, dtype)
            shard, ids_of, targets_of, keys, tokens_in_shard = shard + 1, [], [], [], 0
    if keys:
        _write_shard(part, shard, ids_of, targets_of, keys, dtype)
        shard += 1
    if not num_documents:
        raise UserError("the corpus has no documents")
    index = {**job, "shards": shard, "documents": num_documents, "tokens": num_tokens, "dtype": dtype.str}
    files = [DataFile(part / _name(name, number)) for number in range(shard) for name in _names(is_whole)]
    _write(part / INDEX, json.dumps({**index, "files": _files_digest(files)}, indent=1).encode())
    sync(part)
    os.rename(part, folder)


def _arrays_of(document: np.ndarray | Tokens | Contexts) -> tuple[np.ndarray, ...]:
    """Return the token ids of a document and, where it is packed whole, their entries of `targets-N.npy`."""
    if isinstance(document, np.ndarray):
        return (document,)
    contexts = document.contexts if isinstance(document, Contexts) else (document,)
    marks = [context.is_target * np.uint8(_LEARNED) for context in contexts]
    for further in marks[1:]:
        further[0] |= _BEGINS
    return np.concatenate([context.ids for context in contexts]), np.concatenate(marks)


def _begin(part: Path, job: dict[str, Any]) -> None:
    file, content = part / "job.json", json.dumps(job, indent=1).encode()
    if file.is_file() and read_small(file) != content:
        raise UserError(f"{part} was begun with another corpus or tokenizer: delete it, or name another folder")
    if not file.is_file():
        try:
            part.mkdir(parents=True, exist_ok=True)
            foreign = [path.name for path in part.iterdir() if path.name != "job.tmp"]
        except OSError as error:
            raise UserError(f"{part}: can't be made: {error.strerror}; name another folder") from error
        if foreign:
            raise UserError(f"{part} holds {foreign[0]}, which is not a shard: delete it, or name another folder")
        _write(file, content)


def _whole_shards(part: Path) -> tuple[int, int, int]:
    """Return the numbers of whole shards, and of their documents and tokens."""
    number = num_documents = num_tokens = 0
    while (part / _name("keys", number)).is_file():
        num_documents += _Array(DataFile(part / _name("ends", number))).length
        num_tokens += _Array(DataFile(part / _name("tokens", number))).length
        number += 1
    return number, num_documents, num_tokens


def _write_shard(
    folder: Path,
    number: int,
    ids_of: list[np.ndarray],
    targets_of: list[np.ndarray],
    keys: list[int],
    dtype: np.dtype,
) -> None:
    ends = np.cumsum([len(ids) for ids in ids_of], dtype=np.int64)
    if targets_of:
        _write(folder / _name("targets", number), np.concatenate(targets_of).astype(np.uint8))
    arrays = (np.concatenate(ids_of).astype(dtype), ends, np.array(keys, np.uint64))
    for name, array in zip(_names(False), arrays, strict=True):
        _write(folder / _name(name, number), array)


def _names(is_whole: bool) -> tuple[str, ...]:
    return _ARRAYS if is_whole else _ARRAYS[:3]


def _write(path: Path, content: np.ndarray | bytes) -> None:
    """Write a file atomically."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            np.save(file, content, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


# The header that NumPy writes for an array of one dimension. NumPy's own reader evaluates it by Python's parser.
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(..)"
    rb"(\{'descr': '([<|][ui][1248])', 'fortran_order': False, 'shape': \(([0-9]{1,15}),\), \} *\n)",
    re.DOTALL,
)


class _Array:
    """An array of one dimension, of integers, in a file; raises UserError if it holds something else."""

    def __init__(self, file: DataFile) -> None:
        self._file = file
        header = _HEADER.match(file.read_part(0, 4096))
        if not header or int.from_bytes(header[1], "little") != len(header[2]):
            raise UserError(f"{file.path}: is not an array of integers as torchtitan_graph.pretokenize writes them")
        self.dtype, self.length = np.dtype(header[3].decode()), int(header[4])
        self._begin = header.end()
        if file.size != (size := self._begin + self.length * self.dtype.itemsize):
            raise UserError(f"{file.path}: has other than the {size:,} bytes that its header says")

    def part(self, begin: int, end: int) -> np.ndarray:
        """Return the elements from `begin` to before `end`; of a part that is not there, those that are."""
        return np.frombuffer(self._file.read_part(*self._bytes(begin, end)), self.dtype)

    def prepare(self, begin: int, end: int) -> None:
        """Begin to read what `part` returns, if that takes long."""
        self._file.prepare(*self._bytes(begin, end))

    def _bytes(self, begin: int, end: int) -> tuple[int, int]:
        return self._begin + begin * self.dtype.itemsize, (end - begin) * self.dtype.itemsize

    def mapped(self) -> np.ndarray:
        """Return the array, mapped into memory."""
        if not self.length:  # can't be mapped
            return np.empty(0, self.dtype)
        with refuse_unreadable(self._file.path):
            array = np.memmap(self._file.local(), self.dtype, mode="r", offset=self._begin, shape=(self.length,))
        return array.view(np.ndarray)  # an element of a memmap costs ten times as much


def _name(array: str, number: int) -> str:
    return f"{array}-{number:05}.npy"


def _files_digest(files: list[DataFile]) -> str:
    return digest_files(files, [file.base for file in files])
