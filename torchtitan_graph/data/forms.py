"""The forms in which rows of JSON lines and tables hold documents: text, conversations, prompts with completions."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from torchtitan_graph.config import job
from torchtitan_graph.config.columns import COLUMNS, OPTIONAL
from torchtitan_graph.config.option import did_you_mean
from torchtitan_graph.data.bad_rows import AllBad, BadRow, BadRows
from torchtitan_graph.data.chat import ChatTemplate
from torchtitan_graph.data.columns import find_column, paths_of, value_of
from torchtitan_graph.data.document import Contexts, Document, Pair, Tokens
from torchtitan_graph.data.messages import LEARNED, as_messages, messages_of, parse_list, tools_of, with_system
from torchtitan_graph.data.tokenizer import FileTokenizer, Tokenizer
from torchtitan_graph.data.tokenizer_json import read_templates
from torchtitan_graph.errors import UserError, listed
from torchtitan_graph.log import logger

_OLDER = "conversations"
_PAIRS = (  # columns of prompts and their answers in common tables
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("query", "answer"),
    ("problem", "solution"),
    ("prompt", "response"),
    ("prompt", "answer"),
    ("input", "output"),
)
_LOOKED_AT = 1000  # rows, for one that tells the columns
_READ = ("role", "content", "tool_calls", LEARNED)  # keys of messages; of tool_calls there is a warning of its own
_KINDS = {list: "a list", dict: "an object", int: "a number", float: "a number", bool: "a truth value"}


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """How the rows of a corpus are read as documents: the options of `[training]` of the same names, for one corpus.

    tokenizer: of the documents; without it there is text only, and shards of token ids are refused.
    table: of the options, for messages.
    of_others: the form of the rows, where other files of the corpus tell it.
    is_as_training: whether it is of validation, and format and columns are training's, for lack of its own.
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
    on_bad_row: str = "refuse"
    table: str = "training"
    of_others: "Form | None" = None
    is_as_training: bool = False

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
            training.on_bad_row,
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
            return dataclasses.replace(self, table=table, is_as_training=True)
        return dataclasses.replace(self, format=corpus.format, columns=corpus.columns, table=table)

    def option(self, name: str) -> str:
        """Return what a message calls an option: `training.format`, or `its format` of an entry of validation.sets."""
        return f"{self.table}{' ' if self.table == 'its' else '.'}{name}"

    def _given(self, name: str) -> str:
        """Return what a message calls an option where it quotes a value."""
        return f"training.{name}" if self.is_as_training else self.option(name)

    def _also(self, end: str) -> str:
        """Return the end of a message that quotes a value: why it holds for validation, if it was set for training."""
        if not self.is_as_training:
            return ""
        return (
            f"{end} It holds here too, for {self.option('format')} and {self.option('columns')} are not set: set one of"
            " them"
        )

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The template of conversations; raises UserError if the tokenizer has none."""
        assert self.tokenizer is not None, "checked where the form is chosen"
        return ChatTemplate(self.tokenizer, self.chat_template, self.chat_date, self.chat_template_kwargs)

    @functools.cached_property
    def has_template(self) -> bool:
        """Whether there is a chat template: the one that is named, or the tokenizer's own."""
        if not isinstance(self.tokenizer, FileTokenizer):
            return False
        return self.chat_template is not None or "default" in read_templates(self.tokenizer.folder)

    @property
    def of_turns(self) -> str:
        """How turns of conversations are learned, for digests."""
        return f"{self.loss_on} {self.unclear_turns} {self.split_turns}"

    @property
    def of_answers(self) -> str:
        """How prompts and answers become tokens, for digests: by the chat template, if there is one, as any row may
        hold messages."""
        return f"{self.of_turns} {self.template.digest if self.has_template else ''}"

    def bad_rows(self, place: str) -> BadRows:
        """Return what becomes of the bad rows of a file or folder."""
        return BadRows(place, self.on_bad_row, may_be_all=self.of_others is not None)

    def refuse_for_text(self, place: str, what: str) -> None:
        """Raise UserError if a format or columns are named for a corpus that has no rows."""
        for name, value in (("columns", dict(self.columns)), ("format", self.format)):
            if value and value != "text":
                raise UserError(
                    f"{self._given(name)} = {value!r}: {place} {what}, without rows that have columns. Name JSON lines,"
                    f" a table (.csv, .tsv, .parquet) or a saved dataset, or set {self.option('format')} = 'text' and"
                    f" no columns for it{self._also('.')}"
                )

    def conversation(self, messages: list[dict[str, Any]], tools: list[Any] | None, where: str) -> Tokens | Contexts:
        """Return a conversation as tokens; raise UserError with `where` if it can't be rendered, or a turn is
        unclear."""
        self._name_unread_keys(messages, where)
        skip, split = self.unclear_turns == "skip", self.split_turns == "auto"
        try:
            return self.template.tokens(messages, tools, self.loss_on, skip, split)
        except BadRow as error:
            raise error.at(where) from error
        except UserError as error:
            raise UserError(f"{where}: {error}") from error

    def form(self, columns: Mapping[str, Any] | Collection[str], place: str) -> "Form":
        """Return how rows with these columns are read; the columns tell, where neither format nor columns are set.

        columns: their names; or a row, which also tells what is inside them.

        Raises UserError if they don't tell, or lack one that is needed.
        """
        row = columns if isinstance(columns, Mapping) else dict.fromkeys(columns)
        kind = self._kind(row, place)
        if kind != "text" and self.tokenizer is None:
            raise UserError(
                f"{place}: holds conversations or completions; this reads text only: name the column of one"
            )
        names = {**COLUMNS[kind], **self.columns}
        if kind == "chat" and "messages" not in self.columns and "messages" not in row and _OLDER in row:
            names["messages"] = _OLDER
        for part in _needed(kind) | self.columns.keys():
            if names[part]:
                self._check_column(row, part, names[part], kind, place)
        tools, system = (names.get(part) or None for part in OPTIONAL)  # "" is none
        if kind == "text":
            form: Form = Text(names["text"], self.option("columns"))
        elif kind == "chat":
            form = Conversation(self, names["messages"], tools, system)
        elif kind == "completion":
            form = Completion(self, names["prompt"], names["completion"], tools, system)
        else:
            prompt = names["prompt"] if names["prompt"] and find_column(row, names["prompt"]) else None
            form = Preference(self, prompt, names["chosen"], names["rejected"], tools, system)
        self.name_unread_columns(row, form, place)
        return form

    def _check_column(self, row: Mapping[str, Any], part: str, name: str, kind: str, place: str) -> None:
        """Raise UserError if a row lacks a column that is needed, or named by an option."""
        if find_column(row, name):
            return
        paths = paths_of(row)
        there = _shortened(paths)
        if not self.columns and kind == "text":
            raise UserError(
                f"{place}: no text under the key 'text'; there is {there}. Text, messages, conversations, or prompt and"
                f" completion are found by themselves; name others in {self.option('columns')}{_likely_columns(row)}"
            )
        hint = did_you_mean(name, paths, f"; there is {there}.")
        is_named = part in self.columns or self.format is None
        option = self._given("columns") if is_named else f"{self._given('format')} = {self.format!r}"
        more = "" if part in self.columns else f" Name the one that holds it in {self.option('columns')}"
        also = self._also("." if more else "")
        raise UserError(f"{place}: {option}: {part} = {name!r} is no column of it{hint}{more}{also}")

    def _kind(self, row: Mapping[str, Any], place: str) -> str:
        if self.format is not None:
            return self.format
        if self.columns:
            fitting = [kind for kind, parts in COLUMNS.items() if self.columns.keys() <= parts.keys()]
            there = [kind for kind in fitting if self._has_needed(row, kind)]
            return self._unless_preference((there or fitting)[0], place)
        fits = {
            "text": "text" in row,
            "chat": "messages" in row or _OLDER in row,
            "completion": "prompt" in row and "completion" in row,
            "preference": "chosen" in row and "rejected" in row,
        }
        found = [kind for kind, is_there in fits.items() if is_there]
        if len(found) > 1:
            raise UserError(
                f"{place}: its columns {_shortened(sorted(row))} can be read as {' or '.join(found)}: choose by"
                f" {self.option('format')}"
            )
        return self._unless_preference(found[0] if found else "text", place)

    def _has_needed(self, row: Mapping[str, Any], kind: str) -> bool:
        names = {**COLUMNS[kind], **self.columns}
        older = kind == "chat" and "messages" not in self.columns and _OLDER in row
        return older or all(find_column(row, names[part]) for part in _needed(kind))

    def name_unread_columns(self, row: Collection[str], form: "Form", where: str) -> None:
        """Log the keys of a row that nothing reads, each once."""
        off = [part for part, name in self.columns.items() if not name]
        unread = [key for key in row if key not in form.keys and key not in self._named and key not in off]
        self._named.update(unread)
        if unread:
            log = logger.info if isinstance(form, Text) else logger.warning
            log(f"{where}: nothing reads its {_keys(unread)}")

    def _name_unread_keys(self, messages: list[dict[str, Any]], where: str) -> None:
        """Log the keys of messages that the chat template doesn't read, each once."""
        keys = {key for message in messages for key in message if key not in _READ}
        unread = sorted(key for key in keys if ("message", key) not in self._named and not self.template.reads(key))
        self._named.update(("message", key) for key in unread)
        if unread:
            logger.warning(f"{where}: the chat template does not read the {_keys(unread)} of its messages")

    def name_plain_texts(self, columns: Sequence[str], where: str) -> None:
        """Log once that a prompt and its answer are texts, where there is a chat template that does not render them."""
        if self.has_template and "" not in self._named:
            self._named.add("")
            logger.info(
                f"{where}: {' and '.join(columns)} are text, which is learned as it is, without the chat template. If"
                " the model is to answer in chats, write both as lists of messages"
            )

    @functools.cached_property
    def _named(self) -> set[Any]:
        return set()

    def _unless_preference(self, kind: str, place: str) -> str:
        if kind == "preference":
            raise UserError(
                f"{place}: holds preferences, a chosen and a rejected answer: set training.format = 'preference', and"
                " a training.step that compares them, such as 'torchtitan_graph.goals.dpo'; or name the column of one"
                " answer in training.columns"
            )
        return kind


