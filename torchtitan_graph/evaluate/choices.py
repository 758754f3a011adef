"""Multiple choice by log-likelihood, from JSON lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from torchtitan_graph.data.tokenizer import Tokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.evaluate.requests import Request, Scorer
from torchtitan_graph.log import logger
from torchtitan_graph.patience import refuse_unreadable
from torchtitan_graph.small_files import BadFile, check_values, parse_json, read_small

MAX_BYTES, MAX_VALUES = 2**28, 10_000_000  # of a file of questions


class _Line(msgspec.Struct):
    choices: list[str]
    answer: int | str
    question: str = ""
    prompt: str = ""


class Question(NamedTuple):
    """A text, what may follow it, and the number of the choice that is right."""

    prompt: str
    choices: list[str]
    answer: int


class ChoiceResult(NamedTuple):
    """The part of the questions whose right choice is the likeliest.

    accuracy           by the sum of the log-probabilities of a choice's tokens
    accuracy_by_token  by their mean
    accuracy_by_byte   by the sum over the choice's bytes of UTF-8
    error              standard error of `accuracy`
    """

    questions: int
    accuracy: float
    accuracy_by_token: float
    accuracy_by_byte: float
    error: float


def read_questions(path: Path) -> list[Question]:
    """Return the questions in a file of JSON lines: {"question" or "prompt", "choices", "answer"}, the answer a number
    from 0 or the text of a choice.

    Raises:
        UserError: the file can't be read, or a line is no question.
    """
    with refuse_unreadable(f"--choices {path}"):
        try:
            content = read_small(path, MAX_BYTES)
        except FileNotFoundError:
            raise UserError(f"--choices {path}: there is no such file") from None
    check_values(content, path, MAX_VALUES)
    lines = enumerate(content.split(b"\n"), 1)
    questions = [_question(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    if not questions:
        raise UserError(f"--choices {path}: holds no question")
    return questions


def _question(line: bytes, where: str) -> Question:
    found = parse_json(line, _Line, where)
    if bool(found.question) == bool(found.prompt):
        raise BadFile(f"{where}: needs one of question and prompt")
    if len(found.choices) < 2 or not all(found.choices):
        raise BadFile(f"{where}: choices must be two or more texts that are not empty")
    answer = found.answer
    if isinstance(answer, str):
        if found.choices.count(answer) != 1:
            raise BadFile(f"{where}: answer {answer[:80]!r} must be one of the choices, or its number from 0")
        answer = found.choices.index(answer)
    if not 0 <= answer < len(found.choices):
        raise BadFile(f"{where}: answer {answer} must be from 0 to {len(found.choices) - 1}")
    return Question(found.question or found.prompt, found.choices, answer)


def evaluate_choices(scorer: Scorer, questions: Sequence[Question]) -> ChoiceResult:
    """Return how often the model finds the right choice likeliest; called by rank 0 alone."""
    requests, cut = [], 0
    for question in questions:
        for choice in question.choices:
            request = _request(scorer.tokenizer, question.prompt, choice)
            cut += len(request.tokens) > scorer.longest + 1
            requests.append(_cut(request, scorer.longest))
    if cut:
        logger.warning(f"{cut} of {len(requests)} texts are longer than a row: they are cut at the begin of the prompt")
    scores = iter(zip(scorer.score(requests), requests, strict=True))
    right = [0, 0, 0]
    for question in questions:
        sums, means, per_byte = [], [], []
        for choice in question.choices:
            score, request = next(scores)
            sums.append(score.log_likelihood)
            means.append(score.log_likelihood / request.num_scored)
            per_byte.append(score.log_likelihood / len(choice.encode()))
        for kind, values in enumerate((sums, means, per_byte)):
            right[kind] += values.index(max(values)) == question.answer
    total = len(questions)
    accuracy, by_token, by_byte = (count / total for count in right)
    error = math.sqrt(accuracy * (1 - accuracy) / (total - 1)) if total > 1 else math.nan
    return ChoiceResult(total, accuracy, by_token, by_byte, error)


def _request(tokenizer: Tokenizer, prompt: str, choice: str) -> Request:
    """Return a prompt with a choice after it as a request for the choice's tokens. The two are tokenized as one text,
    with a space between them unless one is there; the prompt's tokens are those of the prompt by itself."""
    prompt, space = prompt.rstrip(" "), "" if choice[0].isspace() or prompt[-1:] == "\n" else " "
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    context, whole = tokenizer.encode(prompt), tokenizer.encode(prompt + space + choice)
    num_scored = max(len(whole) - len(context), 1)
    return Request((begin or [tokenizer.eos_id] * (num_scored == len(whole))) + whole, num_scored)


def _cut(request: Request, longest: int) -> Request:
    """Leave out the begin of a request that is longer than a row."""
    tokens = request.tokens[-(longest + 1) :]
    return Request(tokens, min(request.num_scored, len(tokens) - 1))
