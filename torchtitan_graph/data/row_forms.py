"""The forms in which rows hold documents: text, conversations, turns, prompts with completions, preferences."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from torchtitan_graph.data.bad_rows import BadRow
from torchtitan_graph.data.columns import find_column, paths_of, value_of
from torchtitan_graph.data.document import Contexts, Document, Pair, Tokens
from torchtitan_graph.data.messages import LEARNED, as_messages, messages_of, parse_list, tools_of, with_system

if TYPE_CHECKING:
    from torchtitan_graph.data.forms import RowFormat

_KINDS = {list: "a list", dict: "an object", int: "a number", float: "a number", bool: "a truth value"}


class _Form:
    """Base of the forms of rows; `columns` are those that each row has, `optional` those that it may have."""

    tools: str | None = None
    system: str | None = None

    @property
    def optional(self) -> list[str]:
        return [name for name in (self.tools, self.system) if name is not None]

    @property
    def columns(self) -> list[str]:
        raise NotImplementedError

    @functools.cached_property
    def keys(self) -> frozenset[str]:
        """The keys of a row in which the columns may be: each name, and the parts of it before a dot."""
        parts = [(name, name.split(".")) for name in (*self.columns, *self.optional)]
        return frozenset(".".join(split[:n]) for _, split in parts for n in range(1, len(split) + 1))


@dataclasses.dataclass(frozen=True)
class Text(_Form):
    """A column of text: whole, it is one document, packed wherever rows end."""

    column: str
    option: str = "training.columns"  # that names it, for messages
    is_whole = False

    @property
    def columns(self) -> list[str]:
        return [self.column]

    @property
    def digest(self) -> str:
        return self.column

    def document(self, row: Mapping[str, Any], where: str) -> Document:
        """Return a row's text; raise BadRow if it has none."""
        return _text(row, self.column, where, self.option)


@dataclasses.dataclass(frozen=True)
class Conversation(_Form):
    """A column of messages, and perhaps one of the tools that they may call, or of a system prompt before them: packed
    as a whole."""

    reading: RowFormat
    messages: str
    tools: str | None = "tools"
    system: str | None = "system"
    is_whole = True

    @property
    def columns(self) -> list[str]:
        return [self.messages]

    @property
    def digest(self) -> str:
        reading = self.reading
        return f"{self.columns} {self.optional} {reading.of_turns} {reading.template.digest}"

    def document(self, row: Mapping[str, Any], where: str) -> Document:
        """Return a row's conversation as tokens; raise BadRow with `where` if it has none or can't be rendered,
        UserError if a turn is unclear."""
        if not find_column(row, self.messages):
            there = shortened(paths_of(row))
            raise BadRow("no_value", f"{where}: no messages under the key {self.messages!r}; there is {there}")
        messages = messages_of(value_of(row, self.messages), where)
        messages = with_system(messages, value_of(row, self.system), where)
        return self.reading.conversation(messages, tools_of(value_of(row, self.tools), where), where)


@dataclasses.dataclass(frozen=True)
class Turn(_Form):
    """Two columns of text, what the user says and what the assistant answers: a conversation of one turn."""

    reading: RowFormat
    user: str
    assistant: str
    tools: str | None = "tools"
    system: str | None = "system"
    is_whole = True

    @property
    def columns(self) -> list[str]:
        return [self.user, self.assistant]

    @property
    def digest(self) -> str:
        reading = self.reading
        return f"{self.columns} {self.optional} turn {reading.of_turns} {reading.template.digest}"

    def document(self, row: Mapping[str, Any], where: str) -> Document:
        """Return a row's conversation as tokens; raise BadRow with `where` if a column has no text, the answer is empty
        or the chat template refuses it."""
        said = [_text(row, name, where, self.reading.option("columns")) for name in (self.user, self.assistant)]
        for name, text in zip(self.columns, said, strict=True):
            if isinstance(as_messages(text, where, name), list):
                raise BadRow("no_value", f"{where}: {name} is a list of messages, and user and assistant are text")
        if not said[1].strip():
            raise BadRow("no_answer", f"{where}: {self.assistant} is empty: it would teach the model to end at once")
        messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)]
        messages = with_system(messages, value_of(row, self.system), where)
        return self.reading.conversation(messages, tools_of(value_of(row, self.tools), where), where)


