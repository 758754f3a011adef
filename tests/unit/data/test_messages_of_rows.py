"""Keys of rows and messages that carry meaning, dotted columns, and rows that can't be read."""

import gc
import json
import logging
import pickle
import weakref

import numpy as np
import pytest
from templates import CHATML
from test_chat import folder  # noqa: F401

from torchtitan_graph.config import load
from torchtitan_graph.data import load_tokenizer
from torchtitan_graph.data.bad_rows import KINDS, BadRow, BadRows, Skipped, _num_bytes
from torchtitan_graph.data.columns import find_column, value_of, without_nulls
from torchtitan_graph.data.counts import Counts
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.messages import messages_of
from torchtitan_graph.data.open_corpus import open_corpus
from torchtitan_graph.data.tokenizer import ByteTokenizer
from torchtitan_graph.errors import UserError

WITH_TOOLS = "{% for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}" + CHATML.replace(
    "{{ message.content }}", "{{ message.content or '' }}{{ message.tool_calls | tojson if message.tool_calls }}"
)
ASK, ANSWER = {"role": "user", "content": "Tea?"}, {"role": "assistant", "content": "Hot."}


@pytest.fixture
def reading(folder, tmp_path):  # noqa: F811
    def make(template=CHATML, **options):
        (tmp_path / "a.jinja").write_text(template)
        return RowFormat(load_tokenizer(str(folder)), chat_template=str(tmp_path / "a.jinja"), **options)

    return make


def rendered(reading, row):
    """Return a row's text, and what of it is learned."""
    document = reading.form(row, "here").document(row, "here")
    decode = reading.tokenizer.decode_all
    return decode(document.ids.tolist()), decode(document.ids[document.is_target].tolist())


@pytest.mark.parametrize(
    ("key", "off", "on"), [("weight", 0, 1), ("train", False, True), ("training", False, True), ("masked", True, False)]
)
@pytest.mark.parametrize("older", [True, False])
def test_a_turn_is_learned_as_its_row_says(reading, key, off, on, older):
    row = {"messages": [ASK, {**ANSWER, "content": "Cold.", key: off}, ASK, {**ANSWER, key: on}]}
    if older:
        turns = [
            {"from": m["role"], "value": m["content"], **({key: m[key]} if key in m else {})} for m in row["messages"]
        ]
        row = {"conversations": turns}
    text, learned = rendered(reading(), row)
    assert learned == "Hot.<|im_end|>" and "Cold." in text and key not in text


