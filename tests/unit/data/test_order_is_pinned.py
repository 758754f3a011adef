"""The order of documents and rows of each kind of source is pinned: a run that an upgrade resumes has the same data.

A digest that changes means that saved positions no longer name the same rows. Then such positions must be refused (the
corpus' digest, or the loader's identity, has to change too), and CHANGELOG.md says so.
"""

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from torchtitan_graph.config.job import DataSource
from torchtitan_graph.data import build_dataloader
from torchtitan_graph.data.corpus import document_key
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.open_corpus import open_corpus, open_mixture
from torchtitan_graph.data.shards import write_shards
from torchtitan_graph.data.tokenizer import ByteTokenizer

TEXTS = ["".join(chr(97 + number * place % 26) for place in range(number * 7 % 50)) for number in range(300)]
ROWS = 30

# Of the documents of the first epoch; of rows without end, and of two epochs to the end.
EXPECTED: dict[str, tuple[str, ...]] = {
    "folder": ("0d31436f3d14b074", "c4d0a8e7594cb0b5", "575e183d57517839"),
    "pieces.txt": ("4e536fa8e8a5e995", "1a6c526035fe9a27", "be5a64e459b0eaec"),
    "lines.jsonl": ("ab48c608646058bc", "43bb875fef7339ee", "33241dd902ab4372"),
    "table.parquet": ("080a58ffe794c07d", "743baf21451667a8", "10fbd6c3494bddb2"),
    "saved": ("eb658fb9872a9a8e", "cf187c599e934b9f", "9b2c2a4f7fc709df"),
    "shards": ("d8d0bb43ea3699f2", "43bb875fef7339ee", "33241dd902ab4372"),
    "own": ("c85d39dbaf313879", "f9b5fd92026c364e", "675b6b195feb4e45"),
    "chats.jsonl": ("cfa60b19391c10c0", "a660e94a3e43bd23", "12a28bb84c4e9110"),
    "mixture": ("4b1c6bdca392c8e4", "08c74d95334800ba"),
}


class Numbers:
    """A user's corpus: texts by number."""

    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, index: int) -> str:
        return TEXTS[index]


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    """Write the same texts in each form."""
    datasets = pytest.importorskip("datasets")
    root = tmp_path_factory.mktemp("places")
    (root / "folder").mkdir()
    for number, text in enumerate(TEXTS[:100]):
        (root / "folder" / f"{number}.txt").write_text(text)
    (root / "pieces.txt").write_text("".join(f"{text}\n" * 4 for text in TEXTS))
    (root / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    rows = [{"prompt": text[:9], "completion": f"{text[9:]}."} for text in TEXTS]
    (root / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = datasets.Dataset.from_dict({"text": TEXTS})
    table.to_parquet(str(root / "table.parquet"))
    table.save_to_disk(str(root / "saved"))
    source = open_corpus("", str(root / "lines.jsonl"), "train", 0).source
    written = write_shards(
        root / "shards",
        lambda start: (
            (document_key(source.identity(i)), np.array([*TEXTS[i].encode()], np.int64)) for i in range(start, 300)
        ),
        splits=["train", "validation"], source_digest=source.digest, tokenizer=ByteTokenizer(),
    )  # fmt: skip
    assert [*written]
    return root


def digest(parts) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(repr(part).encode())
    return total.hexdigest()[:16]


def rows_of(ranks: int, epochs: int, most_rows: float = math.inf, **corpus) -> list[list]:
    loaders = [
        build_dataloader(
            **corpus, split="train", tokenizer=ByteTokenizer(), seed=3, seq_len=64, local_batch_size=6 // ranks,
            dp_rank=rank, dp_degree=ranks, epochs=epochs, most_rows=most_rows,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    rows: list[list] = []
    while not loaders[0].has_ended and len(rows) < (most_rows if epochs else ROWS):
        rows += [row.tolist() for loader in loaders for row in torch.stack(tuple(next(loader)), 1)]
    return rows


@pytest.mark.parametrize(
    "kind", ["folder", "pieces.txt", "lines.jsonl", "table.parquet", "saved", "shards", "own", "chats.jsonl", "mixture"]
)
def test_order_is_pinned(places, kind, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    reading = RowFormat(ByteTokenizer())
    corpus: dict = {"dataset": "", "dataset_path": str(places / kind)}
    if kind == "own":
        corpus = {"dataset": f"{Path(__file__).stem}.Numbers", "dataset_path": None}
    if kind == "mixture":
        names = {"lines.jsonl": 0.7, "pieces.txt": 0.2, "chats.jsonl": 0.1}
        sources = [DataSource(dataset_path=str(places / name), weight=weight) for name, weight in names.items()]
        corpus = {"dataset": "", "dataset_path": None, "sources": sources}
        opened = open_mixture(sources, "train", 3, reading)
    else:
        opened = open_corpus(corpus["dataset"], corpus["dataset_path"], "train", 3, reading)
    documents = [[str(item) for item in opened.documents(lane, 0, 0)] for lane in range(opened.num_lanes)]
    found = [digest(documents)]
    for epochs in (0,) if kind == "mixture" else (0, 2):
        of_one, of_three = (rows_of(ranks, epochs, **corpus) for ranks in (1, 3))
        assert of_one == of_three
        for most_rows in (6, 48) if epochs else ():
            few = rows_of(1, epochs, most_rows, **corpus)
            assert few == of_one[: len(few)], "of a run of few steps"
        found.append(digest(of_one))
    assert tuple(found) == EXPECTED[kind]
