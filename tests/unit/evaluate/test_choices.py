"""Questions are read from JSON lines, and their choices scored one after the other."""

from pathlib import Path
from typing import Any

import pytest

from torchtitan_graph.data.tokenizer import ByteTokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.evaluate.choices import Question, evaluate_choices, read_questions
from torchtitan_graph.evaluate.requests import Request, Score, pack


def test_questions_name_their_answer_by_number_or_text(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(
        '{"question": "1 + 1", "choices": ["1", "2"], "answer": "2"}\n\n'
        '{"prompt": "a", "choices": ["b", "c"], "answer": 0}\n'
    )
    assert read_questions(path) == [Question("1 + 1", ["1", "2"], 1), Question("a", ["b", "c"], 0)]


@pytest.mark.parametrize(
    "line, expected",
    [
        ('{"choices": ["1", "2"], "answer": 0}', "line 1: needs one of question and prompt"),
        ('{"question": "a", "prompt": "a", "choices": ["1", "2"], "answer": 0}', "needs one of question and prompt"),
        ('{"question": "a", "choices": ["1"], "answer": 0}', "choices must be two or more texts"),
        ('{"question": "a", "choices": ["1", ""], "answer": 0}', "choices must be two or more texts"),
        ('{"question": "a", "choices": ["1", "2"], "answer": 2}', "answer 2 must be from 0 to 1"),
        ('{"question": "a", "choices": ["1", "2"], "answer": -1}', "answer -1 must be from 0 to 1"),
        ('{"question": "a", "choices": ["1", "2"], "answer": "B"}', "answer 'B' must be one of the choices"),
        ('{"question": "a", "choices": ["1", "1"], "answer": "1"}', "answer '1' must be one of the choices, or its"),
        ('{"question": "a", "choices": "12", "answer": 0}', "has invalid content"),
        ("", "holds no question"),
    ],
)
def test_a_line_that_is_no_question_is_refused(line: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(line)
    with pytest.raises(UserError, match=expected):
        read_questions(tmp_path / "q.jsonl")


class Told:
    """A scorer that finds each token half as likely as the one before it in the list of requests."""

    tokenizer = ByteTokenizer()
    longest = 8

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def score(self, requests: list[Request]) -> list[Score]:
        self.requests = requests
        return [Score(-float(r.num_scored), False) for r in requests]


class Plain:
    """A tokenizer of bytes without a token that begins a document."""

    bos_id, eos_id = None, 0

    def encode(self, text: str) -> list[int]:
        return [*text.encode()]


def test_the_likeliest_choice_counts_by_sum_by_token_and_by_byte() -> None:
    told: Any = Told()
    found = evaluate_choices(told, [Question("ab ", ["c", "de"], 0), Question("ab", ["c", "de"], 1)])
    assert [bytes(r.tokens[-r.num_scored :]) for r in told.requests] == [b" c", b" de"] * 2
    assert all(r.tokens[0] == told.tokenizer.bos_id for r in told.requests)
    # sums -2 and -3, means -1 and -1, over bytes -2 and -1.5
    assert (found.accuracy, found.accuracy_by_token, found.accuracy_by_byte) == (0.5, 0.5, 0.5)
    assert found.error == 0.5  # the deviation of one of two, over one less than there are
    assert evaluate_choices(told, [Question("ab", ["c", "de"], 1)]).accuracy_by_byte == 1.0
    assert evaluate_choices(told, [Question("ab", ["c", "é"], 1)]).accuracy_by_byte == 1.0  # two bytes


def test_a_prompt_that_is_too_long_loses_its_begin(caplog: pytest.LogCaptureFixture) -> None:
    told: Any = Told()
    evaluate_choices(told, [Question("0123456789", ["c", "de"], 0)])
    assert [bytes(r.tokens) for r in told.requests] == [b"3456789 c", b"456789 de"]
    told.tokenizer = Plain()
    evaluate_choices(told, [Question("01234567", ["\n", "0123456789"], 0)])
    assert [(bytes(r.tokens), r.num_scored) for r in told.requests] == [(b"01234567\n", 1), (b"123456789", 8)]
    assert [line.partition(" texts")[0] for line in caplog.messages] == ["2 of 2", "1 of 2"]


def test_requests_are_packed_into_rows_that_hold_them() -> None:
    lengths = [5, 3, 8, 2, 1, 7]
    rows = pack(lengths, 8)
    assert sorted(number for row in rows for number in row) == list(range(6))
    assert all(sum(lengths[i] for i in row) <= 8 for row in rows) and len(rows) == 4
    assert sorted(pack(lengths, 8, alone=True)) == [[i] for i in range(6)]
