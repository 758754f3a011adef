"""A corpus at an address gives the rows that it gives here, is read once for a node, and survives kills and changes."""

import dataclasses
import gc
import gzip
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import resource
import threading
import time
import uuid
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess as Process
from pathlib import Path, PurePath
from threading import Thread
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from disks import fill, small_disk
from s3 import Request, Store, at_first
from torchtitan_graph import log
from torchtitan_graph.config import check_data
from torchtitan_graph.config.dump import in_toml, shown
from torchtitan_graph.config.job import ValidationSet, source_name
from torchtitan_graph.config.load import load
from torchtitan_graph.data import (
    DataLoader,
    batches,
    build_dataloader,
    files,
    lines,
    node_cache,
    parquet,
    remote_file,
    sources,
)
from torchtitan_graph.data.addresses import find_change, list_files
from torchtitan_graph.data.corpus import ShuffledCorpus, document_key
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.node_cache import NodeCache
from torchtitan_graph.data.open_corpus import list_corpora, open_corpus
from torchtitan_graph.data.parquet import open_parquet
from torchtitan_graph.data.places import find_place
from torchtitan_graph.data.shards import write_shards
from torchtitan_graph.data.tokenizer import ByteTokenizer
from torchtitan_graph.errors import UserError, without_secrets
from torchtitan_graph.transient import in_words, is_transient

