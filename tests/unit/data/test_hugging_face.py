"""Streams and saved datasets: own splits are kept to, worker processes change nothing, no network is an error."""

import itertools
import json

import pytest

from torchtitan_graph import patience
from torchtitan_graph.data import DataLoader, merge_states
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.hugging_face import StreamedCorpus, open_hub
from torchtitan_graph.data.open_corpus import open_corpus
from torchtitan_graph.data.tokenizer import ByteTokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.transient import is_transient

datasets = pytest.importorskip("datasets")


@pytest.fixture
def stream(tmp_path):
    """What the hub streams, from files: five shards of 300 documents."""
    for shard in range(5):
        lines = (json.dumps({"text": f"document {number} of shard {shard}"}) + "\n" for number in range(300))
        (tmp_path / f"{shard}.jsonl").write_text("".join(lines))
    files = [str(tmp_path / f"{shard}.jsonl") for shard in range(5)]
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=tmp_path / "cache")


def texts_of(corpus, epoch=0) -> list[str]:
    return [text for lane in range(corpus.num_lanes) for _, text in corpus.documents(lane, epoch, 0)]


def test_lanes_share_out_the_shards(stream):
    corpus = StreamedCorpus(stream, RowFormat(), "test", "all", seed=0)
    assert corpus.num_lanes == 4
    assert len(texts_of(corpus)) == len(set(texts_of(corpus))) == 1500


def test_a_stream_is_shuffled_anew_in_every_epoch(stream):
    corpus = StreamedCorpus(stream, RowFormat(), "test", "all", seed=0)
    assert texts_of(corpus, 0) != texts_of(corpus, 1)
    assert sorted(texts_of(corpus, 0)) == sorted(texts_of(corpus, 1))


@pytest.mark.parametrize("start", [0, 1, 255, 256, 400, 599, 600])
def test_a_stream_starts_anywhere(stream, start):
    corpus = StreamedCorpus(stream, RowFormat(), "test", "train", seed=0)
    whole = list(corpus.documents(0, 1, 0))
    assert list(corpus.documents(0, 1, start)) == [item for item in whole if item[0] >= start]


@pytest.mark.parametrize("start", [0, 400])
def test_a_stream_that_fails_for_a_while_goes_on_where_it_was(start, stream, monkeypatch):
    whole = list(StreamedCorpus(stream, RowFormat(), "test", "train", seed=0).documents(0, 1, start))
    read, calls = datasets.IterableDataset.iter, itertools.count()

    def failing(self, batch_size):
        for block in read(self, batch_size):
            if next(calls) % 2:
                raise ConnectionError("Server Disconnected")
            yield block

    monkeypatch.setattr(patience, "FIRST_S", 0.0)
    corpus = StreamedCorpus(stream, RowFormat(), "test", "train", seed=0)
    monkeypatch.setattr(datasets.IterableDataset, "iter", failing)
    assert list(corpus.documents(0, 1, start)) == whole
    assert next(calls) > 3


def test_splits_of_a_stream_share_no_document(stream):
    train, validation = (
        texts_of(StreamedCorpus(stream, RowFormat(), "", split, 0)) for split in ("train", "validation")
    )
    assert len(train) + len(validation) == 1500
    assert not set(train) & set(validation)
    assert 0.03 < len(validation) / 1500 < 0.07


def test_streamed_rows_do_not_depend_on_workers_nor_on_an_interruption(stream):
    def loader(num_workers):
        return DataLoader(
            StreamedCorpus(stream, RowFormat(), "test", "train", seed=0), ByteTokenizer(), seed=0, seq_len=64,
            local_batch_size=4, dp_rank=0, dp_degree=1, num_workers=num_workers,
        )  # fmt: skip

    plain, workers = loader(0), loader(2)
    reference = [next(plain).tokens_BL.tolist() for _ in range(12)]
    assert [next(workers).tokens_BL.tolist() for _ in range(6)] == reference[:6]
    resumed = loader(1)
    resumed.load_state_dict(merge_states([workers.state_dict()]))
    assert [next(resumed).tokens_BL.tolist() for _ in range(6)] == reference[6:]


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_resumed_stream_does_not_read_again_the_shards_that_are_done(tmp_path, num_workers):
    opened = tmp_path / "opened"

    def rows(shards):
        for shard in shards:
            with opened.open("a") as file:
                file.write(f"{shard} ")
            for number in range(300):
                yield {"text": f"document {number} of shard {shard}"}

    def loader():
        stream = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": list(range(6))})
        return DataLoader(
            StreamedCorpus(stream, RowFormat(), "test", "train", seed=0), ByteTokenizer(), seed=0, seq_len=64,
            local_batch_size=8, dp_rank=0, dp_degree=1, num_workers=num_workers,
        )  # fmt: skip

    before = loader()
    for _ in range(100):  # the lanes are in their second shard, where they have two
        next(before)
    state = json.loads(json.dumps(merge_states([before.state_dict()])))
    expected = [next(before).tokens_BL.tolist() for _ in range(5)]
    resumed = loader()
    opened.unlink()
    resumed.load_state_dict(state)
    assert [next(resumed).tokens_BL.tolist() for _ in range(5)] == expected
    assert {*opened.read_text().split()} == {"1", "3", "4", "5"}  # 0 and 2 are the first ones of two lanes
    others = [[lane, document, "0.1", {}] for lane, document, *_ in state["resumes"]]
    for resumes in ([], others):  # of an earlier release, and of another one of `datasets`
        resumed = loader()
        opened.unlink()
        resumed.load_state_dict({**state, "resumes": resumes})
        assert [next(resumed).tokens_BL.tolist() for _ in range(5)] == expected
        assert {*opened.read_text().split()} == {"0", "1", "2", "3", "4", "5"}


