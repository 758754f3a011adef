"""Corpora of Hugging Face `datasets` (extra `hf`): tables of Arrow, saved datasets, and streams of the hub."""

import importlib
import json
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan_graph.data.bad_rows import BadRow
from torchtitan_graph.data.columns import find_column, value_of, without_nulls
from torchtitan_graph.data.corpus import Corpus, Resume, ShuffledCorpus, in_split, num_lanes, option_of, shuffled
from torchtitan_graph.data.document import Document
from torchtitan_graph.data.files import DataFile, Reading
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.node_cache import Entry
from torchtitan_graph.data.row_forms import Form
from torchtitan_graph.data.sources import Chain, Source, digest_files
from torchtitan_graph.errors import UserError
from torchtitan_graph.patience import retry_io
from torchtitan_graph.small_files import read_json
from torchtitan_graph.transient import is_transient

_SHUFFLED_TOGETHER = 256  # documents of a stream; every lane that a process reads has so many in memory


class Rows:
    """A document per row of a map-style dataset, which `datasets` memory-maps from Arrow files.

    Keys of objects that are null are left out: a table has one schema for all its rows.
    """

    def __init__(
        self, rows: Any, form: Form, reading: RowFormat, name: str, digest: str, entry: Entry | None = None
    ) -> None:
        self._entry = entry  # of the cache, as long as it is read
        self.form = form
        self._rows = rows.select_columns(used_columns(rows.features, form))
        self._name, self._bad_rows = name, reading.bad_rows(name)
        self.digest, self.is_whole = digest + self.form.digest, self.form.is_whole
        if reading.is_small(self._rows.data.nbytes):
            self._bad_rows.read_all(self._read, len(self))
        elif len(self):
            self[0]  # raises for an invalid row

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Document:
        return self._bad_rows.read(self._read, index)

    def _read(self, index: int) -> Document:
        where = f"{self._name}, row {index + 1}"
        try:
            row = {column: without_nulls(value) for column, value in self._rows[index].items()}
        except UnicodeDecodeError as error:
            raise BadRow("not_utf8", f"{where}: not UTF-8 ({error})") from error
        return self.form.document(row, where)

    def identity(self, index: int) -> str:
        return f"{Path(self._name).name}:{index}"


class StreamedCorpus:
    """A split of a streaming dataset: a lane reads some of its shards in order, and shuffles each block it has read.

    A lane is begun again at the last block before its position, by the state that the stream had there.
    """

    def __init__(self, stream: Any, reading: RowFormat, name: str, split: str, seed: int) -> None:
        # Not `take`: a lane's stream is sharded after it.
        first = retry_io(lambda: next(iter(stream.iter(batch_size=1)), None), what=name)
        row = {column: values[0] for column, values in (first or {"text": [None]}).items()}
        self.form: Form = reading.form(row, name)
        self._bad_rows = reading.bad_rows(name)
        self._stream, self._name = stream, name
        self._split, self._seed = split, seed
        self._release = str(import_datasets(name).__version__)
        self._resumes: dict[int, dict[int, Resume]] = {}  # of each lane, by document
        self.num_lanes = num_lanes(stream.num_shards)
        self.digest = f"{split} of {name}, {stream.num_shards} shards, {self.form.digest}"

    def is_whole(self, lane: int) -> bool:
        """Return whether documents are packed whole, in any lane."""
        return self.form.is_whole

    def documents(self, lane: int, epoch: int, start: int) -> Iterator[tuple[int, Document]]:
        for first, block in self._blocks(lane, start):
            rows = [dict(zip(block, map(without_nulls, row), strict=True)) for row in zip(*block.values(), strict=True)]
            for place in range(max(0, start - first), len(rows)):
                row = rows[shuffled(place, len(rows), (self._seed, epoch))]
                # The place in the stream would identify documents too, but the content keeps copies in one split.
                if in_split(self._split, self._identity(row)):
                    Reading.documents += 1
                    yield first + place, self._bad_rows.read(partial(self._read, row), place)

    def _blocks(self, lane: int, start: int) -> Iterator[tuple[int, dict[str, list[Any]]]]:
        """Yield a lane's blocks, each with the number of its first document, from the last one known before `start` on.

        A stream that fails for a while is begun again at the block that it failed to read.
        """
        resume, known = self.resume(lane, start), self._resumes[lane]
        first, state = (0, None) if resume is None else (resume.document, resume.state)
        stream: Any = None
        blocks: Any = None

        def next_block() -> dict[str, list[Any]] | None:
            nonlocal stream, blocks
            if blocks is None:
                stream = self._stream.shard(self.num_lanes, lane)
                if state is not None:
                    stream.load_state_dict(state)
                # Not `iter(stream)`: in a worker process that would yield another shard for each worker.
                blocks = stream.iter(batch_size=_SHUFFLED_TOGETHER)
            try:
                return next(blocks, None)
            except BaseException:
                blocks = None  # what raised has ended
                raise

        while (block := retry_io(next_block)) is not None:
            begin, first = first, first + len(next(iter(block.values())))
            state = stream.state_dict()
            known[first] = Resume(first, self._release, state)
            yield begin, block

    def resume(self, lane: int, document: int) -> Resume | None:
        """Return the nearest place before a document from which a lane can be read; those before it are forgotten."""
        known = self._resumes.setdefault(lane, {})
        nearest = max((place for place in known if place <= document), default=None)
        for place in [place for place in known if nearest is not None and place < nearest]:
            del known[place]
        return None if nearest is None else known[nearest]

    def set_resume(self, lane: int, resume: Resume) -> None:
        """Make a place known, as `resume` returned it in another process, perhaps long ago."""
        if resume.release == self._release:
            self._resumes.setdefault(lane, {})[resume.document] = resume

    def _read(self, row: dict[str, Any], index: int) -> Document:
        return self.form.document(row, self._name)

    def _identity(self, row: dict[str, Any]) -> str:
        columns = [column for column in (*self.form.columns, *self.form.optional) if find_column(row, column)]
        content = [value_of(row, column) for column in columns]
        if len(content) == 1 and isinstance(content[0], str):
            return content[0]
        return json.dumps(content, default=str)


