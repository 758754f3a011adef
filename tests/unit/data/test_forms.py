"""What rows of files are read as: told by their columns, or by options; and documents of a class of one's own."""

import csv
import dataclasses
import json
import random
import sys
import types

import numpy as np
import pytest
from templates import CHATML
from test_chat import conversation, folder  # noqa: F401

from torchtitan_graph import pretokenize
from torchtitan_graph.config import job, load
from torchtitan_graph.config.check import check
from torchtitan_graph.config.columns import find_wrong_column
from torchtitan_graph.data import IGNORE_INDEX, build_dataloader, load_tokenizer, merge_states
from torchtitan_graph.data.bad_rows import BadRow, BadRows, Skipped
from torchtitan_graph.data.chat import ChatTemplate
from torchtitan_graph.data.document import Tokens
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.open_corpus import open_corpus
from torchtitan_graph.data.row_forms import Completion, Conversation, Text
from torchtitan_graph.data.tokenizer import ByteTokenizer
from torchtitan_graph.errors import UserError

BYTES = RowFormat(ByteTokenizer())


@pytest.fixture
def reading(folder, tmp_path):  # noqa: F811
    (tmp_path / "a.jinja").write_text(CHATML)
    return RowFormat(load_tokenizer(str(folder)), chat_template=str(tmp_path / "a.jinja"))


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (["text", "id"], Text("text")),
        (["messages"], Conversation(BYTES, "messages")),
        (["messages", "tools"], Conversation(BYTES, "messages", "tools", "system")),
        (["conversations", "id"], Conversation(BYTES, "conversations")),
        (["prompt", "completion"], Completion(BYTES, "prompt", "completion")),
    ],
)
def test_columns_tell_the_form(columns, expected):
    assert BYTES.form(columns, "here") == expected


@pytest.mark.parametrize(
    ("options", "columns", "match"),
    [
        ({}, ["text", "messages"], "here: its columns .* can be read as text or chat: choose by training.format"),
        ({}, ["content"], r"no text under the key 'text'; there is \['content'\].*training.columns"),
        ({}, ["prompt"], "no text under the key 'text'"),
        (
            {},
            ["instruction", "input", "output"],
            "{prompt = 'instruction', completion = 'output'}. The column 'input' is not read then",
        ),
        ({}, ["question", "answer"], "name others in training.columns: {prompt = 'question', completion = 'answer'}"),
        ({"format": "chat"}, ["message"], "did you mean message[?] Name the one that holds it"),
        ({"format": "chat"}, ["text"], "messages = 'messages' is no column of it"),
        ({"columns": {"prompt": "question", "completion": "anser"}}, ["question", "answer"], "did you mean answer"),
        ({"columns": {"messages": "m", "tools": "t"}}, ["m"], "tools = 't' is no column"),
    ],
)
def test_columns_that_do_not_tell_are_refused(options, columns, match):
    with pytest.raises(UserError, match=match):
        RowFormat(ByteTokenizer(), **options).form(columns, "here")


def test_likely_questions_and_answers_are_proposed_as_chats_where_there_is_a_template(reading):
    with pytest.raises(UserError, match="{user = 'question', assistant = 'answer'} for chats"):
        reading.form(["question", "answer"], "here")
    with pytest.raises(UserError, match="{user = 'instruction', assistant = 'output'} for chats"):
        reading.form(["instruction", "output"], "here")


ASKED = [("a", "b"), ("tea, hot?", "the pot\nis old"), ("ünï", ' "ok" ')]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "nested.jsonl", "a.parquet"])
@pytest.mark.parametrize("given", [{}, {"format": "chat", "loss_on": "all"}])
def test_a_question_and_its_answer_are_a_conversation_by_their_columns(reading, tmp_path, name, given):
    rows = [{"question": ask, "answer": answer, "hint": "wait"} for ask, answer in ASKED]
    columns, file = {"user": "question", "assistant": "answer", "system": "hint"}, tmp_path / name
    if name.endswith("parquet"):
        pytest.importorskip("datasets").Dataset.from_list(rows).to_parquet(file)
    elif name.endswith("jsonl"):
        if name.startswith("nested"):
            rows, columns = [{"row": row} for row in rows], {part: f"row.{key}" for part, key in columns.items()}
        file.write_text("\n".join(map(json.dumps, rows)))
    else:
        with open(file, "w", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]), delimiter="," if name == "a.csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    reading = dataclasses.replace(reading, **given)
    found = open_corpus("", str(file), "all", 0, dataclasses.replace(reading, columns=columns)).source
    assert find_wrong_column(columns, reading.format) is None and len(found) == len(ASKED)
    for index, turn in enumerate(ASKED):
        texts = {"system": "wait", "user": turn[0], "assistant": turn[1]}
        said = [{"role": role, "content": text} for role, text in texts.items()]
        expected = reading.form(["messages"], "here").document({"messages": said}, "here")
        assert found[index].ids.tolist() == expected.ids.tolist()
        assert found[index].is_target.tolist() == expected.is_target.tolist()