FORK = multiprocessing.get_context("fork")  # starts at once
TEXTS = ["".join(chr(97 + number * place % 26) for place in range(1 + number * 7 % 50)) for number in range(300)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
TABLE = "".join(["text,id\n", *(f'"{text}",{number}\n' for number, text in enumerate(TEXTS))]).encode()


def zstd(content: bytes) -> bytes:
    return pytest.importorskip("pyarrow").compress(content, codec="zstd", asbytes=True)


def write_folder(path: Path) -> None:
    (path / "b" / ".hidden").mkdir(parents=True)
    (path / "b" / ".hidden" / "x.txt").write_text("hidden")
    (path / "b.jsonl").write_bytes(LINES[: LINES.index(b"\n") + 1])
    for number, text in enumerate(TEXTS[:60]):
        (path / "b" / f"{number}.txt").write_text(text)


def write_tokens(path: Path) -> None:
    documents = ((document_key(f"x:{i}"), np.array([*TEXTS[i].encode()], np.int64)) for i in range(300))
    list(
        write_shards(
            path,
            lambda start: documents,
            source_digest="x",
            splits=["train", "validation"],
            tokenizer=ByteTokenizer(),
            tokens_per_shard=2000,
        )
    )


def write_parquet(path: Path) -> None:
    pytest.importorskip("datasets").Dataset.from_dict({"text": TEXTS}).to_parquet(str(path))


KINDS = {
    "lines.jsonl": lambda path: path.write_bytes(LINES),
    "lines.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "lines.jsonl.zst": lambda path: path.write_bytes(zstd(LINES)),
    "table.csv": lambda path: path.write_bytes(TABLE),
    "table.csv.zst": lambda path: path.write_bytes(zstd(TABLE)),
    "book.txt": lambda path: path.write_bytes(LINES.replace(b"{", b"(")),
    "table.parquet": write_parquet,
    "folder": write_folder,
    "tokens": write_tokens,
}


@pytest.fixture(autouse=True)
def cache_of_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def bucket():
    """A folder of fsspec's memory."""
    name = f"memory://{uuid.uuid4().hex}"
    yield name
    fsspec.filesystem("memory").rm(name, recursive=True)


def put(path: Path, address: str) -> str:
    fsspec.filesystem("memory").put(str(path), address, recursive=True)
    return address


def rows_of(path: str, number: int = 12, **options) -> list:
    data = build_dataloader(
        dataset="", dataset_path=path, split="train", tokenizer=ByteTokenizer(), seed=3, seq_len=64,
        local_batch_size=4, dp_rank=0, dp_degree=1, **options,
    )  # fmt: skip
    return [next(data).tokens_BL.tolist() for _ in range(number)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("small", [True, False])
def test_a_corpus_at_an_address_gives_the_same_rows(tmp_path, bucket, monkeypatch, kind, small):
    monkeypatch.setattr(remote_file, "CHUNK", 1000)  # several blocks
    if not small:
        monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    KINDS[kind](tmp_path / kind)
    address = put(tmp_path / kind, f"{bucket}/{kind}")
    assert rows_of(address) == rows_of(str(tmp_path / kind))
    reading = RowFormat(ByteTokenizer())
    here, there = (open_corpus("", path, "all", 0, reading) for path in (str(tmp_path / kind), address))
    assert here.digest == there.digest, "so a run goes on from either"
    copy = pickle.loads(pickle.dumps(there))  # as in a worker process that is spawned
    assert [str(copy.source[i]) for i in range(30)] == [str(here.source[i]) for i in range(30)]


def test_a_store_that_fails_gives_the_same_rows_and_a_second_start_asks_for_none(tmp_path, store, monkeypatch):
    monkeypatch.setattr(remote_file, "CHUNK", 2000)
    monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    monkeypatch.setattr("torchtitan_graph.patience.FIRST_S", 0.01)
    (tmp_path / "lines.jsonl").write_bytes(LINES)
    store.put("corpus/lines.jsonl", LINES)
    store.plan = at_first(["503", "pass", "reset", "half", "lost", "500", "pass", "429", "half"] * 2)
    assert rows_of(f"{store.address}/corpus") == rows_of(str(tmp_path / "lines.jsonl"))
    assert len([each for each in store.requests if is_read(each) and each.action == "pass"]) < 2 + len(LINES) / 2000
    store.requests = []
    monkeypatch.setattr(lines, "_index_lines", lambda file: 1 / 0)  # it is kept
    assert rows_of(f"{store.address}/corpus") == rows_of(f"{store.address}/corpus/*.jsonl")
    assert not [*filter(is_read, store.requests)]


def is_read(request: Request) -> bool:
    return request.method == "GET" and not request.is_list


def read_there(address: str, there: Connection) -> None:
    remote_file.CHUNK, sources.SMALL_CORPUS_BYTES = 2000, 0
    there.send(open_corpus("", address, "all", 0).source[7])


def reading(store: Store) -> tuple[Connection, Process]:
    """Start another process that opens a corpus."""
    found, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=read_there, args=(f"{store.address}/lines.jsonl", there), daemon=True)
    process.start()
    there.close()
    return found, process


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_of_a_node_read_a_file_once(store):
    store.put("lines.jsonl", LINES)
    processes = [reading(store) for _ in range(3)]
    assert [found.recv() for found, _ in processes] == [TEXTS[7]] * 3
    assert len([*filter(is_read, store.requests)]) == -(-len(LINES) // 2000)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_start_goes_on_where_a_killed_one_stopped(store):
    store.put("lines.jsonl", LINES)
    num_blocks = -(-len(LINES) // 2000)
    actions = iter(["pass"] * 8)  # enough to list and to read some blocks
    store.plan = (next(actions, "stall") for _ in itertools.count())
    _, process = reading(store)
    while len(store.requests) < 10:
        time.sleep(0.02)
    process.kill()
    process.join()
    came = len([each for each in store.requests if is_read(each) and each.action == "pass"])
    store.plan, store.requests = itertools.repeat("pass"), []
    found, _ = reading(store)
    assert found.recv() == TEXTS[7]
    again = len([*filter(is_read, store.requests)])
    assert num_blocks - came <= again < num_blocks
    (folder,) = Path(os.environ["XDG_CACHE_HOME"]).glob("*")
    assert not [*folder.rglob("part")]


def test_a_file_that_changes_is_another_and_named_while_it_is_read(store, monkeypatch):
    monkeypatch.setattr(remote_file, "CHUNK", 100_000)
    monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    store.put("book.txt", 130 * LINES.replace(b"{", b"("))
    source = open_corpus("", f"{store.address}/book.txt", "all", 0).source
    first = source[0]
    store.put("book.txt", 130 * LINES.replace(b"{", b"["))
    with pytest.raises(UserError, match=r"s3://bucket/book.txt: was written since it was opened"):
        [source[index] for index in range(len(source))]
    assert open_corpus("", f"{store.address}/book.txt", "all", 0).source[0] == first.replace("(", "[")


@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize("at_address", [True, False])
def test_which_changes_of_files_make_another_corpus(tmp_path, store, monkeypatch, is_small, at_address):
    monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 2**20 if is_small else 0)
    monkeypatch.setattr(sources, "_END_BYTES", 100)
    (tmp_path / "corpus").mkdir()

    def digest(**contents: bytes) -> str:
        for name, content in contents.items():
            store.put(f"corpus/{name}.jsonl", content)
            (tmp_path / "corpus" / f"{name}.jsonl").write_bytes(content)
        return open_corpus("", f"{store.address}/corpus" if at_address else str(tmp_path / "corpus"), "all", 0).digest

    first, middle = digest(a=LINES), LINES.index(b"}", len(LINES) // 2) - 2
    assert digest(a=LINES) == first
    assert (digest(a=LINES[:middle] + b"!" + LINES[middle + 1 :]) == first) == (not is_small)
    assert len({first, digest(a=LINES + b'{"text": "more"}\n'), digest(a=LINES, b=LINES)}) == 3


def test_a_change_is_seen_though_the_library_keeps_listings(store):
    store.put("corpus/", b"")  # as some consoles make a folder; it is none of its files
    store.put("corpus/x.txt", b"one")
    (file,) = list_files("", f"{store.address}/corpus").files
    fs, path = fsspec.core.url_to_fs(file.address)
    assert find_change(fs, path, file) is None
    fs.find(path.rpartition("/")[0])
    store.put("corpus/x.txt", b"two")
    assert find_change(fs, path, file) == "was written since it was opened"


def test_a_version_that_a_listing_does_not_tell_is_asked_for_file_by_file(bucket, monkeypatch):
    store = fsspec.filesystem("memory")
    store.pipe(f"{bucket}/a/x.txt", b"one")
    found = store.find(f"{bucket}/a", detail=True)
    less = {name: {key: info[key] for key in ("name", "size", "type")} for name, info in found.items()}
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "find", lambda *_, detail: less)
        (file,) = list_files("", f"{bucket}/a").files
    assert [key for key, _ in file.version] == ["created"] and file.name == "x.txt"


@pytest.mark.parametrize("name", ["lines.jsonl", "book.txt", "tokens", "lines.jsonl.gz"])
def test_what_does_not_fit_into_the_cache_is_read_by_ranges_or_refused(tmp_path, bucket, monkeypatch, name):
    monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    monkeypatch.setattr(remote_file, "CHUNK", 500)
    KINDS[name](tmp_path / name)
    address, here = put(tmp_path / name, f"{bucket}/{name}"), rows_of(str(tmp_path / name))
    cache = NodeCache(str(tmp_path / "small"), 4000)
    reading = RowFormat(ByteTokenizer(), cache=cache)
    if name.endswith(".gz") or name == "tokens":
        with pytest.raises(
            UserError, match="training.cache_gb = 4e-06 is too small: 1 MB are missing: set it to 0.001 or"
        ):
            rows_of(address, reading=reading)
    else:
        assert rows_of(address, reading=reading) == here
    assert sum(file.stat().st_size for file in (tmp_path / "small").rglob("*")) <= 4000 + 4096 * 20


def test_what_was_used_longest_ago_makes_room_and_what_is_used_stays(tmp_path):
    cache = NodeCache(str(tmp_path / "cache"), 1000)
    folders = []
    for number in range(3):
        entry = cache.open(str(number), size=300)
        os.utime(entry.folder / "used", (number, number))
        folders.append(entry.folder)
    assert entry.folder == folders[2]
    gc.collect()  # the first two are used no more
    newest = cache.open("3", size=600)
    assert [folder.exists() for folder in folders] == [False, False, True] and newest.folder.exists()
    with pytest.raises(UserError, match="is too small"):
        cache.open("4", size=200)
    (tmp_path / "cache" / "mine").mkdir()
    del entry
    cache.open("4", size=200)
    assert not folders[2].exists() and (tmp_path / "cache" / "mine").exists()


def test_what_is_opened_again_was_not_used_longest_ago(tmp_path):
    cache = NodeCache(str(tmp_path), 1000)
    for number in range(2):
        os.utime(cache.open(str(number), size=400).folder / "used", (number, number))
    older = cache.open("0").folder
    gc.collect()
    cache.open("2", size=400)
    assert older.exists() and len([*tmp_path.glob("*/data")]) == 2


def test_room_that_is_promised_to_one_is_none_for_another(tmp_path, monkeypatch):
    monkeypatch.setattr(node_cache, "_DISK_LEFT", 0.0)
    cache, disk = NodeCache(str(tmp_path), math.inf), os.statvfs(tmp_path)
    size = disk.f_frsize * disk.f_bavail * 6 // 10
    entry = cache.open("0", size=size)
    with pytest.raises(UserError, match="^the disk of training.cache_folder, .* missing: make room on it"):
        cache.open("1", size=size)
    assert (entry.folder / "data").stat().st_blocks == 0  # nothing is written yet


def test_what_a_killed_process_left_is_no_part_of_what_is_made(tmp_path):
    def build(part):
        part.mkdir(exist_ok=True)
        (part / "new").touch()

    cache = NodeCache(str(tmp_path))
    left = cache.open("0").folder / "part"
    left.mkdir()
    (left / "old").touch()
    whole, _ = cache.make("0", build=build)
    assert [path.name for path in whole.iterdir()] == ["new"]


def test_a_part_of_the_disk_stays_free(tmp_path, monkeypatch):
    monkeypatch.setattr(node_cache, "_DISK_LEFT", 1.0)
    with pytest.raises(UserError, match="is full but for 100% of it, which stay free: .* GB are missing: make room"):
        NodeCache(str(tmp_path)).open("0", size=1)
    with pytest.raises(UserError, match="cache_gb = 1 is too small: 1.0 GB are missing: set it to 2 or more; and"):
        NodeCache(str(tmp_path), 1e9).open("0", size=2 * 10**9)


@pytest.mark.parametrize("kind", ["lines.jsonl", "lines.jsonl.gz", "table.parquet", "folder"])
def test_a_disk_of_the_cache_that_fills_is_named_and_not_the_corpus(tmp_path, bucket, monkeypatch, kind):
    KINDS[kind](tmp_path / kind)
    address = put(tmp_path / kind, f"{bucket}/{kind}")
    with small_disk(tmp_path / "disk", "1m") as disk:
        make_room = NodeCache._make_room
        monkeypatch.setattr(NodeCache, "_make_room", lambda *words: (make_room(*words), fill(disk)))  # another does
        with pytest.raises(UserError) as error:
            open_corpus("", address, "all", 0, RowFormat(cache=NodeCache(str(disk))))
        said = str(error.value)
        del error  # it holds files of the disk open
        gc.collect()
    assert said.startswith(f"training.cache_folder = '{disk}' can't be written: the disk at {disk} is full")
    assert said.endswith("make room on it, or set training.cache_folder to a folder on another disk")


def test_a_descriptor_of_an_entry_that_could_not_be_made_is_closed(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(UserError, match="can't be written"):
            NodeCache(str(tmp_path)).open("0", size=6000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("memory://nothing-here", "= 'memory://nothing-here': there is no such file or folder"),
        ("s3://bucket/line.jsonl", "there is no such file or folder; did you mean s3://bucket/lines.jsonl"),
        ("s3://bucket/*.csv", "matches no file"),
        ("s3://", "must be an address such as s3://bucket/run"),
        ("absent://a/b", "the package that opens absent:// is not installed; pip install .*nothing_there"),
        ("s4://a/b", "unknown protocol 's4'"),
    ],
)
def test_an_address_that_can_not_be_read_is_one_line(store, monkeypatch, path, message):
    fsspec.register_implementation("absent", "nothing_there.FS", errtxt="Install nothing_there", clobber=True)
    store.put("lines.jsonl", LINES)
    with pytest.raises(UserError, match=message) as error:
        open_corpus("", path, "train", 0)
    assert str(error.value).startswith(f"training.dataset_path = {path!r}: ")
    config = load([])
    config.validation.sets = [ValidationSet(name="a", dataset_path=path)]
    with pytest.raises(UserError, match=r"validation\.sets.*entry 1.*"):
        check_data(config)
        list_corpora(dataclasses.replace(config, validation=dataclasses.replace(config.validation, enable=True)))


def test_a_pattern_reads_the_files_that_match(tmp_path):
    for name in ("a/1.jsonl", "a/2.jsonl", "b/1.jsonl", "b/1.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    for pattern, names in (
        ("*/1.jsonl", "a/1 b/1"),
        ("a/*", "a/1 a/2"),
        ("**/[2-9].jsonl", "a/2"),
        ("?", "a/1 a/2 b/1"),
    ):
        source = open_corpus("", str(tmp_path / pattern), "all", 0).source
        assert {source[i] for i in range(len(source))} == {f"{name}.jsonl" for name in names.split()}
    with pytest.raises(UserError, match="matches no file"):
        open_corpus("", str(tmp_path / "*.csv"), "all", 0)


@pytest.mark.parametrize("name", ["a[1].jsonl", "a*.jsonl", "[b]/c.jsonl"])
def test_a_name_with_the_marks_of_a_pattern_is_a_name(tmp_path, store, name):
    for each in (name, "a1.jsonl", "b/c.jsonl", "other.jsonl"):
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).write_text(json.dumps({"text": each}) + "\n")
        store.put(each, (tmp_path / each).read_bytes())
    for place in (store.address, str(tmp_path)):
        corpus = open_corpus("", f"{place}/{name}", "all", 0)
        assert len(corpus.source) == 1 and name in str(corpus.source[0])
    folder = str(PurePath(name).parent)
    source = open_corpus("", f"{tmp_path}/{folder}/*.jsonl", "all", 0).source
    assert ("other" in str([*map(source.__getitem__, range(len(source)))])) == (folder == ".")


def write_wide_parquet(path: Path, end: str = "") -> None:
    """Write texts, alone and inside a column, between large columns, in groups of 100 rows."""
    arrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    chance = random.Random(1)
    data = [{"picture": chance.randbytes(300), "kept": text + end} for text in TEXTS]
    columns = {"picture": [chance.randbytes(5000) for _ in TEXTS], "a.text": [text + end for text in TEXTS]}
    table = arrow.table({**columns, "more": [chance.randbytes(5000) for _ in TEXTS], "data": data})
    parquet.write_table(table, path, row_group_size=100, compression="none", use_dictionary=["a.text"])


@pytest.mark.parametrize(("column", "most"), [("a.text", 20_000), ("data.kept", 120_000)])
def test_of_parquet_the_used_columns_are_read_by_ranges(tmp_path, store, monkeypatch, column, most):
    monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    monkeypatch.setattr(parquet, "CHUNK", 10_000)
    monkeypatch.setattr(parquet, "_GAP", 500)
    monkeypatch.setattr("torchtitan_graph.patience.FIRST_S", 0.01)
    write_wide_parquet(tmp_path / "wide.parquet")
    store.put("wide.parquet", (tmp_path / "wide.parquet").read_bytes())
    reading = RowFormat(ByteTokenizer(), columns={"text": column})
    here = open_parquet(files.DataFile(tmp_path / "wide.parquet"), reading)
    listed, before = find_place("x", f"{store.address}/wide.parquet", reading.cache), files.Reading.bytes_read
    store.plan = at_first(["pass", "503", "pass", "half", "reset", "lost"])
    store.requests = []
    there = open_parquet(listed.open("wide.parquet"), reading)
    assert [there[i] for i in range(300)] == [here[i] for i in range(300)] and there.digest == here.digest
    ends = 5 * 2**16  # when they are kept, and read by pyarrow and for the digest
    assert most / 2 < files.Reading.bytes_read - before < most + ends < 3_000_000, "what is read, and no more, counts"
    came = len([each for each in store.requests if is_read(each) and each.action == "pass"])
    assert 2 + most / 2 / 10_000 < came <= 3 + 3 * (1 + most // 10_000), "the ends, then parts that are read ahead"
    store.requests = []
    again = open_parquet(listed.open("wide.parquet"), reading)
    assert again[299] == here[299] and not [*filter(is_read, store.requests)], "it is kept"


def test_parquet_that_changes_while_it_is_read_is_named(tmp_path, store, monkeypatch):
    monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    reading = RowFormat(ByteTokenizer(), columns={"text": "a.text"})
    for end in ("", "."):  # of another size, and of this one
        write_wide_parquet(tmp_path / "wide.parquet", end)
        store.put("wide.parquet", (tmp_path / "wide.parquet").read_bytes())
        file = find_place("x", f"{store.address}/wide.parquet", reading.cache).open("wide.parquet")
        write_wide_parquet(tmp_path / "wide.parquet", "" if end else "!")
        changed = (tmp_path / "wide.parquet").read_bytes()
        monkeypatch.setattr(parquet, "_parts", lambda *words, new=changed: store.put("wide.parquet", new) or iter(()))
        with pytest.raises(UserError, match=r"s3://bucket/wide.parquet: (was written|had .* bytes when)"):
            open_parquet(file, reading)


def test_small_files_of_a_folder_are_kept_together(tmp_path, store):
    write_folder(tmp_path / "folder")
    for path in (tmp_path / "folder").rglob("*.*"):
        if path.is_file():
            store.put(str(path.relative_to(tmp_path)), path.read_bytes())
    here = rows_of(str(tmp_path / "folder"))
    store.requests = []
    assert rows_of(f"{store.address}/folder") == here
    texts = [each for each in store.requests if each.path.endswith(".txt") and each.method == "GET"]
    assert len({each.path for each in texts}) == 60
    store.requests = []
    assert rows_of(f"{store.address}/folder") == here
    assert not [each for each in store.requests if each.method == "GET" and not each.is_list]
    assert len([*Path(os.environ["XDG_CACHE_HOME"], "torchtitan_graph").glob("*/whole")]) == 1


class Website(SimpleHTTPRequestHandler):
    """Answers requests for a part with the whole file, as Python's server does; below /parts/ with the part, and below
    /403/ and the like with that status."""

    asked: list[str] = []

    def log_message(self, *words):
        pass

    def do_HEAD(self):
        if status := re.match("/([45][0-9]{2})/", self.path):
            return self.send_error(int(status[1]))
        super().do_HEAD()

    def do_GET(self):
        self.asked.append(f"{self.path} {self.headers.get('Range')}")
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not part or not self.path.startswith("/parts/"):
            return self.do_HEAD() if re.match("/[45]", self.path) else super().do_GET()
        content = Path(self.translate_path(self.path)).read_bytes()
        first, last = map(int, part.groups())
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(content[first : last + 1])


@pytest.fixture
def website(tmp_path):
    Website.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Website, directory=str(tmp_path))) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("folder", ["whole", "parts"])
