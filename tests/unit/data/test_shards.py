"""Token shards give the rows of the text they were made from, to the bit; what is not whole is refused."""

import hashlib
import io
import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from torchtitan_graph.data import DataLoader, build_dataloader, load_tokenizer
from torchtitan_graph.data.corpus import document_key
from torchtitan_graph.data.files import DataFile
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.open_corpus import open_corpus
from torchtitan_graph.data.shards import write_shards
from torchtitan_graph.data.sources import Source, digest_files
from torchtitan_graph.data.tokenizer import ByteTokenizer, Tokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.pretokenize import Encode, encode_all


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    file.write_text("".join(json.dumps({"text": "wörd " * (n * 7 % 23) + str(n)}) + "\n" for n in range(200)))
    return file


def write(text: Path, folder: Path, tokenizer: Tokenizer | None = None, fail_at: int = -1, **options) -> Path:
    tokenizer = tokenizer or ByteTokenizer()
    source = open_corpus("", str(text), "train", 0).source

    def documents(start: int):
        for index in range(start, len(source)):
            if index == fail_at:
                raise InterruptedError(index)
            yield document_key(source.identity(index)), np.array(tokenizer.encode(source[index]))

    options = {"splits": ["train", "validation"], "tokens_per_shard": 3000, "source_digest": source.digest, **options}
    for _ in write_shards(folder, documents, tokenizer=tokenizer, **options):
        pass
    return folder


@pytest.fixture(scope="module")
def shards(text, tmp_path_factory) -> Path:
    folder = write(text, tmp_path_factory.mktemp("shards") / "bytes")
    assert len(list(folder.glob("tokens-*.npy"))) > 3
    return folder


def loader(path: Path, split: str = "train", tokenizer: Tokenizer | None = None, **options) -> DataLoader:
    return build_dataloader(
        dataset="", dataset_path=str(path), split=split, tokenizer=tokenizer or ByteTokenizer(), seed=3, seq_len=64,
        **{"local_batch_size": 4, "dp_rank": 0, "dp_degree": 1, **options},
    )  # fmt: skip


def take(data: DataLoader, steps: int) -> list[str]:
    return [hashlib.sha256(torch.stack(next(data)).numpy()).hexdigest() for _ in range(steps)]


@pytest.mark.parametrize("split", ["train", "validation", "all"])
def test_rows_are_those_of_the_text(text, shards, split):
    expected = take(loader(text, split), 40)
    assert take(loader(shards, split), 40) == expected


def test_worker_processes_map_the_files_too(text, shards):
    assert take(loader(shards, num_workers=1), 4) == take(loader(text), 4)


def test_rows_are_those_of_the_text_with_a_trained_tokenizer(text, tmp_path):
    tokenizer = load_tokenizer("tests/assets/tokenizer")
    shards = write(text, tmp_path / "shards", tokenizer)
    assert take(loader(shards, tokenizer=tokenizer), 10) == take(loader(text, tokenizer=tokenizer), 10)


@pytest.mark.parametrize("first", ["text", "shards"])
def test_a_run_goes_over_from_one_to_the_other(text, shards, first):
    here, there = (text, shards) if first == "text" else (shards, text)
    expected, data = take(loader(text), 12), loader(here)
    take(data, 5)
    resumed = loader(there)
    resumed.load_state_dict(data.state_dict())
    assert take(resumed, 7) == expected[5:]


def test_another_seed_gives_other_rows(text, shards):
    other = build_dataloader(
        dataset="", dataset_path=str(shards), split="train", tokenizer=ByteTokenizer(), seed=4, seq_len=64,
        local_batch_size=4, dp_rank=0, dp_degree=1,
    )  # fmt: skip
    assert take(other, 4) != take(loader(text), 4)


def test_large_vocabularies_take_four_bytes(text, tmp_path):
    class Large(ByteTokenizer):
        def __init__(self) -> None:
            super().__init__()
            self.vocab_size = 2**16 + 1

        def encode(self, text: str) -> list[int]:
            return [2**16 if byte == ord("w") else byte for byte in super().encode(text)]

    folder = write(text, tmp_path / "large", Large())
    assert np.load(folder / "tokens-00000.npy", allow_pickle=False).dtype == np.dtype("<u4")
    assert take(loader(folder, tokenizer=Large()), 4) == take(loader(text, tokenizer=Large()), 4)


