"""The forms in which rows of JSON lines and tables hold documents: text, conversations, prompts with completions."""

import dataclasses
import functools
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from torchtitan_graph.config import job
from torchtitan_graph.config.columns import COLUMNS
from torchtitan_graph.config.option import did_you_mean
from torchtitan_graph.data.chat import ChatTemplate
from torchtitan_graph.data.document import Contexts, Document, Pair, Tokens
from torchtitan_graph.data.messages import messages_of
from torchtitan_graph.data.tokenizer import Tokenizer
from torchtitan_graph.errors import UserError

_OLDER = "conversations"
_KINDS = {list: "a list", dict: "an object", int: "a number", float: "a number", bool: "a truth value"}


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """How the rows of a corpus are read as documents: the options of `[training]` of the same names, for one corpus.

    tokenizer: of the documents; without it there is text only, and shards of token ids are refused.
    table: of the options, for messages.
    """

    tokenizer: Tokenizer | None = None
    format: str | None = None
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    loss_on: str = "assistant"
    unclear_turns: str = "refuse"
    chat_template: str | None = None
    chat_date: str | None = None
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    split_turns: str = "auto"
    skip_not_utf8: bool = False
    table: str = "training"

    @classmethod
    def of(cls, training: job.Training, tokenizer: Tokenizer) -> "RowFormat":
        """Return the reading that `[training]` describes."""
        return cls(
            tokenizer,
            training.format,
            training.columns,
            training.loss_on,
            training.unclear_turns,
            training.chat_template,
            training.chat_date,
            training.chat_template_kwargs,
            training.split_turns,
            training.skip_not_utf8,
        )

    def of_source(self, source: job.DataSource) -> "RowFormat":
        """Return the reading of a corpus of a mixture, which may have a format and columns of its own."""
        if source.format is None and not source.columns:
            return self
        return dataclasses.replace(self, format=source.format, columns=source.columns)

    def of_validation(self, corpus: job.Validation | job.ValidationSet) -> "RowFormat":
        """Return the reading of a corpus of validation: as training's if it has neither format nor columns, or is of
        the documents that training holds out."""
        if corpus.dataset is None and corpus.dataset_path is None:
            return self
        table = "validation" if isinstance(corpus, job.Validation) else "its"
        if corpus.format is None and not corpus.columns:
            return dataclasses.replace(self, table=table)
        return dataclasses.replace(self, format=corpus.format, columns=corpus.columns, table=table)

    def option(self, name: str) -> str:
        """Return what a message calls an option: `training.format`, or `its format` of an entry of validation.sets."""
        return f"{self.table}{' ' if self.table == 'its' else '.'}{name}"

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The template of conversations; raises UserError if the tokenizer has none."""
        assert self.tokenizer is not None, "checked where the form is chosen"
        return ChatTemplate(self.tokenizer, self.chat_template, self.chat_date, self.chat_template_kwargs)

    @property
    def of_turns(self) -> str:
        """How turns of conversations are learned, for digests."""
        return f"{self.loss_on} {self.unclear_turns} {self.split_turns}"

    def conversation(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> Tokens | Contexts:
        """Return a conversation as tokens; raise UserError if it can't be rendered, or a turn is unclear."""
        skip, split = self.unclear_turns == "skip", self.split_turns == "auto"
        return self.template.tokens(messages, tools, self.loss_on, skip, split)

    def form(self, columns: Collection[str], place: str) -> "Form":
        """Return how rows with these columns are read; the columns tell, where neither format nor columns are set.

        Raises UserError if they don't tell, or lack one that is needed.
        """
        kind = self._kind(columns, place)
        if kind != "text" and self.tokenizer is None:
            raise UserError(
                f"{place}: holds conversations or completions; this reads text only: name the column of one"
            )
        names = {**COLUMNS[kind], **self.columns}
        if kind == "chat" and "messages" not in self.columns and "messages" not in columns and _OLDER in columns:
            names["messages"] = _OLDER
        for part, name in names.items():
            is_needed = part != "tools" and (kind, part) != ("preference", "prompt") or part in self.columns
            if is_needed and name not in columns:
                there = _shortened(sorted(columns))
                if kind == "text" and not self.columns:
                    raise UserError(
                        f"{place}: no text under the key 'text'; there is {there}. Text, messages, conversations, or"
                        " prompt and completion are found by themselves; name another column in"
                        f" {self.option('columns')}, such as {{text = 'content'}}, or {{prompt = 'question', completion"
                        " = 'answer'}"
                    )
                hint = did_you_mean(name, columns, f"; there is {there}")
                raise UserError(f"{place}: {self.option('columns')}: {part} = {name!r} is no column of it{hint}")
        if kind == "text":
            return Text(names["text"], self.option("columns"))
        if kind == "chat":
            return Conversation(self, names["messages"], names["tools"] if names["tools"] in columns else None)
        if kind == "preference":
            prompt = names["prompt"] if names["prompt"] in columns else None
            return Preference(self, prompt, names["chosen"], names["rejected"])
        return Completion(self, names["prompt"], names["completion"])

    def _kind(self, columns: Collection[str], place: str) -> str:
        if self.format is not None:
            return self.format
        if self.columns:
            kind = next(kind for kind, parts in COLUMNS.items() if self.columns.keys() <= parts.keys())
            return self._unless_preference(kind, place)
        told = {
            "text": "text" in columns,
            "chat": "messages" in columns or _OLDER in columns,
            "completion": "prompt" in columns and "completion" in columns,
            "preference": "chosen" in columns and "rejected" in columns,
        }
        found = [kind for kind, is_there in told.items() if is_there]
        if len(found) > 1:
            raise UserError(
                f"{place}: its columns {_shortened(sorted(columns))} can be read as {' or '.join(found)}: choose by"
                f" {self.option('format')}"
            )
        return self._unless_preference(found[0] if found else "text", place)

    def _unless_preference(self, kind: str, place: str) -> str:
        if kind == "preference":
            raise UserError(
                f"{place}: holds preferences, a chosen and a rejected answer: set training.format = 'preference', and"
                " a training.step that compares them, such as 'torchtitan_graph.goals.dpo'; or name the column of one"
                " answer in training.columns"
            )
        return kind