@dataclasses.dataclass(frozen=True)
class Completion(_Form):
    """Two columns, a prompt and its completion, as texts or as messages: packed as a whole, the loss on the completion.

    Texts are tokenised each by itself, so that a prompt alone has the same tokens.
    """

    reading: RowFormat
    prompt: str
    completion: str
    tools: str | None = "tools"
    system: str | None = "system"
    is_whole = True

    @property
    def columns(self) -> list[str]:
        return [self.prompt, self.completion]

    @property
    def digest(self) -> str:
        return f"{self.columns} {self.optional} {self.reading.of_answers}"

    def document(self, row: Mapping[str, Any], where: str) -> Document:
        """Return a row as tokens; raise BadRow with `where` if it has no such texts or messages, UserError if a turn is
        unclear."""
        tokenizer = self.reading.tokenizer
        prompt = as_messages(value_of(row, self.prompt), where, self.prompt)
        if isinstance(prompt, list):
            completion = as_messages(value_of(row, self.completion), where, self.completion)
            if isinstance(completion, list):
                return self._conversation(prompt, completion, row, where)
            if isinstance(completion, str):
                raise BadRow(
                    "no_value",
                    f"{where}: {self.prompt} is a list of messages and {self.completion} is text: write both as one",
                )
        texts = [_text(row, name, where, self.reading.option("columns")) for name in (self.prompt, self.completion)]
        for part, name in (("tools", self.tools), ("system", self.system)):
            if name is not None and value_of(row, name):
                raise BadRow(
                    "no_value",
                    f"{where}: has {name!r} and a prompt that is text, which no chat template renders: write prompt"
                    f" and completion as lists of messages, or leave it unread by {self.reading.option('columns')} ="
                    f' {{{part} = ""}}',
                )
        if not texts[1]:
            raise BadRow("no_answer", f"{where}: {self.completion} is empty: it would teach the model to end at once")
        self.reading.name_plain_texts(self.columns, where)
        assert tokenizer is not None, "documents are read where there is a tokenizer"
        first, second = (tokenizer.encode(text) for text in texts)
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        ids = np.array([*begin, *first, *second, tokenizer.eos_id], np.int64)
        is_target = np.ones(len(ids), bool)
        if self.reading.loss_on != "all":
            is_target[: len(begin) + len(first)] = False
        return Tokens(ids, is_target)

    def _conversation(
        self, prompt: list[Any], completion: list[Any], row: Mapping[str, Any], where: str
    ) -> Tokens | Contexts:
        before = with_system(messages_of(prompt, f"{where}, prompt", ()), value_of(row, self.system), where)
        after = messages_of(completion, f"{where}, completion")
        if self.reading.loss_on != "all":  # of the turns only those of the completion
            before = [{**message, LEARNED: False} for message in before]
        tools = tools_of(value_of(row, self.tools), where)
        return self.reading.conversation([*before, *after], tools, where)


@dataclasses.dataclass(frozen=True)
class Preference(_Form):
    """A chosen and a rejected answer to a prompt: packed as a whole, as two documents, the loss on the answers.

    All are texts, or all are messages. Without a column of prompts, both answers are whole conversations, and the
    prompt is what they have in common at their beginning.
    """

    reading: RowFormat
    prompt: str | None
    chosen: str
    rejected: str
    tools: str | None = "tools"
    system: str | None = "system"
    is_whole = True

    @property
    def columns(self) -> list[str]:
        return [*([self.prompt] if self.prompt else []), self.chosen, self.rejected]

    @property
    def digest(self) -> str:
        return f"{self.columns} {self.optional} preference {self.reading.of_answers}"

    def document(self, row: Mapping[str, Any], where: str) -> Document:
        """Return a row as a pair; raise BadRow if it has no such texts or messages, or the answers are equal."""
        prompt, *answers = (value_of(row, name) for name in (self.prompt, self.chosen, self.rejected))
        if self.prompt is not None and isinstance(prompt := as_messages(prompt, where, self.prompt), list):
            names = (self.chosen, self.rejected)
            answers = [as_messages(each, where, name) for each, name in zip(answers, names, strict=True)]
        if answers[0] == answers[1]:
            raise BadRow(
                "no_preference", f"{where}: {self.chosen} and {self.rejected} are equal, so there is no preference"
            )
        if self.prompt is None:
            prompt, answers = self._split(answers, where)
        elif len({isinstance(value, list) for value in (prompt, *answers)}) > 1:
            named = ", ".join((self.prompt, self.chosen, self.rejected))
            raise BadRow("no_value", f"{where}: {named} must all be texts, or all be lists of messages")
        name = self.prompt or "prompt"
        rest = row
        if self.prompt is None:
            rest = {**row, name: prompt, **dict(zip((self.chosen, self.rejected), answers, strict=True))}
        found = [
            Completion(self.reading, name, column, self.tools, self.system).document(rest, where)
            for column in (self.chosen, self.rejected)
        ]
        if any(isinstance(each, Contexts) for each in found):
            raise BadRow(
                "no_preference",
                f"{where}: an answer has several turns of the assistant, which the chat template renders in another way"
                " when more follows, and an answer of a pair is one context: shorten the answers to one turn",
            )
        return Pair(*found)  # type: ignore[arg-type]

    def _split(self, answers: list[Any], where: str) -> tuple[list[Any], list[list[Any]]]:
        """Return the messages with which two conversations begin, and how each goes on."""
        names = (self.chosen, self.rejected)
        both = [
            parse_list(answer, where, name) if isinstance(answer, str) and answer.lstrip().startswith("[") else answer
            for answer, name in zip(answers, names, strict=True)
        ]
        if not all(isinstance(answer, list) for answer in both):
            raise BadRow(
                "no_value",
                f"{where}: without a prompt, {self.chosen} and {self.rejected} must be conversations, lists of messages"
                " that begin alike; name the column of prompts in training.columns",
            )
        common = [*_common(*both)]
        if not 0 < len(common) < min(map(len, both)):
            raise BadRow(
                "no_preference",
                f"{where}: {self.chosen} and {self.rejected} must begin with the same messages, and each go on with an"
                " answer of its own",
            )
        return common, [answer[len(common) :] for answer in both]


def _common(one: list[Any], other: list[Any]) -> Iterator[Any]:
    for a, b in zip(one, other, strict=False):
        if a != b:
            return
        yield a


Form = Text | Conversation | Turn | Completion | Preference


def _text(row: Mapping[str, Any], column: str, where: str, option: str) -> str:
    text = value_of(row, column)
    if not isinstance(text, str):
        if find_column(row, column):
            found = f"the value of the key {column!r} is not text, but {_KINDS.get(type(text), 'null')}"
        else:
            found = f"no text under the key {column!r}; there is {shortened(paths_of(row))}"
        raise BadRow("no_value", f"{where}: {found}. Name the column that holds the text in {option}")
    # JSON can contain half a surrogate pair, which no encoding of text can.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def shortened(names: list[str]) -> str:
    text = repr(names)
    return text if len(text) < 200 else f"{text[:200]}..., {len(names):,} keys"
