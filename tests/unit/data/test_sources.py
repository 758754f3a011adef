"""The same documents come out of every kind of file, and a corrupt one is named with file and line."""

import errno
import gc
import gzip
import itertools
import json
import os
import pickle
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_graph import patience
from torchtitan_graph.data import files, sources
from torchtitan_graph.data.bad_rows import BadRow, BadRows
from torchtitan_graph.data.files import DataFile
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.lines import JsonLines
from torchtitan_graph.data.open_corpus import open_corpus
from torchtitan_graph.data.places import same_place
from torchtitan_graph.data.sources import digest_files
from torchtitan_graph.data.texts import TextPieces
from torchtitan_graph.errors import UserError

TEXTS = ["def one():\n    pass\n", "zwei 🎉 é\r\n", "three\n\n\nlines", "4", "  five "]


def jsonl(texts) -> bytes:
    return "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)).encode()


@pytest.mark.parametrize("size", [1, 5, 16, 17, 18, 100])
def test_a_line_may_lie_in_several_parts_of_what_is_read_at_once(tmp_path, monkeypatch, size):
    monkeypatch.setattr(files, "CHUNK", size)
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n  \n{"text": "two"}\n \n{"text": "three"}')
    source = JsonLines(DataFile(tmp_path / "a.jsonl"), RowFormat())
    assert [source[number] for number in range(len(source))] == ["one", "two", "three"]