def test_turns_that_are_none_are_bad_rows_of_their_kinds(reading):
    form = dataclasses.replace(reading, columns={"user": "q", "assistant": "a"}).form(["q", "a"], "here")
    for row, kind in (
        ({"q": "x", "a": " \n"}, "no_answer"),
        ({"q": None, "a": "y"}, "no_value"),
        ({"q": "x"}, "no_value"),
        ({"q": '[{"role": "user", "content": "x"}]', "a": "y"}, "no_value"),
    ):
        with pytest.raises(BadRow) as error:
            form.document(row, "here")
        assert error.value.kind == kind


def test_what_training_sets_for_validation_is_called_by_its_own_name():
    training = RowFormat(ByteTokenizer(), columns={"text": "content"})
    validation = training.of_validation(job.Validation(dataset_path="x.jsonl"))
    match = r"here: training.columns: text = 'content' is no column of it; there is \['text'\]. It holds here too, for"
    with pytest.raises(UserError, match=f"{match} validation.format and validation.columns are not set"):
        validation.form(["text"], "here")
    with pytest.raises(UserError, match=r"^training.columns = .* no columns for it. It holds here too, for validation"):
        validation.refuse_for_text("x.txt", "is plain text")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--training.columns", "{promt = 'a'}"], "promt is nothing that is read; did you mean prompt"),
        (["--training.columns", "{question = 'prompt', answer = 'completion'}"], "as in {prompt = 'question'}"),
        (["--training.columns", "{text = 5}"], "text must be the name of a column"),
        (["--training.columns", "{messages = ''}"], "messages = '': a row must have it; with '' are legal system, too"),
        (["--training.columns", "{prompt = '', completion = 'a'}"], "prompt = '': a row must have it"),
        (["--training.columns", "{text = 'a', prompt = 'b'}"], "are of different formats"),
        (["--training.columns", "{user = 'q'}"], "user is named without assistant: name both, as in {user = "),
        (["--training.columns", "{assistant = 'a', system = 's'}"], "assistant is named without user"),
        (["--training.columns", "{user = 'q', assistant = ''}"], "assistant = '': a row must have it"),
        (["--training.columns", "{user = 'q', assistant = 'a', messages = 'm'}"], "are of different formats"),
        (["--training.columns", "{user='q', assistant='a'}", "--training.format", "text"], "not of the format 'text'"),
        (["--training.columns", "{text = 'a'}", "--training.format", "chat"], "not of the format 'chat'"),
        (["--training.sources", "[{dataset='stdlib', columns={x='y'}}]"], "entry 1: columns: x is nothing"),
        (["--training.format", "chats"], "did you mean chat"),
        (["--training.chat_date", "2026-13-01"], "must be a day, such as 2026-01-31"),
        (["--training.repeat", "false"], "set training.epochs = 1 in its place"),
    ],
)
def test_wrong_options_are_refused(words, match):
    with pytest.raises(UserError, match=match):
        check(load(words), 1)


def test_columns_that_are_off_are_not_read_and_not_named(reading, caplog):
    says = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = {"messages": says, "system": "s", "tools": [{"type": "function", "function": {"name": "f"}}]}
    off = dataclasses.replace(reading, columns={"system": "", "tools": ""})
    assert find_wrong_column(off.columns, None) is None
    document = off.form(row, "here").document(row, "here")
    assert (
        document.ids.tolist()
        == reading.form({"messages": says}, "here").document({"messages": says}, "here").ids.tolist()
    )
    assert not caplog.messages
    # without a column of prompts, both answers are conversations
    row = {"prompt": "which is better?", "chosen": [*says], "rejected": [says[0], {**says[1], "content": "c"}]}
    pairs = dataclasses.replace(reading, format="preference", columns={"prompt": "", "system": ""})
    assert find_wrong_column(pairs.columns, "preference") is None
    assert len(pairs.form(row, "here").document(row, "here")) == 2