def test_a_file_of_a_web_server_is_read_with_and_without_ranges(tmp_path, website, monkeypatch, folder):
    monkeypatch.setattr(remote_file, "CHUNK", 1000)
    monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    file = tmp_path / folder / "lines.jsonl"
    file.parent.mkdir()
    file.write_bytes(LINES)
    assert rows_of(f"{website}/{folder}/lines.jsonl") == rows_of(str(file))
    parts = [each for each in Website.asked if "None" not in each]
    if folder == "whole":
        assert len(Website.asked) == 2 and len(parts) == 1, "one asks whether it knows ranges"
    else:
        assert len(parts) == len(Website.asked) == 1 + -(-len(LINES) // 1000)
    Website.asked.clear()
    assert rows_of(f"{website}/{folder}/lines.jsonl") == rows_of(str(file)) and not Website.asked
    file.write_bytes(LINES.replace(b"b", b"B"))
    os.utime(file, (1, 1))  # a web server may tell a version by nothing else
    assert rows_of(f"{website}/{folder}/lines.jsonl") == rows_of(str(file)), "it was read again"
    with pytest.raises(UserError, match="there is no such file or folder"):
        rows_of(f"{website}/nothing.jsonl")
    (tmp_path / "small").mkdir()
    reading = RowFormat(ByteTokenizer(), cache=NodeCache(str(tmp_path / "small"), 5000))
    if folder == "whole":
        with pytest.raises(UserError, match="its server answers a request for a part with the whole file"):
            rows_of(f"{website}/{folder}/lines.jsonl", reading=reading)


def test_whole_files_of_a_web_server_are_read_alone_and_as_parquet(tmp_path, website, monkeypatch):
    for module in (remote_file, files):
        monkeypatch.setattr(module, "CHUNK", 1000)
    (tmp_path / "lines.jsonl").write_bytes(LINES)
    cache = NodeCache(str(tmp_path / "cache"))
    place = find_place("x", f"{website}/lines.jsonl", cache)
    assert b"".join(remote_file.unkept_chunks(place.open("lines.jsonl"))) == LINES
    assert len(Website.asked) == 2 and not (tmp_path / "cache").exists()
    monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    write_wide_parquet(tmp_path / "wide.parquet")
    reading = RowFormat(ByteTokenizer(), columns={"text": "a.text"}, cache=cache)
    Website.asked.clear()
    there = open_parquet(find_place("x", f"{website}/wide.parquet", cache).open("wide.parquet"), reading)
    assert [there[number] for number in range(300)] == TEXTS and len(Website.asked) == 2


@pytest.mark.parametrize("path", ["", "/", "/folder", "/folder/", "/page.aspx?file=x.jsonl"])
def test_an_address_of_the_web_that_is_no_file_is_refused(website, path):
    with pytest.raises(UserError, match=r"is no file by its ending, .* training.sources, .* Known are .jsonl") as error:
        open_corpus("", f"{website}{path}", "train", 0)
    assert str(error.value).startswith("training.dataset_path = 'http://") and not Website.asked
    config = load(["--training.dataset_path", f"{website}{path}"])
    with pytest.raises(UserError, match="is no file by its ending"):
        list_corpora(config)


def test_a_secret_in_an_address_is_in_no_name_and_no_message(tmp_path, website, monkeypatch, caplog):
    monkeypatch.setattr("torchtitan_graph.patience.WAIT_S", 0.01)
    monkeypatch.setattr("torchtitan_graph.log.logger.propagate", True)
    (tmp_path / "table.csv").write_bytes(TABLE)
    address = f"{website.replace('//', '//me:secret@')}/table.csv?token=secret/x.txt"
    corpus = open_corpus("", address, "all", 0)
    here = open_corpus("", str(tmp_path / "table.csv"), "all", 0)
    assert corpus.source[7] == TEXTS[7] and corpus.digest == here.digest
    config = load(["--training.sources", f"[{{dataset_path = '{address}', weight = 1}}]"])
    assert source_name(config.training.sources[0]) == "table.csv"
    assert "secret" not in f"{in_toml(config.training.sources)} {shown(config.training.sources)}"
    (tmp_path / "table.csv").unlink()
    for wrong in (address, address.replace("/table", "/500/table")):
        with pytest.raises((UserError, FileNotFoundError)) as error:
            open_corpus("", wrong, "all", 0)
        said = in_words(error.value) if is_transient(error.value) else str(error.value)
        assert "secret" not in without_secrets(said) and "/table.csv?***" in without_secrets(said)
    record = caplog.records[-1]
    assert "retrying" in record.msg and "secret" not in log._LineFormatter("", False).format(record)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/403/x.txt", "can't be read: 403, message='Forbidden'"),
        ("/401/x.txt", "can't be read: 401, message='Unauthorized'"),
        ("/404/x.txt", "there is no such file or folder"),
        ("/503/x.txt", "503, message='Service Unavailable'"),
        ("//nowhere.invalid/x.txt", "(Name or service not known|name resolution)"),
        ("//127.0.0.1:1/x.txt", "ConnectionRefusedError: .*Connect call failed"),
    ],
)
def test_what_a_web_server_answers_is_named(website, monkeypatch, caplog, path, reason):
    monkeypatch.setattr("torchtitan_graph.log.logger.propagate", True)
    monkeypatch.setattr("torchtitan_graph.patience.WAIT_S", 0.01)
    with pytest.raises((UserError, FileNotFoundError)) as error:
        list_files("x", f"http:{path}" if path.startswith("//") else f"{website}{path}")
    said = str(error.value) if isinstance(error.value, UserError) else in_words(error.value)
    assert re.search(reason, said)
    assert isinstance(error.value, UserError) or re.search(reason, caplog.text), "it is named while it is waited for"