def write_folder(path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (path / f"part{number % 2}").mkdir(parents=True, exist_ok=True)
        (path / f"part{number % 2}" / f"{number}.txt").write_bytes(text.encode())
    (path / "picture.png").write_bytes(b"\xff\xd8")
    (path / ".hidden.txt").write_text("no document")


def test_files_are_in_the_order_of_their_folders_without_hidden_ones(tmp_path):
    for name in ("a-b/x.txt", "a/x.txt", "a/__pycache__/x.txt", "a/.x/x.txt", "a/.x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    source = open_corpus("", f"file://{tmp_path}", "all", 0).source
    assert same_place("", f"file://{tmp_path}") == same_place("", f"{tmp_path}/")
    assert [source[number] for number in range(len(source))] == ["a/x.txt", "a-b/x.txt"]


def write_parquet(path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": TEXTS, "id": range(5)}), path, row_group_size=2)


def write_saved(path: Path) -> None:
    pytest.importorskip("datasets").Dataset.from_dict({"text": TEXTS}).save_to_disk(path)


def write_shards(path: Path) -> None:
    path.mkdir()
    (path / "a.jsonl").write_bytes(jsonl(TEXTS[:2]))
    (path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(TEXTS[2:4])))
    (path / "c.txt").write_bytes(TEXTS[4].encode())


def digest_of(file: Path) -> str:
    return digest_files([DataFile(file)], [file.name])


@pytest.mark.parametrize("way", ["open", "pread"])
def test_a_file_server_that_restarts_is_waited_for(way, tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_bytes(b"0123456789")
    file = DataFile(tmp_path / "book.txt")
    left, call = iter(range(3)), getattr(os, way)

    def restarting(*arguments, **options):
        if next(left, None) is not None:
            raise OSError(errno.ESTALE, "Stale file handle")
        return call(*arguments, **options)

    monkeypatch.setattr(patience, "FIRST_S", 0.0)
    monkeypatch.setattr(os, way, restarting)
    assert (file.read_part(2, 3), file.read()) == (b"234", b"0123456789")
    assert next(left, None) is None


KINDS = {
    "folder": write_folder,
    "docs.jsonl": lambda path: path.write_bytes(jsonl(TEXTS)),
    "docs.json": lambda path: path.write_bytes(jsonl(TEXTS).rstrip() + b"\n\n"),
    "docs.jsonl.gz": lambda path: path.write_bytes(gzip.compress(jsonl(TEXTS))),
    "docs.parquet": write_parquet,
    "saved": write_saved,
    "shards": write_shards,
}


@pytest.fixture(autouse=True)
def cache_of_datasets(tmp_path, monkeypatch):
    try:
        import datasets
    except ImportError:
        return
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("small", [True, False])
def test_every_kind_of_file_gives_the_same_documents(tmp_path, monkeypatch, kind, small):
    if not small:
        monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    KINDS[kind](tmp_path / kind)
    opened = open_corpus("any name", str(tmp_path / kind), "all", seed=0)
    corpus = pickle.loads(pickle.dumps(opened))  # as where worker processes are spawned
    assert corpus.num_lanes == 1
    assert sorted(text for _, text in corpus.documents(0, 0, 0)) == sorted(TEXTS)


@pytest.mark.parametrize("kind", KINDS)
def test_digest_follows_content_not_place(tmp_path, kind):
    digests = []
    for folder, changed in (("a", False), ("b", False), ("c", True)):
        (tmp_path / folder).mkdir()
        texts = list(TEXTS)
        TEXTS[3] = "5" if changed else "4"
        try:
            KINDS[kind](tmp_path / folder / kind)
            digests.append(open_corpus("", str(tmp_path / folder / kind), "all", seed=0).digest)
        finally:
            TEXTS[:] = texts
    if kind.endswith("gz") or kind == "shards":  # gzip writes the time into its header
        assert digests[2] != digests[0]
    else:
        assert digests[0] == digests[1] != digests[2]


def test_digest_of_a_large_corpus_sees_names_sizes_and_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    file = tmp_path / "a.txt"
    content = bytearray(b"x" * 20_000)
    file.write_bytes(content)
    digests = [digest_of(file)]
    for place in (0, -1):
        content[place] += 1
        file.write_bytes(content)
        digests.append(digest_of(file))
    file.write_bytes(content + b"x")
    digests.append(digest_of(file))
    digests.append(digest_of(file.rename(tmp_path / "b.txt")))
    assert len(set(digests)) == 5


@pytest.mark.parametrize("size", [1, 8191, 8192, 8193, 100_000])
@pytest.mark.parametrize("line", [7, 200, 30_000])
def test_pieces_of_a_text_file_are_the_file(tmp_path, size, line):
    content = "".join("\n" if i % line == line - 1 else chr(ord("a") + i % 26) for i in range(size))
    file = tmp_path / "book.txt"
    file.write_text(content)
    pieces = TextPieces(DataFile(file))
    texts = [pieces[index] for index in range(len(pieces))]
    assert "".join(texts) == content
    if line <= 8192:
        assert all(text.endswith("\n") for text in [text for text in texts if text][:-1])
    assert all(texts)
    assert max(len(text) for text in texts) <= 8192 + min(line, 8192)


@pytest.mark.parametrize("line", [7, 8192])
def test_pieces_begin_at_the_first_line_from_every_8_KiB_on(tmp_path, line):
    """A run that was saved goes on only where they stay what they are."""
    content = b"".join(b"%0*d\n" % (line - 1, i) for i in range(100_000 // line))
    (tmp_path / "book.txt").write_bytes(content)
    pieces = TextPieces(DataFile(tmp_path / "book.txt"))
    begins = [content.find(b"\n", place - 1) + 1 if place else 0 for place in range(0, len(content), 8192)]
    expected = [content[i:j].decode() for i, j in itertools.pairwise([*begins, len(content)])]
    assert [pieces[index] for index in range(len(pieces))] == expected


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("aé€🎉\n"), st.integers(1, 7000)), min_size=1, max_size=12))
def test_long_lines_are_cut_between_characters(tmp_path_factory, runs):
    content = "".join(character * count for character, count in runs)
    file = tmp_path_factory.mktemp("pieces") / "book.txt"
    file.write_bytes(content.encode())
    pieces = TextPieces(DataFile(file))
    texts = [pieces[index] for index in range(len(pieces))]
    assert "".join(texts) == content
    assert all(texts)
    assert all(len(text.encode()) < 2 * 8192 for text in texts)


def test_a_piece_of_a_long_line_reads_that_piece_alone(tmp_path, monkeypatch):
    (tmp_path / "line.txt").write_text("x" * 10**6)
    pieces = TextPieces(DataFile(tmp_path / "line.txt"))
    read, counts = DataFile.read, []

    def counted(file, start, count):
        counts.append(count)
        return read(file, start, count)

    monkeypatch.setattr(DataFile, "read", counted)
    assert len(pieces[60]) == 8192
    assert sum(counts) < 20_000


@pytest.mark.parametrize(("size", "number"), [(8192, 1), (10_000, 1), (16_384, 2), (20_000, 2)])
def test_what_would_be_an_empty_piece_is_no_document(tmp_path, size, number):
    file = tmp_path / "a.txt"
    file.write_bytes(b"x" * size)
    pieces = TextPieces(DataFile(file))
    assert len(pieces) == number and "".join(pieces[i] for i in range(number)) == "x" * size
    # A run that took the piece for a document had another order of documents: it is not resumed from in silence.
    assert (pieces.digest == digest_of(file)) == (size % 8192 == 0)
    if number == 1:
        with pytest.raises(UserError, match="one document can't be split"):
            open_corpus("", str(file), "validation", seed=0)


@pytest.mark.parametrize("name", ["a.txt", "k.txt", "s.txt"])
def test_both_splits_of_a_text_file_have_text(tmp_path, name):
    """Its last piece would be empty, and was what the hash of some names held out."""
    (tmp_path / name).write_text("word " * 3700)  # would be three pieces
    for split in ("train", "validation"):
        corpus = open_corpus("", str(tmp_path / name), split, seed=0)
        assert [text for _, text in corpus.documents(0, 0, 0) if text]


def test_one_text_file_is_shared_out_to_train_and_validation(tmp_path):
    (tmp_path / "book.txt").write_text("a line of the book\n" * 20_000)
    train, validation = (
        open_corpus("", str(tmp_path / "book.txt"), split, seed=0) for split in ("train", "validation")
    )
    sizes = [
        sum(len(text) for lane in range(corpus.num_lanes) for _, text in corpus.documents(lane, 0, 0))
        for corpus in (train, validation)
    ]
    assert sum(sizes) == 380_000
    assert 0.03 < sizes[1] / sum(sizes) < 0.07


def test_stdlib_is_python_source_without_tests():
    corpus = open_corpus("stdlib", None, "train", seed=0)
    source = corpus.source
    names = [source.identity(index) for index in range(len(source))]
    assert "argparse.py" in names and "json/decoder.py" in names
    assert not [name for name in names if "/test/" in f"/{name}" or "site-packages" in name]
    assert source[names.index("argparse.py")] == Path(sysconfig.get_path("stdlib"), "argparse.py").read_text("utf-8")


def test_c4_test_is_the_embedded_corpus_with_a_notice(caplog, monkeypatch):
    monkeypatch.setattr("torchtitan_graph.log.logger.propagate", True)
    with caplog.at_level("INFO", "torchtitan_graph"):
        corpus = open_corpus("c4_test", None, "train", seed=0)
    assert corpus.digest == open_corpus("stdlib", None, "train", seed=0).digest
    assert "stdlib" in caplog.text


def test_half_a_surrogate_pair_is_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x \\ud83d y"}\n')
    assert JsonLines(DataFile(tmp_path / "a.jsonl"), RowFormat())[0] == "x \ufffd y"


CORRUPT = {
    "a.jsonl": [
        (b'{"text": "x"}\n{"text": \n', "line 2: is not JSON"),
        (b'{"text": "x"}\n\n{"txt": "y"}\n', r"line 3: no text under the key 'text'; there is \['txt'\]"),
        (b'{"text": "x"}\n{"text": 3}\n', "line 2: the value of the key 'text' is not text, but a number"),
        (b'{"text": null}\n', "is not text, but null"),
        (b'{"text": ["x"]}\n', "is not text, but a list.*training.columns"),
        (
            b'{"messages": []}\n',
            "this reads text only: name the column",
        ),
        (b'{"text": "x", "n": ' + b"1" * 5000 + b"}\n", "line 1: is not JSON: a number of 5,000 digits"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "line 1: has lists or objects more than 100 deep"),
        (b'{"a": ' * 200 + b"1" + b"}" * 200, "line 1: has lists or objects more than 100 deep"),
        (b"{" + b",".join(b'"k%d": 1' % i for i in range(9999)) + b"}", "no text under.*k1.*9,999 keys"),
        (b'["x"]\n{"text": "x"}\n', "line 1: not a JSON object"),
        (b'{"text": "x"}\n{"text": "\xff"}\n', "line 2: not UTF-8 at byte 24 of the file: "),
        (b'\xef\xbb\xbf{\n"text": "x"}\n', "line 1: is not JSON.*JSON lines have one object"),
        (b'\xef\xbb\xbf{"text": "\xff"}\n', "line 1: not UTF-8 at byte 13 of the file: "),
        (b"", "training.dataset_path = '.*a.jsonl': holds no documents"),
    ],
    "b.jsonl": [
        (gzip.compress(b'{"text": "x"}\n'), r"b\.jsonl: is a gzip file, .*: rename it to b\.jsonl\.gz$"),
        (b"PK\3\4" + bytes(9), "is a zip file, .*: unpack it first"),
        (b"question,answer\nx,y\n", "is a table and no JSON lines.*'question,answer': rename it to b.csv$"),
        (b'"a"\t"b"\nx\ty\nx\tz', "is a table and no JSON lines.*: rename it to b.tsv$"),
    ],
    "a.csv": [
        (b'\xef\xbb\xbf{"text": "x, y"}\n\n{"text": "z"}\n', "its lines are JSON objects.*: rename it to a.jsonl$"),
        (gzip.compress(b"text\nx\n"), r"is a gzip file, .*: rename it to a\.csv\.gz$"),
    ],
    "a.json": [
        (
            b'[{"text": "x"}, {"text": "y"}]',
            r"a\.json: is one JSON array\. JSON lines have one object.*FILE writes those of a JSON array$",
        ),
        (
            b'[\n{"text": "x"},\n{"text": "y"}\n]',
            r"a\.json: is one JSON array\. JSON lines have one object.*FILE writes those of a JSON array$",
        ),
    ],
    "a.txt.gz": [(gzip.compress(b"text"), r"a\.txt\.gz: is a gzip file.*unpack it first.*\.jsonl\.gz")],
    "a.zst": [(b"\x28\xb5\x2f\xfd" + bytes(9), "is a zstd file")],
    "a.jsonl.gz": [
        (b"not gzip", "could not be unpacked"),
        (gzip.compress(b'{"text": "x"}\n' * 9)[:15] + b"[" * 99, "could not be unpacked"),
        (gzip.compress(b'{"text": "x"}\n' * 9999)[:-20], "could not be unpacked"),
        (gzip.compress(b'{"text": "x"}\n{'), "line 2: is not JSON"),
    ],
    "a.txt": [
        (
            b'{"messages": []}\n\n{"text": "x"}\n{"a": 1}\n...',
            "JSON objects, .*rename it to a.jsonl .*format = 'text'$",
        ),
        (b"", "training.dataset_path = '.*a.txt': holds no documents"),
        (b"one\ntwo \xff\n", "not UTF-8 at byte 8, in line 2"),
    ],
    "a.parquet": [(b"no parquet", "not a Parquet file")],
}


@pytest.mark.parametrize(("name", "content", "message"), [(k, c, m) for k in CORRUPT for c, m in CORRUPT[k]])
def test_corrupt_input_is_named_when_it_is_opened(tmp_path, name, content, message):
    if name == "a.parquet":
        pytest.importorskip("datasets")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        open_corpus("", str(tmp_path / name), "train", seed=0)
    assert name in str(error.value)


def test_text_files_are_text_also_where_they_begin_like_rows_and_are_called_so(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("torchtitan_graph.log.logger.propagate", True)
    (tmp_path / "a.txt").write_text(content := '{"text": "x"}\n{"text": "y"}\n')
    with pytest.raises(UserError, match="a.txt: its lines are JSON objects"):
        open_corpus("", str(tmp_path), "all", seed=0)
    for path in (tmp_path, tmp_path / "a.txt"):
        assert open_corpus("", str(path), "all", seed=0, reading=RowFormat(format="text")).source[0] == content
    (tmp_path / "a.txt").write_text('{"text": "x"}\nand more\n')
    open_corpus("", str(tmp_path / "a.txt"), "all", seed=0)
    assert not caplog.records
    (tmp_path / "a.txt").write_text("id,question,answer\n1,x,y\n")
    open_corpus("", str(tmp_path / "a.txt"), "all", seed=0)
    assert "rename it to a.csv" in caplog.text


def test_where_all_rows_are_bad_no_message_says_to_leave_them_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n{"text": 2}\n')
    with pytest.raises(UserError, match="2 of 2 rows are bad") as error:
        open_corpus("", str(tmp_path / "a.jsonl"), "all", seed=0)
    assert "on_bad_row" not in str(error.value)
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n')
    with pytest.raises(UserError, match=r"training\.on_bad_row"):  # the only row of a file is not that of its folder
        open_corpus("", str(tmp_path), "all", seed=0)


def test_undecodable_file_of_a_folder_is_named(tmp_path):
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "bad.py").write_bytes(b"x = 1\n# \xe9\n")
    with pytest.raises(UserError, match=r"bad\.py: not UTF-8 at byte 8, in line 2"):
        open_corpus("", str(tmp_path), "train", seed=0)


@pytest.mark.parametrize("small", [True, False])
def test_what_is_not_utf8_is_named_together_or_left_out(tmp_path, monkeypatch, caplog, small):
    monkeypatch.setattr("torchtitan_graph.log.logger.propagate", True)
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_bytes(b"caf\xe9" if number % 2 else b"tea")
    if not small:
        monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    many = r"(?s)15 of 30 rows are bad \(not UTF-8: 15\):.*01\.txt.*19\.txt.*and 5 more.*training.on_bad_row"
    with pytest.raises(UserError, match=many if small else r"\.txt: not UTF-8 at byte 3.*on_bad_row"):
        list(open_corpus("", str(tmp_path), "all", seed=0).documents(0, 0, 0))
    caplog.clear()
    corpus = open_corpus("", str(tmp_path), "all", seed=0, reading=RowFormat(on_bad_row="skip"))
    assert (
        sorted(text if isinstance(text, str) else type(text).__name__ for _, text in corpus.documents(0, 0, 0))
        == ["Skipped"] * 15 + ["tea"] * 15
    )
    assert len(caplog.records) == 1 and "left out" in caplog.text


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "folder"])
def test_nothing_is_left_where_nothing_is_utf8(tmp_path, name):
    if name == "folder":
        (tmp_path / name).mkdir()
    ((tmp_path / name / "a.txt") if name == "folder" else tmp_path / name).write_bytes(b"\xff\xff\xff")
    with pytest.raises(UserError, match="No document is left"):
        open_corpus("", str(tmp_path / name), "all", seed=0, reading=RowFormat(on_bad_row="skip"))


