"""Tables of comma- and tab-separated values are read as the csv module and `datasets` read them."""

import csv
import gzip
import io
import json
import os
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_graph.data import build_dataloader, sources
from torchtitan_graph.data.bad_rows import Skipped
from torchtitan_graph.data.files import DataFile
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.open_corpus import open_corpus
from torchtitan_graph.data.tables import Table
from torchtitan_graph.data.tokenizer import ByteTokenizer
from torchtitan_graph.errors import UserError

BYTES = RowFormat(ByteTokenizer())


def texts(path, **options):
    source = open_corpus("", str(path), "all", 0, RowFormat(ByteTokenizer(), **options)).source
    return [source[index] for index in range(len(source))]


CELL = st.text(st.sampled_from('ab",;\n\t é\U0001f389\r\x0b\u2028'), max_size=8)


@given(
    cells=st.lists(st.tuples(CELL, CELL), min_size=1, max_size=8),
    ends=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    suffix=st.sampled_from([".csv", ".tsv"]),
    mark=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_values_are_those_of_the_csv_module(tmp_path_factory, cells, ends, quoting, suffix, mark):
    if any("\r" in text for pair in cells for text in pair):  # which the writer quotes only where it ends a line
        quoting = csv.QUOTE_ALL
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, delimiter="," if suffix == ".csv" else "\t", lineterminator=ends, quoting=quoting)
    writer.writerows([("text", "other"), *cells])
    path = tmp_path_factory.mktemp("table") / f"a{suffix}"
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + stream.getvalue().encode())
    assert texts(path) == [text for text, _ in cells]


def test_the_rows_are_those_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f'say "{n}", twice\nand once', "completion": f"{n};\t{n}"} for n in range(1, 50)]
    with open(tmp_path / "a.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(rows)
    found = texts(tmp_path / "a.csv")
    read = datasets.load_dataset("csv", data_files=str(tmp_path / "a.csv"), split="train", cache_dir=tmp_path / "cache")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in read))
    assert len(found) == 49
    assert [x.ids.tolist() for x in found] == [x.ids.tolist() for x in texts(tmp_path / "a.jsonl")]


def test_a_row_of_one_blank_value_in_quotation_marks_is_no_blank_line(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'text\none\n  \n" "\ntwo\n')
    assert texts(tmp_path / "a.csv") == ["one", " ", "two"]


@pytest.mark.parametrize("small", [True, False])
def test_a_table_is_read_in_any_order_packed_and_in_other_processes(tmp_path, monkeypatch, small):
    if not small:
        monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)
    content = b'text,id\r\none,1\r\n\r\n"two\r\n""2""",2\r\n  \r\nthree,3'
    (tmp_path / "A.CSV").write_bytes(content)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(content))
    for name in ("A.CSV", "b.csv.gz"):
        source = open_corpus("", str(tmp_path / name), "all", 0).source
        copy = pickle.loads(pickle.dumps(source))
        assert [copy[2], copy[0], copy[1]] == ["three", "one", 'two\r\n"2"']
    assert sorted(texts(tmp_path)) == sorted(["one", 'two\r\n"2"', "three"] * 2)  # a folder's tables are tables
    monkeypatch.setattr("torchtitan_graph.data.files.CHECK_S", 0)  # at each document
    source = Table(DataFile(tmp_path / "A.CSV"), RowFormat())
    os.utime(tmp_path / "A.CSV", (1, 1))
    with pytest.raises(UserError, match="was written since it was opened"):
        source[0]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"question,answer\na,b\n", r"there is \['answer', 'question'\].*training.columns"),
        (b"text,a\nx,1\ny\n", "line 3: has 1 field, and the table has 2 columns"),
        (b"text,a\nx,1,2\n", "line 2: has 3 fields"),
        (b'text,a\n"x,1\ny,2\n', "line 2: a value begins with a quotation mark"),
        (b'text,a\n"x"y,1\n', "line 2: .*closing quotation mark is followed"),
        (b"text,text\nx,1\n", "two of its columns have the name 'text'"),
        (b"text;a\nx;1\n", "divided by ';'.*by a tab in .tsv: write it so$"),
        (b"text\ta\nx\t1\n", "write it so, or rename the file to .tsv$"),
        (b"text,a\rx,1\ry,2", "carriage return stands alone"),
        (b"text,a\n\xff,1\n", "line 2: not UTF-8 at byte 7 of the file: "),
        (b"text,a\n", "holds no documents"),
        (b"", "holds no documents"),
    ],
)
def test_what_is_no_table_is_named_when_it_is_opened(tmp_path, content, match):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(UserError, match=match):
        texts(tmp_path / "a.csv")


def test_bad_rows_are_left_out_and_counted_and_the_others_keep_their_numbers(tmp_path):
    good = [f"row {n},x" for n in range(64)]
    with_bad = list(good)
    with_bad[5], with_bad[9] = "row", '"a"b,1'
    for name, lines in (("good.csv", good), ("bad.csv", with_bad)):
        (tmp_path / name).write_text("\n".join(["text,id", *lines]))
    found = texts(tmp_path / "bad.csv", on_bad_row="skip")
    assert [index for index, text in enumerate(found) if isinstance(text, Skipped)] == [5, 9]
    assert [text for text in found if isinstance(text, str)] == [f"row {n}" for n in range(64) if n not in (5, 9)]
    data = build_dataloader(
        dataset="", dataset_path=str(tmp_path / "bad.csv"), split="all", tokenizer=ByteTokenizer(), seed=0, seq_len=64,
        reading=RowFormat(ByteTokenizer(), on_bad_row="skip"), local_batch_size=1, dp_rank=0, dp_degree=1, epochs=1,
    )  # fmt: skip
    for _ in range(20):
        batch = next(data)
        if (batch.labels_BL < 0).all():
            break
    assert data.counts.wrong_fields == 2 and sum(data.counts) == 2


@pytest.mark.parametrize("name", ["a.txt", "folder", "stdlib"])
@pytest.mark.parametrize("options", [{"format": "chat"}, {"columns": {"text": "a"}}])
def test_a_format_or_columns_of_what_has_no_rows_are_refused(tmp_path, name, options):
    (tmp_path / "folder").mkdir()
    for file in ("a.txt", "folder/b.txt"):
        (tmp_path / file).write_text("a")
    path = None if name == "stdlib" else str(tmp_path / name)
    with pytest.raises(UserError, match=f"training.{next(iter(options))} = .*without rows that have columns"):
        open_corpus(name, path, "all", 0, RowFormat(ByteTokenizer(), **options))
    open_corpus(name, path, "all", 0, RowFormat(ByteTokenizer(), format="text"))
