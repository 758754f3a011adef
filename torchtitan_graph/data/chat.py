"""Conversations to tokens: rendered by a tokenizer's chat template, with the targets that the loss is computed on."""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchtitan_graph.data.document import Tokens
from torchtitan_graph.data.tokenizer import FileTokenizer, Tokenizer
from torchtitan_graph.data.tokenizer_json import read_templates
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger
from torchtitan_graph.patience import refuse_unreadable
from torchtitan_graph.small_files import read_small

LOSS_ON = ("assistant", "last_assistant", "all")
# Note [Targets of a conversation]
# What an assistant says begins where the rendering of all before it, with the generation prompt, ends: that text is
# what the model is given when it answers. It ends where the rendering of the conversation up to it ends, as far as the
# whole conversation is rendered the same: templates close the last turn in their own way. Both renderings must be
# beginnings of the whole, in tokens too: else the model would be given other tokens than it was trained on, and the
# turn is unclear. An empty reasoning block at its beginning is supplied by the generation prompt of a model that does
# not reason, or not at all; it is never learned. A template that marks the assistant's words itself, by
# {% generation %}, is taken at its word.
_EMPTY_REASONING = re.compile(r"<(think|thinking|reasoning|seed:think)>\s*</\1>\n{0,2}")
_SHOWN = 40  # characters of a text in messages


class Unclear(Exception):
    """Which tokens of a turn the assistant says can't be told."""


class Span(NamedTuple):
    """Characters of a text, the end excluded."""

    start: int
    end: int