@pytest.mark.parametrize("name", ["chat.jsonl", "chat.parquet"])
def test_a_small_corpus_is_rendered_once(reading, tmp_path, monkeypatch, name):
    rendered, tokens = [], ChatTemplate.tokens
    monkeypatch.setattr(ChatTemplate, "tokens", lambda *given: (rendered.append(1), tokens(*given))[1])
    draw, file = random.Random(0), tmp_path / name
    rows = [{"messages": conversation(draw)} for _ in range(60)]
    if name.endswith("parquet"):
        pytest.importorskip("datasets").Dataset.from_list(rows).to_parquet(file)
    else:
        file.write_text("\n".join(map(json.dumps, rows)))
    opened, seen = {}, 0
    for split, epochs in (("train", 2), ("validation", 1)):
        data = build_dataloader(
            dataset="", dataset_path=str(file), split=split, tokenizer=reading.tokenizer, reading=reading, seed=0,
            seq_len=128, local_batch_size=1, dp_rank=0, dp_degree=1, epochs=epochs, opened=opened,
        )  # fmt: skip
        while not data.has_ended:
            seen += int(next(data).documents_BL.max()) + 1
    assert len(rendered) == len(rows) and seen > len(rows)


def test_what_a_small_corpus_keeps_has_a_limit(monkeypatch):
    monkeypatch.setattr("torchtitan_graph.data.bad_rows._MOST_KEPT", 9 * 10)
    rows, read = BadRows("here"), []

    def tokens(index):
        read.append(index)
        return Tokens(np.zeros(4, np.int64), np.zeros(4, bool))

    rows.read_all(tokens, 5)
    for index in range(5):
        rows.read(tokens, index)
    assert read == [0, 1, 2, 3, 4, 2, 3, 4]


def test_texts_under_a_chat_template_are_learned_as_they_are_with_one_hint(reading, caplog):
    rows = [{"prompt": "1+1=", "completion": "2"}] * 2
    caplog.set_level("INFO", "torchtitan_graph")
    for how in (BYTES, reading):
        form = how.form(rows[0], "here")
        for row in rows:
            form.document(row, "here")
    assert [message.partition(", which")[0] for message in caplog.messages] == ["here: prompt and completion are text"]


def test_completions_are_learned_and_prompts_are_tokenised_as_alone():
    form = BYTES.form(["prompt", "completion"], "here")
    ids, is_target = form.document({"prompt": "1+1=", "completion": "2"}, "here")
    assert ids.tolist() == [256, *b"1+1=", *b"2", 257]
    assert is_target.tolist() == [False] * 5 + [True] * 2
    everything = RowFormat(ByteTokenizer(), loss_on="all").form(["prompt", "completion"], "here")
    assert everything.document({"prompt": "1+1=", "completion": "2"}, "here").is_target.all()
    with pytest.raises(UserError, match="here: the value of the key 'completion' is not text, but null"):
        form.document({"prompt": "a", "completion": None}, "here")


def test_completions_of_messages_are_learned_and_turns_of_the_prompt_are_not(reading):
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    row = {"prompt": prompt, "completion": [{"role": "assistant", "content": "d"}]}
    ids, is_target = reading.form(row, "here").document(row, "here")
    assert reading.tokenizer.decode_all(ids[is_target].tolist()) == "d<|im_end|>"


@pytest.mark.parametrize(("dp_degree", "num_workers"), [(1, 2), (2, 0)])
def test_conversations_resume_at_any_number_of_ranks(reading, tmp_path, dp_degree, num_workers):
    draw = random.Random(0)
    lines = [json.dumps({"messages": conversation(draw)}) for _ in range(90)]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))

    def loaders(degree, workers=0):
        return [
            build_dataloader(
                dataset="", dataset_path=str(tmp_path / "chat.jsonl"), split="train", tokenizer=reading.tokenizer,
                reading=reading, seed=0, seq_len=64, local_batch_size=4 // degree, dp_rank=rank, dp_degree=degree,
                num_workers=workers,
            )
            for rank in range(degree)
        ]  # fmt: skip

    def take(loaders, steps):
        rows = lambda batch: zip(*(x.tolist() for x in batch), strict=True)  # noqa: E731
        return [[row for each in loaders for row in rows(next(each))] for _ in range(steps)]

    (one,) = loaders(1)
    expected = take([one], 30)
    assert max(epoch for _, epoch, *_ in one.state_dict()["lanes"]) >= 1
    before = loaders(dp_degree, num_workers)
    assert take(before, 13) == expected[:13]
    state = json.loads(json.dumps(merge_states([loader.state_dict() for loader in before])))
    (after,) = loaders(1)
    after.load_state_dict(state)
    assert take([after], 17) == expected[13:]
    assert after.counts == one.counts and any(one.counts)  # some conversations are longer than a row