@pytest.mark.parametrize(
    ("message", "match"),
    [
        ({**ANSWER, "weight": 2}, "weight is 2; legal are 0 or 1"),
        ({**ANSWER, "weight": True}, "weight is True"),
        ({**ANSWER, "train": 1}, "train is 1; legal are true or false"),
        ({**ANSWER, "weight": 1, "masked": True}, "'weight' and 'masked' say opposite things"),
        ({**ASK, "weight": 1}, "asks that a message by the user is learned"),
        ({**ASK, "masked": False}, "asks that a message by the user is learned"),
        ({"role": "assistant", "content": None}, "its content is null"),
        ({"role": "assistant", "content": [{"type": "text", "text": None}]}, "the text of part 1 .* is null"),
        ({"role": "assistant", "content": [{"type": "image", "url": "x"}]}, "read text only"),
        ({"role": "assistant", "content": " \n"}, "is an empty answer"),
        ({"role": "assistant", "content": "", "tool_calls": []}, "is an empty answer"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "arguments of a call are",
        ),
    ],
)
def test_messages_that_can_t_be_read_are_refused_or_left_out(reading, tmp_path, message, match):
    with pytest.raises(UserError, match=match):
        messages_of([message], "here")
    rows = [{"messages": [ASK, ANSWER]}, {"messages": [ASK, message]}, {"messages": [ASK, ANSWER]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=f"a.jsonl, line 2, message 2.*{match}.*training.on_bad_row"):
        open_corpus("", str(tmp_path / "a.jsonl"), "all", 0, reading())
    source = open_corpus("", str(tmp_path / "a.jsonl"), "all", 0, reading(on_bad_row="skip")).source
    assert [isinstance(source[index], Skipped) for index in range(3)] == [False, True, False]


@pytest.mark.parametrize("message", [{**ASK, "weight": 0}, {"role": "assistant", "content": "", "weight": 0}])
def test_what_is_not_learned_may_say_so_and_be_empty(message):
    assert messages_of([message], "here")[0]["content"] == message["content"]


def test_tools_and_system_reach_the_template_in_every_format(reading):
    tools, system = [{"name": "boil"}], "Be brief."
    pair = {"chosen": [ANSWER], "rejected": [{**ANSWER, "content": "Cold."}]}
    rows = [
        ({"messages": [ASK, ANSWER]}, "chat"),
        ({"conversations": [{"from": "human", "value": "Tea?"}, {"from": "gpt", "value": "Hot."}]}, "chat"),
        ({"prompt": [ASK], "completion": [ANSWER]}, "completion"),
        ({"prompt": [ASK], **pair}, "preference"),
        ({key: [ASK, *value] for key, value in pair.items()}, "preference"),
    ]
    for row, format_ in rows:
        for given in (tools, json.dumps(tools)):
            form = reading(WITH_TOOLS, format=format_).form(row, "here")
            document = form.document({**row, "tools": given, "system": system}, "here")
            ids = getattr(document, "chosen", document).ids.tolist()
            text = form.reading.tokenizer.decode_all(ids)
            assert text.startswith('[{"name": "boil"}]<|im_start|>system\nBe brief.<|im_end|>'), (row, text)


def test_a_system_prompt_that_differs_and_one_beside_text_are_refused(reading):
    row = {"messages": [{"role": "system", "content": "a"}, ASK, ANSWER], "system": "b"}
    with pytest.raises(UserError, match="two different system prompts"):
        rendered(reading(), row)
    assert rendered(reading(), {**row, "system": "a"}) == rendered(reading(), {**row, "system": None})
    for key in ("tools", "system"):
        with pytest.raises(UserError, match=f"has '{key}' and a prompt that is text.*{{{key} = \"\"}}"):
            rendered(reading(), {"prompt": "a", "completion": "b", key: "[1]"})


def test_arguments_that_are_json_text_are_read_as_objects(reading):
    def row(arguments):
        return {
            "messages": [
                ASK,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
            ]
        }

    text, _ = rendered(reading(WITH_TOOLS), row({"a": 1}))
    assert rendered(reading(WITH_TOOLS), row('{"a":1}'))[0] == text and '{"a": 1}' in text


def test_parquet_gives_the_rows_of_json_lines(reading, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ({"city": "Rome"}, {"day": 1})]
    rows = [
        {
            "messages": [ASK, {"role": "assistant", "content": "x", "tool_calls": [call]}, {**ANSWER, "weight": 1}],
            "tools": [{"name": "f", "parameters": call["function"]["arguments"]}],
        }
        for call in calls
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    found = []
    for name in ("a.jsonl", "a.parquet", "saved"):
        source = open_corpus("", str(tmp_path / name), "all", 0, reading(WITH_TOOLS)).source
        found.append([[x.tolist() for x in source[index]] for index in range(2)])
    assert found[0] == found[1] == found[2]
    assert without_nulls({"a": [{"b": None, "c": [None]}]}) == {"a": [{"c": [None]}]}


def test_columns_may_be_paths(reading, tmp_path, monkeypatch):
    row = {"data": {"messages": [ASK, ANSWER], "id": 1}, "id": "a"}
    assert find_column(row, "data.messages") == ["data", "messages"]
    assert find_column({"data.messages": 1, **row}, "data.messages") == ["data.messages"]
    assert value_of({"a.b": {"c": 1}}, "a.b.c") == 1 and value_of(row, "data.message") is None
    with pytest.raises(UserError, match="did you mean data.messages"):
        reading(columns={"messages": "data.mesages"}).form(row, "here")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        source = open_corpus("", str(tmp_path / name), "all", 0, reading(columns={"messages": "data.messages"})).source
        ids, is_target = source[0]
        assert np.count_nonzero(is_target) and "Hot." in reading().tokenizer.decode_all(ids.tolist())


def test_messages_in_a_cell_are_json_text(reading, tmp_path):
    import csv

    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows([["messages"], [json.dumps([ASK, ANSWER])]])
    source = open_corpus("", str(tmp_path / "a.csv"), "all", 0, reading()).source
    assert "Hot." in reading().tokenizer.decode_all(source[0].ids.tolist())
    (tmp_path / "a.csv").write_text('messages\n"' + str([ASK, ANSWER]) + '"\n')
    with pytest.raises(UserError, match="messages is text, and no JSON: .*Python's own notation"):
        open_corpus("", str(tmp_path / "a.csv"), "all", 0, reading())


def test_keys_that_nothing_reads_are_named_once(reading, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("torchtitan_graph.log.logger.propagate", True)
    row = {"messages": [{**ASK, "mood": "calm"}, {**ANSWER, "learned": False}], "id": 1, "source": "x"}
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 3)
    with caplog.at_level(logging.WARNING):
        open_corpus("", str(tmp_path / "a.jsonl"), "all", 0, reading())
    named = [record.message for record in caplog.records if "read" in record.message]
    assert len(named) == 2 and "keys 'id', 'source'" in named[0] and "keys 'learned', 'mood' of its" in named[1]


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n   \n\t\r\n {"text": "b"}\n\n')
    source = open_corpus("", str(tmp_path / "a.jsonl"), "all", 0).source
    assert [source[index] for index in range(len(source))] == ["a", "b"]


@pytest.mark.parametrize("on_bad_row", ["refuse", "skip"])
def test_a_template_that_is_no_jinja_is_named_and_no_row(reading, tmp_path, on_bad_row):
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'messages': [ASK, ANSWER]})}\n" * 3)
    what = r"training\.chat_template = '.*': the chat template is no Jinja template: line 2: Unexpected end of template"
    with pytest.raises(UserError, match=f"^{what}"):
        open_corpus("", str(tmp_path / "a.jsonl"), "all", 0, reading("\n{% if a %}", on_bad_row=on_bad_row))


