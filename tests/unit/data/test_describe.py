"""A corpus is said in one line, on one rank; a path that is not there is answered by what is."""

import json
import shutil
from pathlib import Path

import pytest

from torchtitan_graph.data.describe import describe, log_corpus
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.open_corpus import open_corpus
from torchtitan_graph.data.positions import differing, refuse_other
from torchtitan_graph.data.tokenizer import load_tokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OTHERS = "the others are held out for validation"
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def said(path: Path | None, split: str = "train", dataset: str = "", **reading: object) -> str:
    how = RowFormat(load_tokenizer("tests/assets/tokenizer"), **reading)  # type: ignore[arg-type]
    place = None if path is None else str(path)
    return describe(open_corpus(dataset, place, split, 0, how), dataset, place, split, how)


def write_lines(file: Path, row: dict, number: int = 20) -> Path:
    file.write_text(f"{json.dumps(row)}\n" * number)
    return file


def test_files_documents_format_columns_and_split(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", {"text": "x"})
    assert said(file) == f"{file}; 1 file; 19 of 20 documents, {OTHERS}; text of the columns text"
    assert (
        said(file, "validation")
        == f"{file}; 1 file; 1 of 20 documents, those held out for validation; text of the columns text"
    )
    pairs = write_lines(tmp_path / "b.jsonl", {"question": "x", "answer": "y"}, 3)
    how = said(pairs, "all", columns={"prompt": "question", "completion": "answer"})
    optional = "and tools and system where a row has them"
    assert how == f"{pairs}; 1 file; 3 documents, all of them; completion of the columns question, answer, {optional}"
    (template := tmp_path / "chat.jinja").write_text(TEMPLATE)
    how = said(pairs, "all", columns={"user": "question", "assistant": "answer"}, chat_template=str(template))
    of = f"conversation of the columns question, answer, {optional}; template {template} ("
    assert how.startswith(f"{pairs}; 1 file; 3 documents, all of them; {of}")


def test_a_folder_counts_its_files(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("x")
    write_lines(tmp_path / "a.jsonl", {"text": "x"})
    write_lines(tmp_path / "b.jsonl", {"text": "x"})
    assert said(tmp_path) == f"{tmp_path}; 5 files; 41 of 43 documents, {OTHERS}; plain text; text of the columns text"


def test_a_template_is_named_with_a_digest(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", CHAT)
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    shown = said(file, chat_template=str(template))
    assert f"columns messages, and tools and system where a row has them; template {template} (" in shown
    template.write_text("{# another #}" + TEMPLATE)
    assert said(file, chat_template=str(template)) != shown


def test_columns_that_are_off_are_not_said(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    file = write_lines(tmp_path / "a.jsonl", CHAT)
    options = {"chat_template": str(tmp_path / "chat.jinja")}
    assert "messages, and tools where a row has them; " in said(file, columns={"system": ""}, **options)
    assert "of the columns messages; " in said(file, columns={"system": "", "tools": ""}, **options)


def test_the_embedded_corpus_is_said_plainly() -> None:
    assert said(None, dataset="stdlib").startswith("stdlib, the embedded corpus: this Python's own sources; ")


def test_one_rank_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("INFO", logger.name)
    file = str(write_lines(tmp_path / "a.jsonl", {"text": "x"}))
    corpus = open_corpus("", file, "train", 0)
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        log_corpus("training data", corpus, "", file, "train", RowFormat())
    assert [message.partition(":")[0] for message in caplog.messages] == ["training data"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("data/train.json", "; did you mean .*/data/train.jsonl\\?"),
        ("data/trian.jsonl", "; did you mean .*/data/train.jsonl\\?"),
        ("dat/train.jsonl", "; did you mean .*/data\\?"),
        ("else/where/train.jsonl", "; there is no else in "),
        ("data/pictures", "no such file or folder$"),
    ],
)
def test_a_missing_path_is_answered_by_the_nearest(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "train.jsonl", {"text": "x"})
    with pytest.raises(UserError, match=message):
        open_corpus("", str(tmp_path / name), "train", 0)
    shutil.rmtree(tmp_path / "data")


def test_two_positions_are_told_apart_shortly() -> None:
    hashes = [digit * 64 for digit in "ab"]
    grown = [f"'train of {digest}{TEMPLATE * 20}'" for digest in hashes]
    first, second = differing(*grown)
    assert first.startswith("'train of aaaaaaaa{%") and second.startswith("'train of bbbbbbbb{%") and len(first) < 90
    changed = [f"'train of {hashes[0]}{TEMPLATE * 20}{end}'" for end in ("one", "two")]
    first, second = differing(*changed)
    assert first.endswith("one'") and second.endswith("two'") and max(len(first), len(second)) < 110
    assert differing("32", "'up to 32'") == ("32", "'up to 32'")


def test_a_position_of_another_template_is_refused_in_words(tmp_path: Path) -> None:
    def digest(text: str = f"{{{{ a }}}}{TEMPLATE}", **reading: object) -> str:
        (template := tmp_path / "chat.jinja").write_text(text)
        how = RowFormat(load_tokenizer("tests/assets/tokenizer"), chat_template=str(template), **reading)  # type: ignore[arg-type]
        return open_corpus("", str(file), "train", 0, how).digest

    def refused(saved: str, here: str) -> str:
        with pytest.raises(UserError) as error:
            refuse_other({"corpus": saved, "counted": []}, {"corpus": here}, True)
        return str(error.value)

    file = write_lines(tmp_path / "a.jsonl", CHAT)
    first = digest()
    assert "checkpoint: the chat template changed since its data position was saved. Rows" in refused(
        first, digest(f"{{{{ a }}}})] {TEMPLATE}")
    )
    both = refused(first, digest(chat_template_kwargs={"a": [")] None"]}, chat_date="2026-01-31"))
    assert "checkpoint: training.chat_date and training.chat_template_kwargs changed since" in both
    assert "saved with corpus = " in refused(first, digest(loss_on="all"))
    write_lines(file, {"messages": [*CHAT["messages"], *CHAT["messages"]]})
    assert "saved with corpus = " in refused(first, digest())


@pytest.mark.parametrize("number", [1, 2, 30, 90, 120])
def test_the_number_of_documents_of_a_split_is_that_which_is_read(tmp_path: Path, number: int) -> None:
    file = write_lines(tmp_path / "a.jsonl", {"text": "x"}, number)
    for split in ("train", "validation", "all")[:: 1 if number > 1 else 2]:
        corpus = open_corpus("", str(file), split, 0, RowFormat())
        read = sum(1 for lane in range(corpus.num_lanes) for _ in corpus.documents(lane, 0, 0))
        assert corpus.num_documents() == read and corpus.is_exact  # type: ignore[union-attr]