def test_a_bucket_that_does_not_exist_is_no_missing_file(store):
    with pytest.raises(UserError, match="'s3://typo': there is no such bucket$"):
        list_files("x", "s3://typo")


def test_documents_that_follow_each_other_in_a_file_that_is_not_kept_come_together(tmp_path, store, monkeypatch):
    monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    store.put("lines.jsonl", LINES)
    reading = RowFormat(cache=NodeCache(str(tmp_path / "small"), 4000))
    corpus = open_corpus("", f"{store.address}/lines.jsonl", "all", 0, reading)
    store.requests = []
    assert [corpus.source[i] for i in range(300)] == TEXTS
    assert len([*filter(is_read, store.requests)]) <= 10
    store.requests = []
    documents = [document for _, document in corpus.documents(0, 0, 0)]
    assert len(documents) > 30 and {*documents} <= {*TEXTS}
    came = [*filter(is_read, store.requests)]
    assert len(came) == len(documents), "each once, though some are read ahead"


@pytest.mark.parametrize("name", ["lines.jsonl", "table.csv"])
def test_documents_of_a_file_that_is_not_kept_are_read_ahead(tmp_path, bucket, monkeypatch, name):
    monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    monkeypatch.setattr(remote_file, "_free", threading.BoundedSemaphore(8))
    KINDS[name](tmp_path / name)
    reading = RowFormat(cache=NodeCache(str(tmp_path / "small"), 4000))
    corpus = open_corpus("", put(tmp_path / name, f"{bucket}/{name}"), "train", 0, reading)
    together, fetch = threading.Barrier(8), remote_file.RemoteFile.fetch

    def wait(self, start, end):
        together.wait(30)  # eight are on their way at the same time
        return fetch(self, start, end)

    monkeypatch.setattr(remote_file.RemoteFile, "fetch", wait)
    assert next(corpus.documents(0, 0, 0))[1] in TEXTS