def files(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("fail_at", [0, 1, 77, 199])
def test_a_writer_that_was_interrupted_goes_on(text, shards, fail_at, tmp_path):
    folder = tmp_path / "again"
    with pytest.raises(InterruptedError):
        write(text, folder, fail_at=fail_at)
    assert not folder.exists()
    part = tmp_path / "again.part"
    whole = len(list(part.glob("keys-*")))
    assert (whole > 0) == (fail_at > 50)
    (part / f"tokens-{whole:05}.npy").write_bytes(b"torn")  # a kill between the arrays of a shard
    (part / f"ends-{whole:05}.tmp").write_bytes(b"torn")
    write(text, folder)
    there = files(folder)
    assert {name: there[name] for name in files(shards)} == files(shards)
    assert not part.exists()
    assert take(loader(folder), 3) == take(loader(text), 3)


def test_only_the_documents_behind_whole_shards_are_read_again(text, tmp_path):
    with pytest.raises(InterruptedError):
        write(text, tmp_path / "a", fail_at=150)
    ends = [np.load(file, allow_pickle=False) for file in sorted((tmp_path / "a.part").glob("ends-*.npy"))]
    with pytest.raises(InterruptedError, match=str(sum(map(len, ends)))):
        write(text, tmp_path / "a", fail_at=sum(map(len, ends)))


# What is refused


def test_another_tokenizer_is_refused(shards):
    with pytest.raises(UserError, match="of another tokenizer than model.hf_assets_path names"):
        loader(shards, tokenizer=load_tokenizer("tests/assets/tokenizer"))


def test_where_text_is_wanted_shards_are_refused(shards):
    with pytest.raises(UserError, match="holds token ids, and no text"):
        open_corpus("", str(shards), "train", 0)


def test_a_folder_of_somebody_else_is_not_deleted(text, tmp_path):
    (tmp_path / "a.part").mkdir()
    (tmp_path / "a.part" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"a.part holds notes.txt, which is not a shard"):
        write(text, tmp_path / "a")
    assert (tmp_path / "a.part" / "notes.txt").read_text() == "mine"


def test_a_folder_that_is_there_and_one_begun_otherwise_are_refused(text, shards, tmp_path):
    with pytest.raises(UserError, match="is there already"):
        write(text, shards)
    with pytest.raises(InterruptedError):
        write(text, tmp_path / "a", fail_at=5)
    with pytest.raises(UserError, match="begun with another corpus or tokenizer"):
        write(text, tmp_path / "a", source_digest="other")


def test_documents_of_one_split_serve_that_split_alone(text, tmp_path):
    folder = write(text, tmp_path / "train", splits=["train"])
    loader(folder), loader(folder, "all")
    with pytest.raises(UserError, match="holds only documents for train.*--split validation"):
        loader(folder, "validation")


class Bomb:
    def __reduce__(self):
        return (Path("pickle-was-run").touch, ())


def pickled() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Bomb()] * 600, object), allow_pickle=True)
    return file.getvalue()


DAMAGES = {
    "no index": ("shards.json", lambda content: b"{"),
    "another format": ("shards.json", lambda content: content.replace(b"shards 1", b"shards 0")),
    "too many shards": ("shards.json", lambda content: content.replace(b'"shards": ', b'"shards": 1')),
    "cut short": ("tokens-00001.npy", lambda content: content[:-1]),
    "another byte": ("tokens-00001.npy", lambda content: content[:-1] + b"\x7f"),
    "a pickle": ("keys-00000.npy", lambda content: pickled()),
    "a bare pickle": ("keys-00000.npy", lambda content: pickle.dumps(Bomb())),
    "a deep index": ("shards.json", lambda content: b'{"format": ' + b"[" * 10**5),
    "another type": ("shards.json", lambda content: content.replace(b'"shards": ', b'"shards": true, "s": ')),
    "no shards": ("shards.json", lambda content: content.replace(b'"shards": ', b'"shards": 0, "s": ')),
    "10^18 shards": ("shards.json", lambda content: content.replace(b'"shards": ', b'"shards": 1%018d, "s": ' % 0)),
    "no splits": ("shards.json", lambda content: content.replace(b'"train",', b"").replace(b'"validation"', b"")),
}


def source_of(folder: Path) -> Source:
    return open_corpus("", str(folder), "all", 0, RowFormat(ByteTokenizer())).source


