"""Preferences: a prompt with two answers becomes two documents of one row, and rows are counted by pairs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from templates import CHATML
from test_chat import folder  # noqa: F401

from torchtitan_graph.config import load
from torchtitan_graph.config.check import check
from torchtitan_graph.data import IGNORE_INDEX, build_dataloader, load_tokenizer
from torchtitan_graph.data.bad_rows import BadRow
from torchtitan_graph.data.batch import PAIRS_PER_ROW, Batch
from torchtitan_graph.data.document import Pair
from torchtitan_graph.data.feed import pairs
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.row_forms import Completion
from torchtitan_graph.data.tokenizer import ByteTokenizer
from torchtitan_graph.data.whole_lane import best_fit
from torchtitan_graph.errors import UserError

BYTES = RowFormat(ByteTokenizer(), format="preference")
COLUMNS = ["prompt", "chosen", "rejected"]


@pytest.fixture
def reading(folder, tmp_path):  # noqa: F811
    (tmp_path / "a.jinja").write_text(CHATML)
    chat_template = str(tmp_path / "a.jinja")
    return RowFormat(load_tokenizer(str(folder)), format="preference", chat_template=chat_template)


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def equal(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def test_each_answer_is_a_completion_of_the_prompt() -> None:
    row = {"prompt": "why? ", "chosen": "because", "rejected": "no"}
    pair = BYTES.form(COLUMNS, "here").document(row, "row 1")
    assert isinstance(pair, Pair)
    expected = [Completion(BYTES, "prompt", name).document(row, "row 1") for name in ("chosen", "rejected")]
    assert equal(pair, expected)


def test_conversations_that_begin_alike_have_their_beginning_as_prompt(reading: RowFormat) -> None:
    before = [said("user", "hi"), said("assistant", "hello"), said("user", "why")]
    answers = {"chosen": [said("assistant", "because")], "rejected": [said("assistant", "no")]}
    explicit = reading.form(COLUMNS, "here").document({"prompt": before, **answers}, "row 1")
    whole = {name: [*before, *answer] for name, answer in answers.items()}
    implicit = reading.form(["chosen", "rejected"], "here").document(whole, "row 1")
    assert equal(explicit, implicit)
    assert isinstance(implicit, Pair)
    decode = reading.tokenizer.decode_all  # type: ignore[union-attr]
    learned = [decode(part.ids[part.is_target].tolist()) for part in implicit]
    assert [text.strip().removesuffix("<|im_end|>") for text in learned] == ["because", "no"]


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
        ({"prompt": "a", "chosen": [said("assistant", "b")], "rejected": "c"}, "must all be texts, or all be lists"),
        ({"prompt": "a", "chosen": "b"}, "no text under the key 'rejected'"),
    ],
)
def test_rows_that_are_no_preference_are_refused(row: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        BYTES.form(COLUMNS, "here").document(row, "row 1")


@pytest.mark.parametrize(
    ("chosen", "rejected", "match"),
    [
        ("b", "c", "without a prompt, .* must be conversations"),
        ([said("user", "a")], [said("user", "a"), said("assistant", "b")], "must begin with the same messages"),
        ([said("user", "a")], [said("user", "b")], "must begin with the same messages"),
    ],
)
def test_whole_answers_must_begin_alike(chosen: Any, rejected: Any, match: str) -> None:
    with pytest.raises(UserError, match=match):
        BYTES.form(["chosen", "rejected"], "here").document({"chosen": chosen, "rejected": rejected}, "row 1")


def test_an_answer_in_several_contexts_is_a_bad_row(reading: RowFormat) -> None:
    changing = CHATML.replace("<|im_end|>", "{% if loop.last and not add_generation_prompt %}!{% endif %}<|im_end|>")
    Path(str(reading.chat_template)).write_text(changing)
    turns = [said("assistant", "b"), said("user", "c"), said("assistant", "d")]
    row = {"prompt": [said("user", "a")], "chosen": turns, "rejected": turns[:1]}
    with pytest.raises(BadRow, match="row 1: an answer has several turns"):
        reading.form(row, "here").document(row, "row 1")


def test_preferences_are_never_taken_for_another_format() -> None:
    with pytest.raises(UserError, match=r"here: holds preferences.*training.format = 'preference'.*training.step"):
        RowFormat(ByteTokenizer()).form(COLUMNS, "here")


# --- rows -----------------------------------------------------------------------------------------------------------


def loader(tmp_path: Path, rows: list[dict[str, str]], seq_len: int = 64, **options: Any) -> Any:
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return build_dataloader(
        dataset="", dataset_path=str(tmp_path / "p.jsonl"), split="all", tokenizer=ByteTokenizer(), seed=0,
        reading=BYTES, seq_len=seq_len, local_batch_size=1, dp_rank=0, dp_degree=1, epochs=1, **options,
    )  # fmt: skip


def answers(batch: Batch) -> list[str]:
    """Return what each document of a row learns."""
    found = []
    for number in range(int(batch.documents_BL.max()) + 1):
        labels = batch.labels_BL[(batch.documents_BL == number) & (batch.labels_BL != IGNORE_INDEX)].tolist()
        if labels:
            found.append(bytes(x for x in labels if x < 256).decode())
    return found


def test_pairs_stay_together_in_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i:02} ", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(40)]
    data, seen, counted = loader(tmp_path, rows, seq_len=80), [], 0
    while found := answers(batch := next(data)):
        counted += pairs(batch)
        for chosen, rejected in zip(found[::2], found[1::2], strict=True):
            assert chosen.replace("yes", "no") == rejected
            seen.append(chosen)
    assert sorted(seen) == sorted(row["chosen"] for row in rows) and counted == len(rows)


def test_a_row_has_so_many_pairs_at_most(tmp_path: Path) -> None:
    rows = [{"prompt": "", "chosen": "y", "rejected": "n"}] * (PAIRS_PER_ROW + 1)
    data = loader(tmp_path, rows, seq_len=512)
    assert [pairs(next(data)) for _ in range(3)] == [PAIRS_PER_ROW, 1, 0]
    assert best_fit([1] * 5, 10, 2) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("too_long", ["cut", "drop", "refuse"])
def test_an_answer_longer_than_half_a_row(tmp_path: Path, too_long: str) -> None:
    rows = [{"prompt": "a", "chosen": "y" * 40, "rejected": "n"}, {"prompt": "b", "chosen": "y", "rejected": "n"}]
    data = loader(tmp_path, rows, seq_len=64, too_long=too_long)
    if too_long == "refuse":
        with pytest.raises(UserError, match="an answer of a pair has 43 tokens, more than half of training.seq_len"):
            next(data)
        return
    found = [answers(next(data)) for _ in range(2)]
    learned = [text for row in found for text in row]
    assert learned.count("n") == (2 if too_long == "cut" else 1)
    assert ("y" * 30 in learned) == (too_long == "cut")
    assert data.counts[:3] == ((1, 0, 0) if too_long == "cut" else (0, 1, 0))


def test_a_pair_with_an_answer_that_is_cut_away_is_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": "p" * 40, "chosen": "y", "rejected": "n"}, {"prompt": "b", "chosen": "y", "rejected": "n"}]
    data = loader(tmp_path, rows, seq_len=64)
    assert sum(pairs(next(data)) for _ in range(2)) == 1 and data.counts.beyond == 1


def test_pairs_are_counted_by_the_chosen_answers_with_targets() -> None:
    labels = torch.tensor([[1, 1, -100, 1, 1], [-100, -100, 1, 1, 1]])
    documents = torch.tensor([[0, 0, 1, 2, 3], [0, 0, 1, 2, 4]])
    assert pairs(Batch(labels, labels, labels, documents)) == 4


# --- what they don't go together with -------------------------------------------------------------------------------

PREFERENCE = ["--training.format", "preference", "--training.dataset_path", "p.jsonl"]
DPO = [*PREFERENCE, "--training.step", "torchtitan_graph.goals.dpo"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (PREFERENCE, "training.format = 'preference': preferences are learned by a step"),
        (DPO[2:], "training.step = .*compares the two answers of preferences; set training.format"),
        ([*DPO, "--training.loss_on", "all"], "training.loss_on"),
        ([*DPO, "--training.one_document_per_row"], "training.one_document_per_row"),
        ([*DPO, "--parallelism.context_parallel_degree", "2"], "context_parallel_degree = 2: not with training.format"),
        ([*DPO, "--parallelism.pipeline_parallel_degree", "2"], "which runs whole models"),
        ([*DPO, "--loss.z_loss", "0.1"], "loss.z_loss = 0.1: .*computes the loss itself"),
        ([*DPO, "--training.loss_chunks", "2"], "training.loss_chunks = 2: .*sees all logits"),
        (["--training.step_options", "{beta = 1}"], "there is no step to take them"),
        (["--reference.path", "x"], "only a training.step reads a reference model"),
        ([*DPO[2:], "--training.sources", "[{dataset_path = 'a', format = 'preference'}]"], "set this to preference"),
    ],
)
def test_what_does_not_go_together_is_refused(options: list[str], match: str) -> None:
    with pytest.raises(UserError, match=match):
        check(load(options), 2 if "parallelism" in " ".join(options) else 1)