def test_the_places_of_lines_travel_to_other_processes_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    (tmp_path / "lines.jsonl").write_bytes(LINES)
    source = open_corpus("", str(tmp_path / "lines.jsonl"), "all", 0).source
    pickled = pickle.dumps(source)
    assert len(pickled) < 4000 < source._line_starts.nbytes + source._documents.nbytes
    monkeypatch.setattr(lines, "_index_lines", lambda file: 1 / 0)
    assert pickle.loads(pickled)[7] == TEXTS[7]


def test_where_the_cache_can_not_be_written_lines_are_found_at_each_start_and_addresses_refused(
    tmp_path, bucket, monkeypatch, caplog
):
    monkeypatch.setattr("torchtitan_graph.log.logger.propagate", True)
    monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    (tmp_path / "lines.jsonl").write_bytes(LINES)
    reading = RowFormat(ByteTokenizer(), cache=NodeCache("/dev/null/cache"))
    assert open_corpus("", str(tmp_path / "lines.jsonl"), "all", 0, reading).source[7] == TEXTS[7]
    assert "an index is not kept" in caplog.text
    address = put(tmp_path / "lines.jsonl", f"{bucket}/lines.jsonl")
    with pytest.raises(UserError, match="^training.cache_folder = '/dev/null/cache' can't be written: "):
        open_corpus("", address, "all", 0, reading)