def damaged(shards: Path, folder: Path, name: str, change, keep_digest: bool) -> Path:
    folder.mkdir()
    for file in shards.iterdir():
        content = file.read_bytes()
        (folder / file.name).write_bytes(change(content) if file.name == name else content)
    if not keep_digest:
        index = json.loads((folder / "shards.json").read_text())
        arrays = itertools.product(range(index["shards"]), ("tokens", "ends", "keys"))
        files = [DataFile(folder / f"{array}-{number:05}.npy") for number, array in arrays]
        index["files"] = digest_files(files, [file.name for file in files])
        (folder / "shards.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shards_are_refused(shards, damage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=str(tmp_path)):
        loader(damaged(shards, tmp_path / "damaged", *DAMAGES[damage], keep_digest=True))


def npy(change):
    def changed(content: bytes) -> bytes:
        file = io.BytesIO()
        np.save(file, change(np.load(io.BytesIO(content), allow_pickle=False)), allow_pickle=False)
        return file.getvalue()

    return changed


def header(text: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


FORGERIES = {
    "a pickle": ("keys-00000.npy", lambda content: pickled()),
    "a bare pickle": ("keys-00000.npy", lambda content: pickle.dumps(Bomb())),
    "descending ends": ("ends-00000.npy", npy(lambda ends: np.concatenate([ends[:1] + 10**6, ends[1:]]))),
    "ends behind the end": ("ends-00000.npy", npy(lambda ends: np.concatenate([ends[:-1], ends[-1:] + 1]))),
    "too few keys": ("keys-00000.npy", npy(lambda keys: keys[1:])),
    "no documents": ("ends-00000.npy", npy(lambda ends: ends[:0])),
    "two dimensions": ("ends-00000.npy", npy(lambda ends: ends[None])),
    "a deep header": ("keys-00000.npy", lambda content: header(b"(" * 9000)),
    "a header of its own": ("keys-00000.npy", lambda content: header(b"{**{}, 'shape': (9**9**9,)}")),
    "more than there is": ("keys-00000.npy", lambda content: content.replace(b"(", b"(9999")),
    "nothing": ("keys-00000.npy", lambda content: b""),
    "floats": ("tokens-00000.npy", npy(lambda tokens: tokens.astype(np.float32))),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_shards_that_were_changed_with_their_index_run_nothing_and_are_refused(shards, forgery, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="-00000.npy"):
        source_of(damaged(shards, tmp_path / "forged", *FORGERIES[forgery], keep_digest=False))
    assert not (tmp_path / "pickle-was-run").exists()


@pytest.mark.parametrize("name", ["tokens-00000.npy", "ends-00000.npy", "keys-00000.npy"])
@pytest.mark.parametrize("change", [lambda file: os.truncate(file, 300), lambda file: os.utime(file, (1, 1))])
def test_shards_that_change_while_they_are_read_are_named(shards, tmp_path, monkeypatch, name, change):
    """To read from a mapped file what was cut off would end the process."""
    monkeypatch.setattr("torchtitan_graph.data.files.CHECK_S", 0)  # at each document
    shutil.copytree(shards, tmp_path / "copy")
    source = source_of(tmp_path / "copy")
    change(tmp_path / "copy" / name)
    with pytest.raises(UserError, match=name):
        source[0], source.identity(0)


def test_ids_that_the_tokenizer_does_not_have_are_refused(shards, tmp_path):
    first = ByteTokenizer().vocab_size
    change = npy(lambda tokens: np.full_like(tokens, first))
    forged = damaged(shards, tmp_path / "f", "tokens-00000.npy", change, keep_digest=False)
    with pytest.raises(UserError, match="document 2: its token ids are not of this tokenizer"):
        source_of(forged)[1]


# The script


def pretokenize(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torchtitan_graph.pretokenize", *options]
    environment = {"PYTHONPATH": ":".join([".", *sys.path])}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


class Deadly:
    """Documents of which one kills the process that reads it."""

    is_whole, digest = False, ""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> str:
        if index == 130:
            os.kill(os.getpid(), signal.SIGKILL)
        return "text"

    def identity(self, index: int) -> int:
        return index


def test_a_worker_process_that_is_killed_ends_the_script():
    encoded = encode_all(Encode(Deadly(), ByteTokenizer()), range(200), 1)
    with pytest.raises(UserError, match="--num_workers 1: one of these processes died.* out of memory: set fewer"):
        list(encoded)


@pytest.mark.slow
def test_the_script_writes_the_same_shards_with_worker_processes(text, tmp_path):
    run = pretokenize("--dataset_path", str(text), "--out", str(tmp_path / "out"), "--num_workers", "1")
    assert run.returncode == 0, run.stderr
    assert "200 documents" in run.stdout + run.stderr
    assert take(loader(tmp_path / "out"), 3) == take(loader(text), 3)


def test_errors_are_one_line(text, tmp_path):
    (tmp_path / "out").mkdir()
    run = pretokenize("--dataset_path", str(text), "--out", str(tmp_path / "out"))
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()  # without argparse's usage
    assert "is there already" in line
