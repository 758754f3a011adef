"""Conversations to text: rendered by a Jinja template of a tokenizer."""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torchtitan_graph.config.option import did_you_mean
from torchtitan_graph.data.bad_rows import BadRow
from torchtitan_graph.data.calls import TOOL, CallForm, call_form
from torchtitan_graph.data.tokenizer import FileTokenizer, Tokenizer
from torchtitan_graph.data.tokenizer_json import NAMED, read_ends, read_templates
from torchtitan_graph.errors import UserError, listed
from torchtitan_graph.log import logger
from torchtitan_graph.patience import near_path, refuse_unreadable
from torchtitan_graph.small_files import read_small

_HALF_PAIR = re.compile("[\ud800-\udfff]")


# A line with which an exported template begins: it gives an argument the value of training where a caller gives none.
_DEFAULT = re.compile(r"\{%- if (\w+) is not defined %\}\{% set \1 = (.*) %\}\{% endif %\}\n")


def defaults_of(template: str) -> dict[str, str]:
    """Return the arguments to which a template's first lines give values, with these as Jinja writes them."""
    found, place = {}, 0
    while line := _DEFAULT.match(template, place):
        found[line[1]], place = line[2], line.end()
    return found


def with_defaults(template: str, values: Mapping[str, Any]) -> str:
    """Return a template whose first lines give arguments these values where a caller gives none, in place of such lines
    of an earlier export."""
    earlier = defaults_of(template)
    while line := _DEFAULT.match(template):
        template = template[line.end() :]
    lines = {**earlier, **{name: ascii(value) for name, value in values.items()}}
    # Jinja trims the newline.
    return (
        "".join(
            f"{{%- if {name} is not defined %}}{{% set {name} = {value} %}}{{% endif %}}\n"
            for name, value in lines.items()
        )
        + template
    )


class Span(NamedTuple):
    """Characters of a text, the end excluded."""

    start: int
    end: int


class Renderer:
    """Renders conversations by a Jinja template of a tokenizer.

    Args:
        file: with another template; not set: the tokenizer's own.
        date: YYYY-MM-DD, for templates that write the day.
        arguments: further names that the template reads.

    Raises UserError if there is no template, the tokenizer has none of the tokens that templates are made of, or the
    template doesn't read an argument.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        file: str | None = None,
        date: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(tokenizer, FileTokenizer):
            raise UserError(
                "training.format = 'chat': bytes have no chat template; name the folder of a model's tokenizer in"
                " model.hf_assets_path"
            )
        self._tokenizer, self._date, self._arguments = tokenizer, date, dict(arguments or {})
        self._has_warned: set[str] = set()
        self._has_seen_tools = self._has_seen_empty_reasoning = False
        self._call_forms: dict[bool, CallForm] = {}
        self._place = str(tokenizer.folder) if file is None else f"training.chat_template = {file!r}"
        if file is not None:
            with refuse_unreadable(self._place):
                try:
                    content = read_small(Path(file).expanduser())
                except FileNotFoundError as error:
                    raise UserError(f"{self._place}: there is no such file{near_path(Path(file))}") from error
            self.templates = {"default": content.decode(errors="replace")}
        else:
            self.templates = read_templates(tokenizer.folder)
        if "default" not in self.templates:
            raise UserError(
                f"{tokenizer.folder}: has no chat template: no chat_template.jinja, and no chat_template in"
                " tokenizer_config.json. Write one there; for training, name a file with one in training.chat_template,"
                " or the folder of an instruct model in model.hf_assets_path"
            )
        self._ends = {*read_ends(tokenizer.folder), tokenizer.eos_id}
        if self._arguments:
            self._check_arguments()
        self.digest = f"{sorted(self.templates.items())} {date} {sorted(self._arguments.items())} {sorted(self._ends)}"

    def refuse_without_messages(self) -> None:
        """Raise UserError if the template writes no message: each conversation would be the same."""
        try:
            one, other = (
                self.render([{"role": role, "content": text} for role in ("user", "assistant")])
                for text in ("one", "another")
            )
        except UserError:  # said again where a row is rendered
            return
        if one == other:
            raise UserError(
                f"{self._place}: the chat template does not write the messages of a conversation. Name a file whose"
                " template does: most go through `messages`, and write the role and content of each"
            )

    def _check_arguments(self) -> None:
        """Raise UserError for an argument that no template reads."""
        read = self._read_arguments()
        for name in self._arguments:
            if name not in read:
                legal = f"; it reads {listed(sorted(read - set(NAMED)))}" if read - set(NAMED) else "; it reads none"
                hint = did_you_mean(name, read, legal)
                raise UserError(f"training.chat_template_kwargs: the chat template does not read {name!r}{hint}")

    def _read_arguments(self) -> set[str]:
        from torchtitan_graph.transformers_private import chat_arguments

        self.check_syntax()
        return set().union(*map(chat_arguments, self.templates.values()))

    def check_syntax(self) -> None:
        """Raise UserError if a template is not in Jinja's syntax."""
        from torchtitan_graph.transformers_private import syntax_error  # imports transformers, which takes seconds

        for name, text in self.templates.items():
            if wrong := syntax_error(text):
                which = "" if name == "default" else f" {name!r}"
                raise UserError(f"{self._place}: the chat template{which} is no Jinja template: {wrong}")

    def render(
        self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Return a conversation's text, and what a template marks as the assistant's words; with `prompt` the text asks
        for the next answer. Raises UserError if the template refuses it."""
        if any(message.get("tool_calls") for message in messages):
            messages = [self._call_form(bool(tools)).apply(message) for message in messages]
        return self._rendered(messages, tools, prompt)

    def _call_form(self, has_tools: bool) -> CallForm:
        """Return the form in which the template takes calls; there may be another template where there are tools."""
        if has_tools not in self._call_forms:
            tools = [TOOL] if has_tools else None
            self._call_forms[has_tools] = call_form(lambda messages: self._rendered(messages, tools, False)[0])
        return self._call_forms[has_tools]

    def _rendered(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[Any] | None,
        prompt: bool,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[str, list[Span]]:
        from torchtitan_graph.transformers_private import TEMPLATE_ERRORS, render_chat

        self.check_syntax()
        template = self.templates.get("tool_use" if tools else "default", self.templates["default"])
        arguments = {**self._tokenizer.named_tokens, **self._arguments, **more}
        try:
            text, spans = render_chat(template, list(messages), tools, prompt, arguments, self._strftime)
        except UserError:
            raise
        except TEMPLATE_ERRORS as error:
            raise BadRow("refused", f"the chat template refuses it: {type(error).__name__}: {error}") from error
        # Half a surrogate pair, which JSON can contain and no encoding of text can, becomes one other character.
        return _HALF_PAIR.sub("\ufffd", text), [Span(*span) for span in spans]

    def reads(self, key: str) -> bool:
        """Return whether a template reads a key of messages."""
        return key in self._keys

    @functools.cached_property
    def _keys(self) -> set[str]:
        from torchtitan_graph.transformers_private import keys_read

        self.check_syntax()
        return set().union(*map(keys_read, self.templates.values()))

    def _strftime(self, form: str) -> str:
        if self._date is None:
            raise UserError(
                "the chat template writes the day, and a run that goes on tomorrow must have the same rows: set"
                " training.chat_date = 'YYYY-MM-DD'"
            )
        import datetime

        return datetime.datetime.fromisoformat(self._date).strftime(form)

    def _warn(self, text: str) -> None:
        if text not in self._has_warned:
            self._has_warned.add(text)
            logger.warning(text)