def test_where_a_stream_goes_on_is_told_by_the_rank_that_read_furthest():
    common = {"rows": 8, "counted": [0] * 15, "counts": [0] * 15}
    ahead, behind = [512, "5.0", {"shard": 1}], [256, "5.0", {"shard": 0}]
    states = [
        {**common, "lanes": [[4, 0, 520, 3], [2, 0, 260, 0]], "resumes": [[0, *ahead], [1, *behind]]},
        {**common, "lanes": [[3, 0, 400, 3], [4, 0, 530, 0]], "resumes": [[0, *behind], [1, *ahead]]},
    ]
    assert merge_states(states)["resumes"] == [[0, *ahead], [1, *ahead]]
    assert "resumes" not in merge_states([{key: x for key, x in state.items() if key != "resumes"} for state in states])


def test_missing_column_of_a_stream_is_named(stream):
    with pytest.raises(UserError, match=r"text = 'content' is no column of it; there is \['text'\]"):
        texts_of(StreamedCorpus(stream, RowFormat(columns={"text": "content"}), "test", "all", seed=0))


def save(path, **parts) -> str:
    made = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in parts.items()}
    datasets.DatasetDict(made).save_to_disk(path)
    return str(path)


@pytest.mark.parametrize("held_out", ["validation", "test"])
def test_own_splits_of_a_saved_dataset_are_kept_to(tmp_path, held_out):
    path = save(tmp_path / "saved", train=["a", "b", "c"], **{held_out: ["d", "e"]})
    assert sorted(texts_of(open_corpus("", path, "train", 0))) == ["a", "b", "c"]
    assert sorted(texts_of(open_corpus("", path, "validation", 0))) == ["d", "e"]
    assert sorted(texts_of(open_corpus("", path, "all", 0))) == ["a", "b", "c", "d", "e"]


def test_a_saved_dataset_without_validation_is_split_by_hash(tmp_path):
    path = save(tmp_path / "saved", train=[str(number) for number in range(40)])
    train, validation = (texts_of(open_corpus("", path, split, 0)) for split in ("train", "validation"))
    assert sorted(train + validation, key=int) == [str(number) for number in range(40)]
    assert len(validation) == 2


def test_a_saved_dataset_without_train_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no split 'train' .* there is \['test'\]"):
        open_corpus("", save(tmp_path / "saved", test=["a"]), "train", 0)


def test_a_row_without_text_is_named(tmp_path):
    path = save(tmp_path / "saved", train=["a", None])
    with pytest.raises(UserError, match="row 2: the value of the key 'text' is not text, but null"):
        open_corpus("", path, "all", 0)
    (tmp_path / "parquet").mkdir()
    datasets.Dataset.from_dict({"text": [None] * 3}).to_parquet(tmp_path / "parquet" / "a.parquet")
    with pytest.raises(UserError, match="(?s)3 of 3 rows are bad.*No document is left"):
        open_corpus("", str(tmp_path / "parquet"), "all", 0, RowFormat(on_bad_row="skip"))


def test_a_row_of_a_stream_without_text_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    stream = datasets.load_dataset(
        "json", data_files=str(tmp_path / "a.jsonl"), split="train", streaming=True, cache_dir=tmp_path / "cache"
    )
    for split in ("all", "train"):
        with pytest.raises(UserError, match="test: the value of the key 'text' is not text, but null"):
            texts_of(StreamedCorpus(stream, RowFormat(), "test", split, seed=0))


DAMAGES = {
    "state.json": [b"", b"[" * 10**5, b"[]", b"{}"],
    "dataset_info.json": [b"", b"[]", b"\xff"],
    "data-00000-of-00001.arrow": [b"", b"arrow"],
}