@pytest.mark.parametrize("kind", ["book.txt", "tokens"])
def test_rows_that_are_read_while_a_store_fails_are_the_same(tmp_path, store, monkeypatch, kind):
    monkeypatch.setattr(remote_file, "CHUNK", 500)
    monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    monkeypatch.setattr("torchtitan_graph.patience.FIRST_S", 0.001)
    KINDS[kind](tmp_path / kind)
    files = [*(tmp_path / kind).iterdir()] if (tmp_path / kind).is_dir() else [tmp_path / kind]
    for file in files:
        store.put(f"corpus/{file.relative_to(tmp_path)}", file.read_bytes())
    chance = random.Random(1)
    faults = ["503", "500", "429", "reset", "half", "lost"]
    store.plan = (chance.choice(faults) if chance.random() < 0.5 else "pass" for _ in itertools.count())
    assert rows_of(f"{store.address}/corpus/{kind}", 40) == rows_of(str(tmp_path / kind), 40)
    assert len([each for each in store.requests if each.action != "pass"]) > 20


@pytest.mark.parametrize("missing", [1, 2, 7])
def test_a_bucket_that_is_missing_for_a_while_is_waited_for(store, monkeypatch, missing, caplog):
    monkeypatch.setattr("torchtitan_graph.log.logger.propagate", True)
    monkeypatch.setattr(remote_file, "CHUNK", 500)
    monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    monkeypatch.setattr("torchtitan_graph.patience.FIRST_S", 0.001)
    monkeypatch.setattr("torchtitan_graph.patience.EVERY_S", 0.01)
    store.put("book.txt", LINES.replace(b"{", b"("))
    source = open_corpus("", f"{store.address}/book.txt", "all", 0).source
    store.plan = itertools.cycle(["404"] * missing + ["pass"] * 5)
    assert "".join(source[index] for index in range(len(source))).encode() == LINES.replace(b"{", b"(")
    store.plan = at_first(["404"] * missing)
    assert list_files("dataset_path", f"{store.address}/book.txt", is_new=False).files
    assert ("s: dataset_path = 's3://bucket/book.txt': FileNotFoundError: planned" in caplog.text) == (missing > 1)


def test_a_bucket_that_stays_away_is_storage_that_is_unavailable(store, monkeypatch):
    monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    monkeypatch.setattr("torchtitan_graph.patience.WAIT_S", 0.05)
    store.put("book.txt", 130 * LINES.replace(b"{", b"("))
    monkeypatch.setattr(remote_file, "CHUNK", 100_000)
    source = open_corpus("", f"{store.address}/book.txt", "all", 0).source
    store.plan = itertools.repeat("404")
    with pytest.raises(FileNotFoundError) as error:
        [source[index] for index in range(len(source))]
    assert is_transient(error.value)


