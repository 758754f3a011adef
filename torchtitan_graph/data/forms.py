"""How the rows of JSON lines and tables are read: their form by their columns, or by options."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torchtitan_graph.config import job
from torchtitan_graph.config.columns import COLUMNS, OPTIONAL, TURN
from torchtitan_graph.config.option import did_you_mean
from torchtitan_graph.data.addresses import Listing
from torchtitan_graph.data.bad_rows import AllBad, BadRow, BadRows, Room
from torchtitan_graph.data.chat import ChatTemplate
from torchtitan_graph.data.columns import find_column, likely_columns, paths_of
from torchtitan_graph.data.document import Contexts, Tokens
from torchtitan_graph.data.messages import LEARNED
from torchtitan_graph.data.node_cache import NodeCache
from torchtitan_graph.data.row_forms import Completion, Conversation, Form, Preference, Text, Turn, shortened
from torchtitan_graph.data.sources import is_small
from torchtitan_graph.data.tokenizer import FileTokenizer, Tokenizer
from torchtitan_graph.data.tokenizer_json import read_templates
from torchtitan_graph.errors import UserError, listed
from torchtitan_graph.log import logger

_OLDER = "conversations"
_LOOKED_AT = 1000  # rows, for one that tells the columns
_READ = ("role", "content", "tool_calls", LEARNED)  # keys of messages; of tool_calls there is a warning of its own


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """How the rows of a corpus are read as documents: the options of `[training]` of the same names, for one corpus.

    tokenizer: of the documents; without it there is text only, and shards of token ids are refused.
    table: of the options, for messages.
    of_others: the form of the rows, where other files of the corpus tell it.
    is_as_training: whether it is of validation, and format and columns are training's, for lack of its own.
    folder_bytes: of all files of the corpus, if it is a folder.
    room: of the documents that are kept, of all corpora of the job.
    cache: of the node, for what is kept of files.
    listed: the files at addresses, where a job has listed them; others are listed when they are opened.
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
    of_others: Form | None = None
    is_as_training: bool = False
    folder_bytes: int = 0
    room: Room = dataclasses.field(default_factory=Room, compare=False)
    cache: NodeCache = dataclasses.field(default_factory=NodeCache, compare=False)
    listed: Mapping[str, Listing] = dataclasses.field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls, training: job.Training, tokenizer: Tokenizer, listed: Mapping[str, Listing] | None = None
    ) -> "RowFormat":
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
            cache=NodeCache(training.cache_folder, 1e9 * training.cache_gb),
            listed=listed or {},
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
        """The template of conversations; raises UserError if the tokenizer has none, or the one that is named
        writes no message."""
        assert self.tokenizer is not None, "checked where the form is chosen"
        template = ChatTemplate(self.tokenizer, self.chat_template, self.chat_date, self.chat_template_kwargs)
        if self.chat_template is not None:
            template.refuse_without_messages()
        return template

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
        return BadRows(place, self.on_bad_row, may_be_all=self.of_others is not None, room=self.room)

    def is_small(self, num_bytes: int) -> bool:
        """Return whether a file of `num_bytes` is a small corpus, which is read when it is opened."""
        return is_small(max(num_bytes, self.folder_bytes))

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
        self.template.check_syntax()  # no row's fault, so named without its place
        self._name_unread_keys(messages, where)
        skip, split = self.unclear_turns == "skip", self.split_turns == "auto"
        try:
            return self.template.tokens(messages, tools, self.loss_on, skip, split)
        except BadRow as error:
            raise error.at(where) from error
        except UserError as error:
            raise UserError(f"{where}: {error}") from error

    def form(self, columns: Mapping[str, Any] | Collection[str], place: str) -> Form:
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
        elif kind == TURN:
            form = Turn(self, names["user"], names["assistant"], tools, system)
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
        there = shortened(paths)
        if not self.columns and kind == "text":
            raise UserError(
                f"{place}: no text under the key 'text'; there is {there}. Text, messages, conversations, or prompt and"
                f" completion are found by themselves; name others in {self.option('columns')}"
                f"{likely_columns(row, self.has_template)}"
            )
        hint = did_you_mean(name, paths, f"; there is {there}.")
        is_named = part in self.columns or self.format is None
        option = self._given("columns") if is_named else f"{self._given('format')} = {self.format!r}"
        more = "" if part in self.columns else f" Name the one that holds it in {self.option('columns')}"
        also = self._also("." if more else "")
        raise UserError(f"{place}: {option}: {part} = {name!r} is no column of it{hint}{more}{also}")

    def _kind(self, row: Mapping[str, Any], place: str) -> str:
        if "user" in self.columns:  # with assistant, as the options were checked
            return TURN
        if self.format is not None:
            return self.format
        if self.columns:
            fitting = [kind for kind, parts in COLUMNS.items() if self.columns.keys() <= parts.keys() and kind != TURN]
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
                f"{place}: its columns {shortened(sorted(row))} can be read as {' or '.join(found)}: choose by"
                f" {self.option('format')}"
            )
        return self._unless_preference(found[0] if found else "text", place)

    def _has_needed(self, row: Mapping[str, Any], kind: str) -> bool:
        names = {**COLUMNS[kind], **self.columns}
        older = kind == "chat" and "messages" not in self.columns and _OLDER in row
        return older or all(find_column(row, names[part]) for part in _needed(kind))

    def name_unread_columns(self, row: Collection[str], form: Form, where: str) -> None:
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
            way = "write both as lists of messages"
            if self.format != "preference":  # a turn has one answer
                way = f"set {self.option('columns')} = {{user = {columns[0]!r}, assistant = {columns[1]!r}}}, or {way}"
            logger.info(
                f"{where}: {' and '.join(columns)} are text, which is learned as it is, without the chat template. If"
                f" the model is to answer in chats, {way}"
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


def _keys(names: list[str]) -> str:
    return f"key{'s' if len(names) > 1 else ''} {listed([*map(repr, names)], most=20)}"


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