def _needed(kind: str) -> set[str]:
    """Return what rows of a format must have."""
    return {part for part in COLUMNS[kind] if part not in OPTIONAL and (kind, part) != ("preference", "prompt")}


def _likely_columns(row: Collection[str]) -> str:
    """Return the end of a message: the value of the option `columns` that a row's columns suggest, or an example."""
    pair = next((pair for pair in _PAIRS if pair[0] in row and pair[1] in row), None)
    if pair is None:
        return ", such as {text = 'content'}, or {prompt = 'question', completion = 'answer'}"
    hint = f": {{prompt = {pair[0]!r}, completion = {pair[1]!r}}}"
    if pair == ("instruction", "output") and "input" in row:
        hint += ". The column 'input' is not read then: write what it holds into the instruction"
    return hint


def _keys(names: list[str]) -> str:
    return f"key{'s' if len(names) > 1 else ''} {listed([*map(repr, names)], most=20)}"


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
            there = _shortened(paths_of(row))
            raise BadRow("no_value", f"{where}: no messages under the key {self.messages!r}; there is {there}")
        messages = messages_of(value_of(row, self.messages), where)
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
        for name in self.optional:
            if value_of(row, name):
                raise BadRow(
                    "no_value",
                    f"{where}: has {name!r} and a prompt that is text, which no chat template renders: write prompt"
                    " and completion as lists of messages, or leave it out",
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
            raise UserError(
                f"{where}: an answer has several turns of the assistant, which the chat template renders in another way"
                " when more follows, and an answer of a pair is one context: shorten the answers to one turn"
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


Form = Text | Conversation | Completion | Preference


def form_of(reading: RowFormat, row: Callable[[int], Mapping[str, Any]], number: int, place: str) -> Form:
    """Return how the rows of a file are read: the columns of the first tell, of bad ones that are left out the first
    that has some. A file without any row is one of text.

    Raises AllBad if rows are left out, and none of the first can be read.
    """
    if reading.of_others is not None:
        return reading.of_others
    bad: UserError | None = None
    for index in range(min(number, _LOOKED_AT)):
        try:
            return reading.form(row(index), place)
        except BadRow:  # refused, or left out, with all others
            continue
        except UserError as error:
            if reading.on_bad_row != "skip":
                raise
            bad = bad or error
    if number > _LOOKED_AT and reading.on_bad_row == "skip":
        bad = bad or UserError(f"{place}: none of its first {_LOOKED_AT:,} rows can be read")
    if bad is not None:
        raise AllBad(str(bad)) from bad
    return Text("text", reading.option("columns"))


def _text(row: Mapping[str, Any], column: str, where: str, option: str) -> str:
    text = value_of(row, column)
    if not isinstance(text, str):
        if find_column(row, column):
            found = f"the value of the key {column!r} is not text, but {_KINDS.get(type(text), 'null')}"
        else:
            found = f"no text under the key {column!r}; there is {_shortened(paths_of(row))}"
        raise BadRow("no_value", f"{where}: {found}. Name the column that holds the text in {option}")
    # JSON can contain half a surrogate pair, which no encoding of text can.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _shortened(names: list[str]) -> str:
    text = repr(names)
    return text if len(text) < 200 else f"{text[:200]}..., {len(names):,} keys"