def test_only_errors_of_the_template_are_bad_rows(reading, tmp_path):
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'messages': [ASK, ANSWER]})}\n" * 3)
    for text in ("{{ raise_exception('no') }}", "{{ messages.a.b }}", "{{ 1 + '' }}"):
        with pytest.raises(UserError, match=r"3 rows are bad \(refused by the chat template: 3\)"):
            open_corpus("", str(tmp_path / "a.jsonl"), "all", 0, reading(text))
    with pytest.raises(MemoryError):
        open_corpus("", str(tmp_path / "a.jsonl"), "all", 0, reading("{{ messages[0].content * 10**18 }}"))


def test_a_corpus_of_bad_rows_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n{"text": null}\n')
    with pytest.raises(UserError, match="(?s)2 of 2 rows are bad.*No document is left"):
        open_corpus("", str(tmp_path / "a.jsonl"), "all", 0, RowFormat(on_bad_row="skip"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b"not json\n{}\n"),
        ("a.jsonl", b'{"id": 1}\n{"id": 2}\n'),
        ("a.csv", b"id,other\n1,2\n3,4\n"),
        ("a.jsonl", b""),
        ("a.csv", b"id\n"),
    ],
)
def test_a_file_of_bad_rows_alone_is_left_out_of_a_folder_and_counted(reading, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    says = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    number = content.count(b"\n") - name.endswith("csv")
    if number > 0:
        with pytest.raises(UserError, match="on_bad_row|None|no text|No doc|columns"):
            open_corpus("", str(tmp_path), "all", 0, reading(on_bad_row="skip"))
    (tmp_path / "b.jsonl").write_text(f"{json.dumps({'messages': says})}\n" * 3)
    corpus = open_corpus("", str(tmp_path), "all", 0, reading(on_bad_row="skip"))
    documents = [corpus.source[index] for index in range(len(corpus.source))]
    assert [isinstance(each, Skipped) for each in documents] == [True] * number + [False] * 3


@pytest.mark.parametrize(
    ("words", "value"),
    [(["--training.skip_not_utf8"], "skip"), (["--training.skip_not_utf8", "false"], "refuse"), ([], "refuse")],
)
def test_the_option_of_earlier_releases_is_read(words, value):
    assert load(words).training.on_bad_row == value


def test_bad_rows_are_counted_without_keeping_their_errors():
    alive = []

    def read(index):
        error = BadRow("no_value", f"row {index} has none")
        alive.append(weakref.ref(error))
        raise error

    with pytest.raises(UserError, match=r"(?s)50 of 50 rows are bad.*: 50\).*row 9 has none.*and 40 more"):
        BadRows("here", "refuse").read_all(read, 50)
    gc.collect()
    assert sum(each() is not None for each in alive) <= 1


def test_what_is_kept_has_room_in_all_and_stays_in_its_process(tmp_path, monkeypatch):
    monkeypatch.setattr("torchtitan_graph.data.bad_rows._MOST_KEPT", 10_000)
    rows = json.dumps({"prompt": "p" * 50, "completion": "c" * 50}) + "\n"
    for number in range(20):
        (tmp_path / f"{number}.jsonl").write_text(rows * 50)

    def kept(source):
        return sum(len(part._bad_rows._kept) for part in source.sources)

    source = open_corpus("", str(tmp_path), "all", 0, RowFormat(ByteTokenizer())).source
    assert kept(source) == 10_000 // _num_bytes(source[0])
    there = pickle.loads(pickle.dumps(source))
    assert kept(there) == 0
    assert [x.tolist() for x in there[0]] == [x.tolist() for x in source[0]] and kept(there) == 1
    monkeypatch.setattr("torchtitan_graph.data.sources.SMALL_CORPUS_BYTES", 2 * 50 * len(rows))
    assert kept(open_corpus("", str(tmp_path), "all", 0, RowFormat(ByteTokenizer())).source) == 0


def test_kinds_of_bad_rows_have_counts():
    assert KINDS.keys() <= {*Counts._fields}
