"""Corpora of Hugging Face `datasets` (extra `hf`): Parquet files, saved datasets, and streams of the hub."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan_graph.data.corpus import Corpus, ShuffledCorpus, in_split, num_lanes, option_of, shuffled
from torchtitan_graph.data.files import DataFile
from torchtitan_graph.data.sources import Chain, Source, digest_files
from torchtitan_graph.errors import UserError
from torchtitan_graph.patience import is_transient
from torchtitan_graph.small_files import read_json

_SHUFFLED_TOGETHER = 256  # documents of a stream; every lane that a process reads has so many in memory


class Rows:
    """A document per row of a map-style dataset, which `datasets` memory-maps from Arrow files."""

    def __init__(self, rows: Any, column: str, name: str, digest: str) -> None:
        if column not in rows.column_names:
            raise UserError(f"{name}: no column {column!r}; there is {sorted(rows.column_names)}.")
        self._rows, self._column, self._name = rows.select_columns([column]), column, name
        self.digest = digest + column

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> str:
        text = self._rows[index][self._column]
        if not isinstance(text, str):
            raise UserError(f"{self._name}, row {index + 1}: no text in the column {self._column!r}, but {text!r:.80}.")
        return text

    def identity(self, index: int) -> str:
        return f"{Path(self._name).name}:{index}"


class StreamedCorpus:
    """A split of a streaming dataset: a lane reads some of its shards in order, and shuffles each block it has read.

    A lane is resumed by reading up to its position again.
    """

    def __init__(self, stream: Any, column: str, name: str, split: str, seed: int) -> None:
        self._stream, self._column, self._name = stream, column, name
        self._split, self._seed = split, seed
        self.num_lanes = num_lanes(stream.num_shards)
        self.digest = f"{split} of {name}, {stream.num_shards} shards, {column}"

    def documents(self, lane: int, epoch: int, start: int) -> Iterator[tuple[int, str]]:
        first = start // _SHUFFLED_TOGETHER * _SHUFFLED_TOGETHER
        stream = self._stream.shard(self.num_lanes, lane).skip(first)
        # Not `for row in stream`: in a worker process that would yield another shard for each worker.
        for block in stream.iter(batch_size=_SHUFFLED_TOGETHER):
            if self._column not in block:
                raise UserError(f"{self._name}: no column {self._column!r}; there is {sorted(block)}.")
            texts = block[self._column]
            for place in range(max(0, start - first), len(texts)):
                text = texts[shuffled(place, len(texts), (self._seed, epoch))]
                if not isinstance(text, str):
                    raise UserError(f"{self._name}: no text in the column {self._column!r}, but {text!r:.80}.")
                # The place in the stream would identify documents too, but the text keeps copies in one split.
                if in_split(self._split, text):
                    yield first + place, text
            first += len(texts)


def open_parquet(file: Path, column: str) -> Source:
    """Open a Parquet file; `datasets` writes it to its cache as Arrow first, once, for reading in any order."""
    datasets = _import_datasets(str(file))
    DataFile(file)  # raises for no regular file
    try:
        rows = datasets.load_dataset("parquet", data_files=str(file), split="train")
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:  # pyarrow's are ValueErrors
        raise UserError(f"{file}: not a Parquet file that can be read: {error.__cause__ or error}") from error
    return Rows(rows, column, str(file), digest_files(file.parent, [file]))


def is_saved_dataset(path: Path) -> bool:
    """Return whether a folder was written by `save_to_disk`."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def open_saved(path: Path, column: str, split: str, seed: int) -> Corpus:
    """Open a dataset written by `save_to_disk`. Its own splits (validation, or else test) are used."""
    datasets = _import_datasets(str(path))
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
        return Rows(parts[part], column, str(folder), digest_files(folder, sorted(folder.glob("*.arrow"))))

    held_out = next((name for name in ("validation", "test") if name in parts), None)
    if split == "all":
        return ShuffledCorpus(Chain([rows(part) for part in parts]), "all", seed)
    if "train" not in parts:
        raise UserError(f"{path}: no split 'train' to train on, or to hold documents out of; there is {list(parts)}.")
    if held_out is None:
        return ShuffledCorpus(rows("train"), split, seed)
    return ShuffledCorpus(rows("train" if split == "train" else held_out), "all", seed)


def open_hub(name: str, column: str, split: str, seed: int) -> Corpus:
    """Stream a dataset of the hub, "owner/name" or "owner/name:config". Its own validation split is used."""
    datasets = _import_datasets(name)
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
        ) from error
    return StreamedCorpus(stream, column, f"{name}, {part}", "all" if own else split, seed)


def _import_datasets(wanted_for: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise UserError(
            f"{wanted_for} is read by the package `datasets`, which is missing: pip install 'torchtitan_graph[hf]'"
        ) from error