@dataclasses.dataclass(frozen=True)
class Text:
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
        """Return a row's text; raise UserError if it has none."""
        return _text(row, self.column, where, self.option)


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A column of messages, and perhaps one of the tools that they may call: packed as a whole."""

    reading: RowFormat
    messages: str
    tools: str | None
    is_whole = True

    @property
    def columns(self) -> list[str]:
        return [self.messages, *([self.tools] if self.tools else [])]

    @property
    def digest(self) -> str:
        reading = self.reading
        return f"{self.columns} {reading.of_turns} {reading.template.digest}"

    def document(self, row: Mapping[str, Any], where: str) -> Document:
        """Return a row's conversation as tokens; raise UserError with `where` if it can't be rendered."""
        if self.messages not in row:
            raise UserError(f"{where}: no messages under the key {self.messages!r}; there is {_shortened(sorted(row))}")
        messages = messages_of(row[self.messages], where)
        tools = _tools(row.get(self.tools), where) if self.tools else None
        try:
            return self.reading.conversation(messages, tools)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Completion:
    """Two columns, a prompt and its completion, as texts or as messages: packed as a whole, the loss on the completion.

    Texts are tokenised each by itself, so that a prompt alone has the same tokens.
    """

    reading: RowFormat
    prompt: str
    completion: str
    is_whole = True

    @property
    def columns(self) -> list[str]:
        return [self.prompt, self.completion]

    @property
    def digest(self) -> str:
        return f"{self.columns} {self.reading.of_turns} {sorted(self.reading.chat_template_kwargs.items())}"

    def document(self, row: Mapping[str, Any], where: str) -> Document:
        """Return a row as tokens; raise UserError with `where` if it has no such texts or messages."""
        prompt, completion, tokenizer = row.get(self.prompt), row.get(self.completion), self.reading.tokenizer
        if isinstance(prompt, list) and isinstance(completion, list):
            return self._conversation(prompt, completion, where)
        texts = [_text(row, name, where, self.reading.option("columns")) for name in self.columns]
        assert tokenizer is not None, "documents are read where there is a tokenizer"
        first, second = (tokenizer.encode(text) for text in texts)
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        ids = np.array([*begin, *first, *second, tokenizer.eos_id], np.int64)
        is_target = np.ones(len(ids), bool)
        if self.reading.loss_on != "all":
            is_target[: len(begin) + len(first)] = False
        return Tokens(ids, is_target)

    def _conversation(self, prompt: list[Any], completion: list[Any], where: str) -> Tokens | Contexts:
        before, after = messages_of(prompt, f"{where}, prompt"), messages_of(completion, f"{where}, completion")
        if self.reading.loss_on != "all":  # of the turns only those of the completion
            before = [{**message, "learned": False} for message in before]
        try:
            return self.reading.conversation([*before, *after], None)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Preference:
    """A chosen and a rejected answer to a prompt: packed as a whole, as two documents, the loss on the answers.

    All are texts, or all are messages. Without a column of prompts, both answers are whole conversations, and the
    prompt is what they have in common at their beginning.
    """

    reading: RowFormat
    prompt: str | None
    chosen: str
    rejected: str
    is_whole = True

    @property
    def columns(self) -> list[str]:
        return [*([self.prompt] if self.prompt else []), self.chosen, self.rejected]

    @property
    def digest(self) -> str:
        return f"{self.columns} preference {sorted(self.reading.chat_template_kwargs.items())}"

    def document(self, row: Mapping[str, Any], where: str) -> Document:
        """Return a row as a pair; raise UserError if it has no such texts or messages, or the answers are equal."""
        chosen, rejected = row.get(self.chosen), row.get(self.rejected)
        if chosen == rejected:
            raise UserError(f"{where}: {self.chosen} and {self.rejected} are equal, so there is no preference")
        prompt = self.prompt
        if prompt is None:
            prompt = "prompt"
            if not isinstance(chosen, list) or not isinstance(rejected, list):
                raise UserError(
                    f"{where}: without a prompt, {self.chosen} and {self.rejected} must be conversations, lists of"
                    " messages that begin alike; name the column of prompts in training.columns"
                )
            common = [*_common(chosen, rejected)]
            if not 0 < len(common) < min(len(chosen), len(rejected)):
                raise UserError(
                    f"{where}: {self.chosen} and {self.rejected} must begin with the same messages, and each go on"
                    " with an answer of its own"
                )
            row = {
                prompt: common,
                self.chosen: chosen[len(common) :],
                self.rejected: rejected[len(common) :],
            }
        elif len({isinstance(row.get(name), list) for name in self.columns}) > 1:
            raise UserError(f"{where}: {', '.join(self.columns)} must all be texts, or all be lists of messages")
        found = [Completion(self.reading, prompt, name).document(row, where) for name in (self.chosen, self.rejected)]
        if any(isinstance(each, Contexts) for each in found):
            raise UserError(
                f"{where}: an answer has several turns of the assistant, which the chat template renders in another way"
                " when more follows, and an answer of a pair is one context: shorten the answers to one turn"
            )
        return Pair(*found)  # type: ignore[arg-type]


def _common(one: list[Any], other: list[Any]) -> Iterator[Any]:
    for a, b in zip(one, other, strict=False):
        if a != b:
            return
        yield a


Form = Text | Conversation | Completion | Preference


def _text(row: Mapping[str, Any], column: str, where: str, option: str) -> str:
    text = row.get(column)
    if not isinstance(text, str):
        if column in row:
            found = f"the value of the key {column!r} is not text, but {_KINDS.get(type(text), 'null')}"
        else:
            found = f"no text under the key {column!r}; there is {_shortened(sorted(row))}"
        raise UserError(f"{where}: {found}. Name the column that holds the text in {option}")
    # JSON can contain half a surrogate pair, which no encoding of text can.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _tools(tools: Any, where: str) -> list[Any] | None:
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise UserError(f"{where}: tools is text, and no JSON: {error}") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{where}: tools must be a list of objects, each the JSON schema of a tool")
    return tools


def _shortened(names: list[str]) -> str:
    text = repr(names)
    return text if len(text) < 200 else f"{text[:200]}..., {len(names):,} keys"