@pytest.mark.parametrize("path", ["corpus", "a.jsonl", "*.jsonl", "a/*/*.jsonl", "**/a"])
def test_a_bucket_that_never_was_is_a_mistake_in_a_new_run(store, monkeypatch, path):
    monkeypatch.setattr("torchtitan_graph.patience.WAIT_S", 0.05)
    with pytest.raises(UserError, match="dataset_path = 's3://typo/.*: can't be read: .* The specified bucket") as new:
        open_corpus("", f"s3://typo/{path}", "train", 0)
    assert not is_transient(new.value)
    with pytest.raises(FileNotFoundError) as error:
        list_files("training.dataset_path", f"s3://typo/{path}", is_new=False)
    assert is_transient(error.value)


@pytest.mark.parametrize("pattern", ["c/*/*.jsonl", "c/*", "c/**/1.jsonl", "c"])
@pytest.mark.parametrize("action", ["500", "404"])
def test_no_folder_is_taken_for_an_empty_one_because_its_listing_failed(store, monkeypatch, pattern, action):
    monkeypatch.setattr("torchtitan_graph.patience.FIRST_S", 0.001)
    for name in ("a/1", "a/2", "b/1", "b/c/1"):
        store.put(f"c/{name}.jsonl", b"{}")
    whole = list_files("", f"{store.address}/{pattern}")
    assert len(whole.files) == {"c/*/*.jsonl": 3, "c/**/1.jsonl": 3}.get(pattern, 4)
    number = len(store.requests)
    for at in range(number):
        store.plan = at_first(["pass"] * at + [action])
        assert list_files("", f"{store.address}/{pattern}", is_new=False) == whole


@pytest.mark.parametrize("path", ["", "/*", "/**/1.jsonl"])
def test_nor_by_a_file_system_whose_find_is_fsspec_s_own(tmp_path, monkeypatch, path):
    monkeypatch.setattr("torchtitan_graph.patience.FIRST_S", 0.001)
    failures = iter([True])

    class Flaky(LocalFileSystem):
        protocol = "flaky"

        def ls(self, path, detail=False, **options):
            if path.endswith("b") and next(failures, False):
                raise ConnectionResetError(104, "reset")
            return super().ls(path, detail, **options)

    fsspec.register_implementation("flaky", Flaky, clobber=True)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jsonl").write_text("{}")
    found = list_files("", f"flaky://{tmp_path}{path}").files
    assert sorted(file.name for file in found) == ["a/1.jsonl", "b/1.jsonl"] and not [*failures]


@pytest.mark.parametrize("kind", ["book.txt", "tokens"])
def test_blocks_of_documents_to_come_are_read_ahead(tmp_path, bucket, monkeypatch, kind):
    monkeypatch.setattr(remote_file, "CHUNK", 50)
    monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    monkeypatch.setattr(sources, "_END_BYTES", 50)
    KINDS[kind](tmp_path / kind)
    reading = RowFormat(ByteTokenizer(), format="text" if kind == "book.txt" else None)
    corpus = open_corpus("", put(tmp_path / kind, f"{bucket}/{kind}"), "all", 0, reading)
    prepared, read = [], []
    prepare, read_part = remote_file.RemoteFile.prepare, remote_file.RemoteFile.read_part
    monkeypatch.setattr(
        remote_file.RemoteFile, "prepare", lambda *words: (prepared.append(words[1:]), prepare(*words))[1]
    )
    monkeypatch.setattr(
        remote_file.RemoteFile, "read_part", lambda *words: (read.append(words[1:]), read_part(*words))[1]
    )
    documents = [document for _, document in itertools.islice(corpus.documents(0, 0, 0), 20)]
    here = open_corpus("", str(tmp_path / kind), "all", 0, reading)
    assert [*map(str, documents)] == [str(x) for _, x in itertools.islice(here.documents(0, 0, 0), 20)]
    assert prepared[: len(read)] == read, "each is prepared, and in the order of reading"


def test_a_part_that_is_prepared_is_not_asked_for_again(store, monkeypatch):
    monkeypatch.setattr(remote_file, "CHUNK", 2000)
    store.put("lines.jsonl", LINES)
    file = find_place("training.dataset_path", f"{store.address}/lines.jsonl", NodeCache()).open("lines.jsonl")
    file.prepare(1000, 5000)
    copy = pickle.loads(pickle.dumps(file))
    assert file.read_part(1000, 5000) == LINES[1000:6000] == copy.read_part(1000, 5000)
    assert len([*filter(is_read, store.requests)]) == 3


def test_parts_that_are_read_ahead_and_never_taken_are_forgotten(tmp_path, store, monkeypatch):
    monkeypatch.setattr(remote_file, "_MOST_COMING", 3)
    monkeypatch.setattr(remote_file, "_free", threading.BoundedSemaphore(8))
    store.put("lines.jsonl", LINES)
    small = NodeCache(str(tmp_path / "small"), 4000)
    file = find_place("x", f"{store.address}/lines.jsonl", small).open("lines.jsonl")
    for start in range(8):
        file.prepare(start, 10)
    assert [*file._coming] == [(5, 10), (6, 10), (7, 10)]
    assert file.read_part(6, 10) == LINES[6:16] and file.read_part(0, 10) == LINES[:10]


def test_a_read_of_more_than_the_system_gives_at_once_is_whole(store, monkeypatch):
    store.put("lines.jsonl", LINES)
    file = find_place("x", f"{store.address}/lines.jsonl", NodeCache()).open("lines.jsonl")
    file.read_part(0, 1)
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda file, count, start: read(file, min(count, 1000), start))
    assert file.read() == LINES