FILES = {
    "a.txt": b"a line\n" * 5000,
    "a.jsonl": b'{"text": "x"}\n' * 500,
    "folder/a.txt": b"text",
}


@pytest.mark.parametrize("most", [64, 0])
def test_a_file_stays_open_between_its_documents(tmp_path, monkeypatch, most):
    opened = []
    gc.collect()  # of other tests
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *flags: (opened.append(path), real(path, *flags))[1])
    monkeypatch.setattr(files, "_most_open", lambda: DataFile._num_open + most)
    (tmp_path / "a.jsonl").write_bytes(FILES["a.jsonl"])
    before = DataFile._num_open
    source = open_corpus("", str(tmp_path / "a.jsonl"), "all", seed=0).source
    assert [pickle.loads(pickle.dumps(source))[index] for index in range(3)] == ["x"] * 3
    opened.clear()
    assert [source[index] for index in range(100)] == ["x"] * 100
    assert len(opened) == (0 if most else 100)
    del source
    gc.collect()
    assert DataFile._num_open == before


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: os.truncate(file, 3), "when it was opened, and has 3 now"),
        (lambda file: os.utime(file, (1, 1)), "was written since it was opened"),
        (Path.unlink, "was deleted while the run reads it"),
        (lambda file: (file.unlink(), os.mkfifo(file)), "when it was opened, and has 0 now"),
    ],
    ids=["cut", "rewritten", "gone", "fifo"],
)
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path, monkeypatch, name, change, message):
    monkeypatch.setattr(files, "CHECK_S", 0)  # at each document
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(FILES[name])
    source = open_corpus("", str(tmp_path / name.partition("/")[0]), "all", seed=0).source
    source[0]
    change(file)
    with pytest.raises(UserError, match=message) as error:
        source[0]
    assert str(error.value).startswith(str(file))


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    for name in ("a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(UserError, match=f"{name}': is not a regular file, but a FIFO"):
            open_corpus("", str(tmp_path / name), "train", seed=0)
    with pytest.raises(UserError, match="training.dataset_path = '/dev/zero': is not a regular file"):
        open_corpus("", "/dev/zero", "train", seed=0)
    with pytest.raises(UserError, match="a.txt: is not a regular file, but a FIFO"):
        open_corpus("", str(tmp_path), "train", seed=0)
    for name in ("shards.json", "state.json"):
        (tmp_path / name.removesuffix(".json")).mkdir()
        os.mkfifo(tmp_path / name.removesuffix(".json") / name)
        with pytest.raises(UserError, match=f"{name}: is not a regular file, but a FIFO"):
            open_corpus("", str(tmp_path / name.removesuffix(".json")), "train", seed=0)


def test_names_that_are_not_utf8_are_names(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("tea")
    assert list(open_corpus("", str(tmp_path), "all", seed=0).documents(0, 0, 0)) == [(0, "tea")]


def test_a_corrupt_line_of_a_large_corpus_is_named_when_its_turn_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text"\n')
    source = JsonLines(DataFile(tmp_path / "a.jsonl"), RowFormat())
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: is not JSON"):
        source[1]


def test_missing_column_of_parquet_is_named(tmp_path):
    pytest.importorskip("datasets")
    write_parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: training.columns: text = 'content' is no column of it"):
        open_corpus("", str(tmp_path / "a.parquet"), "train", seed=0, reading=RowFormat(columns={"text": "content"}))


def test_another_text_column(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "x"}\n')
    corpus = open_corpus("", str(tmp_path / "a.jsonl"), "all", seed=0, reading=RowFormat(columns={"text": "content"}))
    assert list(corpus.documents(0, 0, 0)) == [(0, "x")]


@pytest.mark.parametrize(
    ("dataset", "path", "split", "message"),
    [
        ("c4", "nowhere", "train", "training.dataset_path = 'nowhere': there is no such file"),
        ("c4", "x" * 300, "train", "training.dataset_path = 'x+': "),
        ("c4", "nowhere", "validation", "validation.dataset_path = 'nowhere'"),
        ("c4", "~nobody-has-this-name/x", "train", "training.dataset_path = .*: is not a place: "),
        ("c4", "a\0b", "validation", "validation.dataset_path = .*: is not a place: "),
        ("stdlb", None, "train", "training.dataset = 'stdlb' is not a corpus; did you mean 'stdlib'"),
        ("c4_validation", None, "train", "are for validation. Train on 'c4'"),
        ("", "EMPTY", "train", "the folder is empty"),
    ],
)
def test_a_corpus_that_is_not_there(tmp_path, dataset, path, split, message):
    with pytest.raises(UserError, match=message):
        open_corpus(dataset, str(tmp_path) if path == "EMPTY" else path, split, seed=0)


def test_empty_files_are_no_documents(tmp_path):
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "a.py").write_text("x")
    assert len(open_corpus("", str(tmp_path), "all", seed=0).source) == 1


def test_what_a_folder_is_not_read_for_is_told(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("torchtitan_graph.log.logger.propagate", True)
    for name in ("a.txt", "b.txt.gz", "c.gz", "d.pdf", "LICENSE"):
        (tmp_path / name).write_text("x")
    with caplog.at_level("INFO", "torchtitan_graph"):
        open_corpus("", str(tmp_path), "all", seed=0)
    assert "1 files are read, 4 left out: 2 .gz" in caplog.text and "1 without a suffix" in caplog.text


def test_a_file_that_cannot_be_read_is_no_stdlib_module(tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text("x = 1")
    (tmp_path / "latin.py").write_bytes(b"# \xe9")
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere.py")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert [text for _, text in open_corpus("stdlib", None, "all", seed=0).documents(0, 0, 0)] == ["x = 1"]


def test_text_files_are_numbered_by_name(tmp_path):
    write_folder(tmp_path)
    source = open_corpus("", str(tmp_path), "all", seed=0).source
    assert [source.identity(i) for i in range(2)] == ["part0/0.txt", "part0/2.txt"]


@pytest.mark.parametrize("name", ["a.JSONL", "a.Json", "a.jsonl.GZ", "a.JSON.gz", "a.CSV.Gz"])
def test_the_case_of_a_suffix_does_not_matter(tmp_path, name):
    content = b"text\nx\ny\n" if "CSV" in name else b'{"text": "x"}\n{"text": "y"}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.lower().endswith("gz") else content)
    source = open_corpus("", str(tmp_path / name), "all", seed=0).source
    assert [source[0], source[1]] == ["x", "y"] and ".gz:" not in source.identity(0).lower()
    if name != "a.Json":
        assert len(open_corpus("", str(tmp_path), "all", seed=0).source) == 2


def test_a_hint_that_is_a_question_ends_once():
    def read(index):
        raise BadRow("wrong_message", f"line {index}: role = 'asistant'; did you mean assistant?")

    with pytest.raises(UserError, match=r"did you mean assistant\? training\.on_bad_row"):
        BadRows("a.jsonl", "refuse").read(read, 1)