def test_shards_of_conversations_give_the_same_rows(reading, tmp_path):
    draw = random.Random(0)
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps({"messages": conversation(draw)}) for _ in range(40)))
    words = ["--dataset_path", str(tmp_path / "chat.jsonl"), "--hf_assets_path", str(reading.tokenizer.folder)]
    words += ["--chat_template", reading.chat_template, "--out", str(tmp_path / "shards"), "--tokens_per_shard", "500"]
    assert pretokenize.main(words) == 0

    def rows(path):
        data = build_dataloader(
            dataset="", dataset_path=str(path), split="train", tokenizer=reading.tokenizer, reading=reading, seed=0,
            seq_len=64, local_batch_size=2, dp_rank=0, dp_degree=1,
        )  # fmt: skip
        return [next(data).labels_BL.tolist() for _ in range(20)]

    assert rows(tmp_path / "shards") == rows(tmp_path / "chat.jsonl")
    (targets,) = [path for path in (tmp_path / "shards").glob("targets-00000.npy")]
    targets.unlink()
    with pytest.raises(UserError, match="targets-00000.npy is missing"):
        rows(tmp_path / "shards")


def test_text_and_conversations_in_one_folder_are_refused(reading, tmp_path):
    folder = tmp_path / "mixed"  # noqa: F811
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    (folder / "b.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(UserError, match="a.jsonl holds text, .*b.jsonl conv.*can't be one corpus.*training.sources"):
        open_corpus("", str(folder), "all", 0, BYTES)


@pytest.fixture
def own(monkeypatch):
    """Return a function that makes a class with given documents importable."""

    def make(documents) -> str:
        members = {"__len__": lambda self: len(documents), "__getitem__": lambda self, index: documents[index]}
        module = types.ModuleType("my_data")
        module.Mine = type("Mine", (), members)
        monkeypatch.setitem(sys.modules, "my_data", module)
        return "my_data.Mine"

    return make


@pytest.mark.parametrize(
    ("documents", "first"),
    [
        (["ab", "c"], "ab"),
        ([[1, 2], [3]], [1, 2]),
        ([np.array([1, 2]), np.array([3])], [1, 2]),
        ([([1, 2], [False, True])] * 2, Tokens([1, 2], [False, True])),
        ([{"text": "ab"}, {"text": "c"}], "ab"),
    ],
)
def test_documents_of_a_class_of_one_s_own(own, documents, first):
    corpus = open_corpus(own(documents), None, "all", 0, BYTES)
    (found,) = [document for index, document in ((i, corpus.source[i]) for i in range(2)) if index == 0]
    if isinstance(first, Tokens):
        assert [x.tolist() for x in found] == list(first) and corpus.is_whole(0)
    else:
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == first and not corpus.is_whole(0)


@pytest.mark.parametrize(
    ("documents", "match"),
    [
        ([], "has no documents"),
        ([5], "document 0: is int; it must be a text, a row, token ids"),
        ([[1.5]], "it must be a text"),
        ([[300]], "its token ids are not all from 0 to 257"),
        ([[[1], [2, 3]]], "is no list of token ids"),
        ([([1, 2], [True])], "has 2 token ids, and 1 truth values"),
        (["a", ([1], [True])], "document 1: is of another kind than document 0"),
    ],
)
def test_wrong_documents_of_a_class_are_named(own, documents, match):
    with pytest.raises(UserError, match=match):
        open_corpus(own(documents), None, "all", 0, BYTES)


@pytest.mark.parametrize("few", [9, 0])
def test_bad_rows_of_a_class_are_left_out_or_refused(own, monkeypatch, few):
    monkeypatch.setattr("torchtitan_graph.data.own._FEW", few)
    good, bad = {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}
    skip = dataclasses.replace(BYTES, on_bad_row="skip")
    source = open_corpus(own([{"foo": 1}, bad, good]), None, "all", 0, skip).source
    assert [type(source[index]) for index in range(3)] == [Skipped, Skipped, Tokens]
    if few:
        for reading, match in ((BYTES, "document 1: completion is empty"), (skip, "No document is left")):  # noqa: F811
            with pytest.raises(UserError, match=match):
                open_corpus(own([good, bad] if reading is BYTES else [bad, bad]), None, "all", 0, reading)


def test_what_is_no_class_of_documents_is_refused(own):
    own([])
    for name, match in (
        ("my_data.Min", "did you mean Mine"),
        ("os.path", "a class with a length"),
        ("nowhere.X", "can't"),
    ):
        with pytest.raises(UserError, match=match):
            open_corpus(name, None, "all", 0, BYTES)


def test_the_rows_of_a_class_reach_a_batch(own):
    name = own([([1, 2, 3, 4], [False, False, True, True])] * 40)
    data = build_dataloader(
        dataset=name, dataset_path=None, split="train", tokenizer=ByteTokenizer(), seed=0, seq_len=9,
        local_batch_size=1, dp_rank=0, dp_degree=1,
    )  # fmt: skip
    batch = next(data)
    assert batch.labels_BL.tolist() == [[IGNORE_INDEX, 3, 4, IGNORE_INDEX] * 2 + [IGNORE_INDEX]]


SAID = {"prompt": [{"role": "user", "content": "hi"}], "completion": [{"role": "assistant", "content": "hello"}]}


def test_messages_as_json_text_are_messages_in_prompts_and_answers(reading):
    form = reading.form(SAID, "here")
    row = {name: f" {json.dumps(value)}" for name, value in SAID.items()}
    found, expected = form.document(row, "row 1"), form.document(SAID, "row 1")
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    older = {"prompt": '[{"from": "human", "value": "hi"}]', "completion": '[{"from": "gpt", "value": "hello"}]'}
    assert np.array_equal(form.document(older, "row 1").ids, expected.ids)
    pairs = RowFormat(reading.tokenizer, format="preference", chat_template=reading.chat_template)
    rejected = [{"role": "assistant", "content": "no"}]
    pair = {"prompt": SAID["prompt"], "chosen": SAID["completion"], "rejected": rejected}
    form = pairs.form(pair, "here")
    texts = {name: json.dumps(value) for name, value in pair.items()}
    both = zip(form.document(pair, "row 1"), form.document(texts, "row 1"), strict=True)
    assert all(np.array_equal(a.ids, b.ids) and np.array_equal(a.is_target, b.is_target) for a, b in both)


def test_other_lists_in_texts_are_texts_and_messages_in_python_s_notation_are_refused(reading):
    form = reading.form(SAID, "here")
    decode = reading.tokenizer.decode_all
    for text in ("[1, 2]", '[{"from": "Rome"}]', "[x]", "[]", '[{"role"'):
        ids = form.document({"prompt": text, "completion": '[{"role": "user"}]'}, "row 1").ids.tolist()
        assert decode(ids) == f'<s>{text}[{{"role": "user"}}]</s>'
    with pytest.raises(UserError, match=r"row 1: prompt is text, and no JSON.*json.dumps"):
        form.document({**SAID, "prompt": str(SAID["prompt"])}, "row 1")
    with pytest.raises(UserError, match="row 1: prompt is a list of messages and completion is text"):
        form.document({**SAID, "completion": "hello"}, "row 1")


@pytest.mark.parametrize("kind", ["completion", "preference"])
def test_a_digest_has_all_that_decides_the_tokens_of_messages(reading, tmp_path, kind):
    columns = ["prompt", "completion", "chosen", "rejected"]
    (tmp_path / "b.jinja").write_text("{# another #}" + CHATML)
    others = [
        {"loss_on": "all"}, {"unclear_turns": "skip"}, {"split_turns": "never"}, {"chat_date": "2026-01-31"},
        {"chat_template": str(tmp_path / "b.jinja")},
    ]  # fmt: skip
    made = [dataclasses.replace(reading, format=kind, **each) for each in [{}, *others]]
    assert len({each.form(columns, "here").digest for each in made}) == len(made)
    kwargs = {"chat_template_kwargs": {"a": 1}}
    digests = [RowFormat(ByteTokenizer(), format=kind, **each).form(columns, "here").digest for each in ({}, kwargs)]
    assert digests[0] == digests[1]