def test_storage_that_does_not_answer_a_worker_is_named_as_storage(monkeypatch, texts_source):
    class Away(texts_source):
        def __getitem__(self, index):
            raise ConnectionResetError(104, "reset")

    monkeypatch.setattr(batches, "get_worker_info", lambda: SimpleNamespace(id=0, num_workers=1))
    data = DataLoader(
        ShuffledCorpus(Away(TEXTS), "all", 0), ByteTokenizer(), seed=0, seq_len=64, local_batch_size=1, dp_rank=0,
        dp_degree=1,
    )  # fmt: skip
    with pytest.raises(OSError, match="ConnectionResetError") as error:
        next(data)
    assert is_transient(pickle.loads(pickle.dumps(error.value)))


def wait_for_each_other(folder: Path, there: Connection) -> None:
    blocks = remote_file._Blocks(folder, 2)
    with blocks.locked(1):
        waiting = Thread(target=lambda: blocks.locked(0).__enter__(), daemon=True)
        waiting.start()
        time.sleep(0.2)  # until it waits
        there.send("waits")
        time.sleep(0.3)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_two_processes_may_each_wait_for_a_block_of_the_other_s(tmp_path):
    """The system takes that for a deadlock, and an error, though other threads hold the blocks."""
    (tmp_path / "data").touch()
    blocks = remote_file._Blocks(tmp_path, 2)
    found, there = FORK.Pipe(duplex=False)
    with blocks.locked(0):
        process = FORK.Process(target=wait_for_each_other, args=(tmp_path, there), daemon=True)
        process.start()
        assert found.recv() == "waits"
        with blocks.locked(1):
            pass
    process.join()


def test_a_file_is_read_alone_without_what_is_kept(tmp_path, bucket, monkeypatch):
    monkeypatch.setattr(remote_file, "CHUNK", 1000)
    cache = NodeCache(str(tmp_path / "cache"))
    (tmp_path / "lines.jsonl").write_bytes(LINES)
    for path in (str(tmp_path / "lines.jsonl"), put(tmp_path / "lines.jsonl", f"{bucket}/lines.jsonl")):
        chunks = [*remote_file.unkept_chunks(find_place("x", path, cache).open("lines.jsonl"))]
        assert b"".join(chunks) == LINES and len(chunks) == -(-len(LINES) // 1000)
    assert not (tmp_path / "cache").exists()


def test_a_disk_that_fills_while_a_block_is_written_leaves_no_zeros(tmp_path, bucket, monkeypatch):
    monkeypatch.setattr(remote_file, "CHUNK", 4096)
    (tmp_path / "lines.jsonl").write_bytes(LINES)
    place = find_place("x", put(tmp_path / "lines.jsonl", f"{bucket}/lines.jsonl"), NodeCache(str(tmp_path / "cache")))
    file = place.open("lines.jsonl")
    file.read_part(0, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(UserError, match="can't be written"):
            file.read()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert place.open("lines.jsonl").read() == LINES


def test_blocks_whose_file_was_deleted_are_read_again(tmp_path, bucket):
    (tmp_path / "lines.jsonl").write_bytes(LINES)
    path = put(tmp_path / "lines.jsonl", f"{bucket}/lines.jsonl")

    def read() -> bytes:
        return find_place("x", path, NodeCache(str(tmp_path / "cache"))).open("lines.jsonl").read()

    read()
    (kept,) = (tmp_path / "cache").glob("*/data")
    kept.unlink()
    assert read() == LINES


def test_files_whose_names_become_one_are_refused(store):
    for key in ("data/x.txt", "data//x.txt"):
        store.put(key, b"text")
    with pytest.raises(UserError, match=r"are both 'x\.txt': rename one"):
        list_files("x", f"{store.address}/data")


def test_small_files_that_change_after_they_were_listed_are_not_kept(tmp_path, bucket):
    for name in "ab":
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{name}.txt").write_bytes(b"old")
    path = put(tmp_path / "texts", f"{bucket}/texts")
    cache = NodeCache(str(tmp_path / "cache"))
    place = find_place("x", path, cache)
    fsspec.filesystem("memory").pipe(f"{path}/b.txt", b"new")
    with pytest.raises(UserError, match="was written since"):
        remote_file.packed_together([place.open(name) for name in place.names], cache)


def test_what_a_server_without_versions_gave_is_not_kept_for_the_next_start(tmp_path, bucket, monkeypatch):
    for name in ("_VERSION", "_TIME"):
        monkeypatch.setattr(f"torchtitan_graph.data.addresses.{name}", ())
    for content in (b"one", b"two"):
        fsspec.filesystem("memory").pipe(f"{bucket}/x.txt", content)
        place = find_place("x", f"{bucket}/x.txt", NodeCache(str(tmp_path / "cache")))
        assert place.open("x.txt").read() == content


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.txt", "x.jsonl.gz"])
def test_an_empty_file_of_a_folder_at_an_address_has_no_rows(tmp_path, bucket, name):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "1.txt").write_text("one")
    (tmp_path / "texts" / name).write_bytes(b"")
    here, there = str(tmp_path / "texts"), put(tmp_path / "texts", f"{bucket}/texts")
    corpora = [open_corpus("", path, "all", 0) for path in (here, there)]
    assert [[*corpus.source] for corpus in corpora] == [["one"], ["one"]]
    assert corpora[0].digest == corpora[1].digest


def test_a_key_with_the_mark_between_two_protocols_is_refused(store):
    store.put("folder/a::b.txt", b"text")
    with pytest.raises(UserError, match="bucket/folder/a::b.txt: in an address '::' is between two protocols"):
        list_files("x", f"{store.address}/folder")


def test_a_packed_file_that_was_replaced_with_its_old_time_is_unpacked_again(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    for word in ("AAAA", "CCCC"):
        path.write_bytes(gzip.compress(b'{"text": "%s"}\n' % word.encode(), mtime=0))
        os.utime(path, (1e9, 1e9))
        assert [*open_corpus("", str(path), "all", 0).source] == [word]