@pytest.mark.parametrize(("name", "content"), [(name, content) for name in DAMAGES for content in DAMAGES[name]])
def test_a_damaged_saved_dataset_is_refused(tmp_path, name, content):
    path = save(tmp_path / "saved", train=["a", "b"])
    (tmp_path / "saved" / "train" / name).write_bytes(content)
    with pytest.raises(UserError, match="saved"):
        open_corpus("", path, "train", 0)


def test_the_first_look_at_a_stream_that_fails_is_tried_again(stream, monkeypatch):
    monkeypatch.setattr("torchtitan_graph.patience.FIRST_S", 0.01)
    read, failures = datasets.IterableDataset.iter, iter([ConnectionError("Server Disconnected")] * 2)

    def failing(self, batch_size):
        for error in failures:
            raise error
        return read(self, batch_size)

    monkeypatch.setattr(datasets.IterableDataset, "iter", failing)
    assert [*StreamedCorpus(stream, RowFormat(), "x", "all", 0).documents(0, 0, 0)] and not [*failures]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_no_network_is_said(monkeypatch, split):
    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "get_dataset_split_names", offline)
    option = "training.dataset" if split == "train" else "validation.dataset"
    with pytest.raises(UserError, match=f"{option} = 'owner/name'.*Couldn't reach the hub\n.*{option}_path"):
        open_corpus("owner/name", None, split, seed=0)


def test_a_hub_that_is_away_is_no_mistake_even_where_datasets_says_that_there_is_no_such_file(monkeypatch):
    def away(*_):
        try:
            raise ConnectionError("no route")
        except ConnectionError:
            raise FileNotFoundError("Couldn't find any data file") from None

    monkeypatch.setattr("datasets.get_dataset_split_names", away)
    with pytest.raises(UserError, match="Couldn't find any data file") as caught:
        open_hub("owner/name", RowFormat(), "train", seed=0)
    assert is_transient(caught.value)


@pytest.mark.parametrize(
    ("own_splits", "split", "part", "used"),
    [(["train", "validation"], "train", "train", "all"), (["train", "validation"], "validation", "validation", "all"),
     (["train"], "train", "train", "train"), (["train"], "validation", "train", "validation")],
)  # fmt: skip
def test_which_split_of_the_hub_is_streamed(monkeypatch, stream, own_splits, split, part, used):
    """The hub itself is not in reach of the tests: what is asked of it is recorded, and files are streamed instead."""
    asked = []
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *names: own_splits)
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: asked.append((names, options)) or stream)
    corpus = open_hub("owner/name:config", RowFormat(), split, seed=0)
    assert asked == [(("owner/name", "config"), {"split": part, "streaming": True})]
    assert sorted(texts_of(corpus)) == sorted(texts_of(StreamedCorpus(stream, RowFormat(), "", used, 0)))


def write_parquet(path, table, **metadata):
    pytest.importorskip("pyarrow.parquet").write_table(table.replace_schema_metadata(metadata or None), path)


def test_parquet_columns_that_are_not_read_may_be_of_any_type(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    words = arrow.array([[("key", 1)], []], arrow.map_(arrow.string(), arrow.int64()))
    write_parquet(tmp_path / "a.parquet", arrow.table({"words": words, "text": ["one", "two"]}))
    assert sorted(texts_of(open_corpus("", str(tmp_path / "a.parquet"), "all", 0))) == ["one", "two"]


@pytest.mark.parametrize("said", ["x", "[1]", '{"info": {"features": {"text": {"_type": "Nope"}}}}', "{}"])
def test_a_description_of_parquet_that_can_not_be_read_is_left_aside(tmp_path, said):
    arrow = pytest.importorskip("pyarrow")
    write_parquet(tmp_path / "a.parquet", arrow.table({"text": ["one", "two"]}), huggingface=said)
    assert sorted(texts_of(open_corpus("", str(tmp_path / "a.parquet"), "all", 0))) == ["one", "two"]


def test_two_columns_of_one_name_are_refused(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    write_parquet(tmp_path / "a.parquet", arrow.table([["one"], ["two"]], names=["text", "text"]))
    with pytest.raises(UserError, match=r"a.parquet: two columns are named 'text': rename one"):
        open_corpus("", str(tmp_path / "a.parquet"), "all", 0)


def test_text_in_parquet_that_is_not_utf_8_is_a_bad_row(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    text = arrow.array([b"one", b"\xff\xfe", b"two"]).view(arrow.string())
    write_parquet(tmp_path / "a.parquet", arrow.table({"text": text}))
    with pytest.raises(UserError, match=r"a.parquet, row 2: not UTF-8"):
        open_corpus("", str(tmp_path / "a.parquet"), "all", 0)
    corpus = open_corpus("", str(tmp_path / "a.parquet"), "all", 0, RowFormat(on_bad_row="skip"))
    assert [corpus.source[0], corpus.source[2]] == ["one", "two"]