class ChatTemplate:
    """Renders conversations by a Jinja template of a tokenizer, and finds the assistant's turns in the tokens.

    Args:
        file: with another template; not set: the tokenizer's own.
        date: YYYY-MM-DD, for templates that write the day.

    Raises UserError if there is no template, or the tokenizer has none of the tokens that templates are made of.
    """

    def __init__(self, tokenizer: Tokenizer, file: str | None = None, date: str | None = None) -> None:
        if not isinstance(tokenizer, FileTokenizer):
            raise UserError(
                "training.format = 'chat': bytes have no chat template; name the folder of a model's tokenizer in"
                " model.hf_assets_path"
            )
        self._tokenizer, self._date = tokenizer, date
        self._has_warned: set[str] = set()
        if file is not None:
            with refuse_unreadable(f"training.chat_template = {file!r}"):
                self._templates = {"default": read_small(Path(file).expanduser()).decode(errors="replace")}
        else:
            self._templates = read_templates(tokenizer.folder)
        if "default" not in self._templates:
            raise UserError(
                f"{tokenizer.folder}: has no chat template: no chat_template.jinja, and no chat_template in"
                " tokenizer_config.json. Write one there; for training, name a file with one in training.chat_template,"
                " or the folder of an instruct model in model.hf_assets_path"
            )
        self.digest = f"{sorted(self._templates.items())} {date}"

    def tokens(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None, loss_on: str, skip: bool) -> Tokens:
        """Return a conversation as `loss_on` has its targets; with `skip` unclear turns have none.

        Raises UserError if the template refuses the conversation, or a turn is unclear.
        """
        self._warn_of_special_tokens(messages)
        text, tagged = self.render(messages, tools)
        self._warn_of_calls_left_out(messages, text)
        ids, spans = self._tokenizer.encode_marked(text)
        is_target = np.zeros(len(ids), bool)
        if loss_on == "all":
            is_target[:] = True
            return Tokens(np.asarray(ids, np.int64), is_target)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        chosen = turns[-1:] if loss_on == "last_assistant" else turns
        begins = np.array([span[0] for span in spans], np.int64)
        ends = np.array([span[1] for span in spans], np.int64)
        found: list[np.ndarray] = []
        for number in chosen:
            try:
                said = self._said(text, messages, tools, number)
                found.append(_inside(said, begins, ends, text))
            except Unclear as error:
                if not tagged and not skip:
                    raise UserError(
                        f"message {number + 1}, by the assistant: {error}. Choose training.loss_on = 'last_assistant',"
                        " training.unclear_turns = 'skip' (such a turn has no loss), or a template in"
                        " training.chat_template that renders a turn the same whatever follows"
                    ) from error
        by_prefix = np.any(found, axis=0) if found else is_target
        if not tagged:
            return Tokens(np.asarray(ids, np.int64), by_prefix)
        marked = tagged[-1:] if loss_on == "last_assistant" else tagged
        for start, end in marked:
            is_target |= (begins < end) & (ends > start)
        if not np.array_equal(is_target, by_prefix):
            place = int(np.flatnonzero(is_target != by_prefix)[0])
            what = "marks" if is_target[place] else "does not mark"
            self._warn(
                f"the chat template {what} {self._tokenizer.decode_all(ids[place : place + 1])!r} as what the assistant"
                " says by {% generation %}, other than what follows the generation prompt; the template is followed"
            )
        return Tokens(np.asarray(ids, np.int64), is_target)

    def render(
        self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Return a conversation's text, and what a template marks as the assistant's words; with `prompt` the text asks
        for the next answer. Raises UserError if the template refuses it."""
        from torchtitan_graph.transformers_private import render_chat  # imports transformers, which takes seconds

        template = self._templates.get("tool_use" if tools else "default", self._templates["default"])
        try:
            text, spans = render_chat(
                template, list(messages), tools, prompt, self._tokenizer.named_tokens, self._strftime
            )
        except UserError:
            raise
        except Exception as error:  # of Jinja, or of the code in the template
            raise UserError(f"the chat template refuses it: {type(error).__name__}: {error}") from error
        return text, [Span(*span) for span in spans]

    def _strftime(self, form: str) -> str:
        if self._date is None:
            raise UserError(
                "the chat template writes the day, and a run that goes on tomorrow must have the same rows: set"
                " training.chat_date = 'YYYY-MM-DD'"
            )
        import datetime

        return datetime.datetime.fromisoformat(self._date).strftime(form)

    def _said(self, text: str, messages: Sequence[dict[str, Any]], tools: list[Any] | None, number: int) -> Span:
        """Return the characters of the whole text that the assistant says in a message. See Note [Targets of a
        conversation]."""
        try:
            before, _ = self.render(messages[:number], tools, prompt=True)
            after, _ = self.render(messages[: number + 1], tools)
        except UserError as error:
            raise Unclear(f"what comes before it can't be rendered alone: {error}") from error
        if not text.startswith(before):
            raise Unclear(f"what comes before it is rendered another way in the whole: {_difference(before, text)}")
        if not after.startswith(before):
            raise Unclear(f"the generation prompt is not how it begins: {_difference(before, after)}")
        start, answer = len(before), after[len(before) :]
        if empty := _EMPTY_REASONING.match(answer):
            answer = answer[empty.end() :]
        if empty := _EMPTY_REASONING.match(text, start):
            start = empty.end()
        end, rest = self._common(answer, text, start)
        if rest.strip():
            raise Unclear(f"it is rendered another way when it is last: {_difference(answer, text[start:])}")
        return Span(start, self._end_of_turn(text, start, end))

    def _common(self, answer: str, text: str, start: int) -> tuple[int, str]:
        """Return where the text stops being the answer, and what is left of the answer without special tokens."""
        place = start
        pieces, theirs = self._pieces(answer), self._pieces(text[start:])
        for number, (piece, other) in enumerate(itertools.zip_longest(pieces, theirs, fillvalue="")):
            if piece == other:
                place += len(piece)
                continue
            if not self._is_special(piece):
                same = len(_common_prefix(piece, other))
                place, piece = place + same, piece[same:]
            rest = [piece, *pieces[number + 1 :]]
            return place, "".join(x for x in rest if not self._is_special(x))
        return place, ""

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        """Return the end of a turn with the token that ends it, and without the white space after that."""
        last = self._pieces(text[start:end].rstrip())
        if last and self._is_special(last[-1]):
            return start + len(text[start:end].rstrip())
        following = self._pieces(text[end:])
        if following and self._is_special(following[0]):  # another one ends it when it is not the last
            return end + len(following[0])
        self._warn("the chat template ends no turn of the assistant by a special token: the model won't learn to stop")
        return end

    def _warn_of_special_tokens(self, messages: Sequence[dict[str, Any]]) -> None:
        """Warn of messages that spell special tokens: the rendered text holds both, and they can't be told apart."""
        if not self._tokenizer.special_tokens:
            return
        for message in messages:
            if found := self._tokenizer.special_pattern.search(str(message.get("content", ""))):
                self._warn(
                    f"a message's content spells the special token {found[0]!r}: it becomes that token, as in"
                    " transformers. Take it out where text is meant"
                )

    def _warn_of_calls_left_out(self, messages: Sequence[dict[str, Any]], text: str) -> None:
        """Warn of a template that doesn't write the calls of tools: the model would learn to say nothing there."""
        calls = [message["tool_calls"] for message in messages if isinstance(message.get("tool_calls"), list)]
        for call in itertools.chain(*calls):
            function = call.get("function", call) if isinstance(call, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if isinstance(name, str) and name not in text:
                self._warn(
                    "the chat template does not write tool_calls: what the assistant calls is left out, and not"
                    " learned. Name a template that does in training.chat_template"
                )

    def _pieces(self, text: str) -> list[str]:
        """Split a text into its special tokens and what is between them."""
        if not self._tokenizer.special_tokens:
            return [text]
        return [piece for piece in self._tokenizer.special_pattern.split(text) if piece]

    def _is_special(self, piece: str) -> bool:
        return piece in self._tokenizer.special_tokens

    def _warn(self, text: str) -> None:
        if text not in self._has_warned:
            self._has_warned.add(text)
            logger.warning(text)


def _inside(said: Span, begins: np.ndarray, ends: np.ndarray, text: str) -> np.ndarray:
    """Return which tokens are in a span; raise Unclear if one is on its edge."""
    overlap = (begins < said.end) & (ends > said.start)
    on_edge = overlap & ((begins < said.start) | (ends > said.end))
    if on_edge.any():
        place = int(np.flatnonzero(on_edge)[0])
        piece = text[begins[place] : ends[place]]
        raise Unclear(f"the token {piece!r:.{_SHOWN}} is partly what the assistant says, and partly what is around it")
    return overlap


def _common_prefix(one: str, other: str) -> str:
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    return one[:same]


def _difference(one: str, other: str) -> str:
    place = len(_common_prefix(one, other))
    shown = (repr(text[place : place + _SHOWN]) if text[place:] else "its end" for text in (one, other))
    return "after {!r} there is {}, and {} in the whole conversation".format(
        one[max(0, place - _SHOWN) : place], *shown
    )
