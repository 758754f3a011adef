"""What takes a name, or is kept in a second place, is on disk before: a crash of the machine leaves old or new."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from torchtitan_graph.checkpoint import save_model
from torchtitan_graph.checkpoint.remote import Remote, fetch
from torchtitan_graph.data.node_cache import NodeCache
from torchtitan_graph.data.shards import write_shards
from torchtitan_graph.data.tokenizer import ByteTokenizer
from torchtitan_graph.metrics import jsonl
from torchtitan_graph.models.hf.files import NewFolder
from torchtitan_graph.run.failure import reserve
from torchtitan_graph.run.lock import Lock


def shards(folder: Path) -> None:
    documents = [(0, np.arange(3)), (1, np.arange(4))]
    written = write_shards(
        folder / "shards", lambda start: documents[start:], source_digest="x", splits=["all"], tokenizer=ByteTokenizer()
    )
    assert [*written][-1] == (2, 7)


def cached(folder: Path) -> None:
    def build(part: Path) -> None:
        part.mkdir()
        (part / "0.npy").write_bytes(b"x")

    NodeCache(str(folder / "cache")).make("key", build=build)


def export(folder: Path) -> None:
    new = NewFolder(folder / "hf")
    new.write_json("config.json", {})
    new.write_tensors("model.safetensors", {"x": torch.zeros(2)})
    new.write_files({"more/template.jinja": b"x"})
    new.commit()


def dropped(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    jsonl.begin(path, 1)
    assert (folder / "metrics_dropped.jsonl").read_text() == '{"step": 2}\n'


def fetched(folder: Path) -> None:
    path = save_model(folder / "there", nn.Linear(2, 2))
    assert fetch(Remote(f"file://{path}").address, folder / "here" / path.name, None) is None


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (Lock, "run.lock"),
        (reserve, "run.reserve/space"),
        (shards, "shards"),
        (cached, "cache"),
        (export, "hf"),
        (dropped, "metrics_dropped.jsonl"),
        (fetched, "here/step-0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_gets_its_name_is_on_disk(
    write: Callable[[Path], object], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[int] = set()  # inodes
    flush = os.fsync

    def fsync(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        flush(descriptor)

    def not_flushed(path: Path) -> list[Path]:
        return [each for each in (path, *path.rglob("*")) if each.stat().st_ino not in flushed]

    def watched(function: Callable[..., None]) -> Callable[..., None]:
        def run(old: str | Path, new: str | Path) -> None:
            assert not not_flushed(Path(old)), f"renamed to {new}"
            function(old, new)
            flushed.discard(Path(new).parent.stat().st_ino)

        return run

    monkeypatch.setattr(os, "fsync", fsync)
    for each in ("rename", "replace", "link"):
        monkeypatch.setattr(os, each, watched(getattr(os, each)))
    write(tmp_path)
    if write is not cached:  # which holds files of locks, too
        assert not not_flushed(tmp_path / name)
    if write in (export, fetched):  # nothing is deleted for it before its name is on disk, too
        assert (tmp_path / name).parent.stat().st_ino in flushed