def form_of_features(features: Any, reading: RowFormat, name: str) -> Form:
    """Return how the rows of a table with these features are read."""
    return reading.form(_columns_inside(features) or {}, name)


def used_columns(features: Any, form: Form) -> list[str]:
    """Return the columns of a table that a form reads: those whole in which its columns are."""
    columns = _columns_inside(features) or {}
    found = (find_column(columns, column) for column in (*form.columns, *form.optional))
    return [*dict.fromkeys(keys[0] for keys in found if keys)]


def _columns_inside(feature: Any) -> Any:
    """Return what a column of objects has inside, None for any other."""
    inner = feature if isinstance(feature, dict) else {}
    return {key: _columns_inside(each) for key, each in inner.items()} or None


def is_saved_dataset(names: Collection[str]) -> bool:
    """Return whether a folder with files of these names was written by `save_to_disk`."""
    return "dataset_dict.json" in names or "state.json" in names


def open_saved(path: Path, reading: RowFormat, split: str, seed: int) -> Corpus:
    """Open a dataset written by `save_to_disk`. Its own splits (validation, or else test) are used."""
    datasets = import_datasets(str(path))
    for name in ("dataset_dict.json", "state.json", "dataset_info.json"):
        for file in (path / name, *path.glob(f"*/{name}")):
            if file.exists():
                read_json(file, dict[str, Any])  # raises for an invalid file, before `datasets` reads it
    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:  # of many types, for damaged files
        if is_transient(error):
            raise
        raise UserError(f"{path}: not a saved dataset that can be read: {error!r}") from error
    parts = saved if isinstance(saved, dict) else {"train": saved}

    def rows(part: str) -> Source:
        folder = path / part if isinstance(saved, dict) else path
        form = form_of_features(parts[part].features, reading, str(folder))
        return Rows(parts[part], form, reading, str(folder), _digest(folder))

    held_out = next((name for name in ("validation", "test") if name in parts), None)
    if split == "all":
        return ShuffledCorpus(Chain([rows(part) for part in parts], [f"{path}/{part}" for part in parts]), "all", seed)
    if "train" not in parts:
        raise UserError(f"{path}: no split 'train' to train on, or to hold documents out of; there is {list(parts)}.")
    if held_out is None:
        return ShuffledCorpus(rows("train"), split, seed)
    return ShuffledCorpus(rows("train" if split == "train" else held_out), "all", seed)


def _digest(folder: Path) -> str:
    files = [DataFile(file) for file in sorted(folder.glob("*.arrow"))]
    return digest_files(files, [file.name for file in files])


def open_hub(name: str, reading: RowFormat, split: str, seed: int) -> Corpus:
    """Stream a dataset of the hub, "owner/name" or "owner/name:config". Its own validation split is used."""
    datasets = import_datasets(name)
    repository, _, config = name.partition(":")
    try:
        parts = datasets.get_dataset_split_names(repository, config or None)
        own = "validation" in parts and split != "all"
        part = "validation" if own and split == "validation" else "train"
        stream = datasets.load_dataset(repository, config or None, split=part, streaming=True)
    except Exception as error:  # of many types: offline, no such name, no such config, access not granted
        raise UserError(
            f"{option_of(split)} = {name!r}: can't be streamed from the Hugging Face hub: {error}\n"
            f"Without a network, set {option_of(split)}_path to a local copy, or use the embedded corpus `stdlib`."
        ) from _origin(error)
    return StreamedCorpus(stream, reading, f"{name}, {part}", "all" if own else split, seed)


def _origin(error: BaseException) -> BaseException:
    """Return the error at which all began, such as a status of HTTP: `datasets` makes "no such file" of a 503, and
    names no cause."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def import_datasets(wanted_for: str) -> Any:
    """Return the package `datasets`; raise UserError if it is missing."""
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise UserError(
            f"{wanted_for} is read by the package `datasets`, which is missing: pip install datasets"
        ) from error
