"""The turns of an assistant in rendered conversations: the text that the model is given, and the tokens it learns."""

import functools
import itertools
import re
from typing import NamedTuple

import numpy as np

from torchtitan_graph.data.tokenizer import FileTokenizer

# Note [Targets of a conversation]
# What an assistant says begins where the rendering of all before it, with the generation prompt, ends: that text is
# what the model is given when it answers. It ends where the rendering of the conversation up to and with it ends. So a
# turn's prompt is a beginning of its text, else the turn is unclear. A turn is learned as it would be generated: after
# the tokens of its prompt alone. A longer conversation serves for it only if that begins with the same tokens, up to a
# token that ends the turn; a template that drops earlier reasoning, or ends the last turn in its own way, gives the
# turn a context of its own. An empty reasoning block at the beginning of an answer is supplied by the generation prompt
# of a model that does not reason, or not at all; it is never learned.
_NAME = r"(think|thinking|reasoning|seed:think|mm:think)"
_OPEN_REASONING = re.compile(rf"\s*(<{_NAME}>|\[THINK\]|<\|channel>thought)\s*\Z")
EMPTY_REASONING = re.compile(
    rf"\s*(<{_NAME}>\s*</\2>|\[THINK\]\s*\[/THINK\]|<\|channel>thought\s*<channel\|>)\n{{0,2}}"
)
_SHOWN = 40  # characters of a text in messages


class Unclear(Exception):
    """Which tokens the assistant says in a turn can't be known."""


class Turn(NamedTuple):
    """A turn of the assistant as it would be generated.

    prompt  what the model is given
    text    that and the answer, as the conversation up to and with it is rendered
    ends    where it ends by a special token: the text up to that, and up to the one before what closes a conversation
    """

    prompt: str
    text: str
    ends: list[str]

    @classmethod
    def of(cls, prompt: str, text: str, tokenizer: FileTokenizer, close: str = "") -> "Turn":
        """Return the turn between two renderings; raise Unclear if the generation prompt is not how it begins.

        close: what the template writes after a turn that is the last, behind the token that ends it.
        """
        opened = _OPEN_REASONING.search(prompt)
        begin = opened.start() if opened else len(prompt)
        empty = EMPTY_REASONING.match(text, begin)
        if empty and text.startswith(prompt[:begin]):  # a block that the prompt opens may be closed at once
            prompt = text[: max(len(prompt), empty.end())] if text.startswith(prompt) else text[: empty.end()]
        if not text.startswith(prompt):
            how = difference(prompt, text, "where it is answered")
            raise Unclear(f"the generation prompt is not how it begins: {how}")
        end = text.rstrip()
        ends = [end] if last_special(end[len(prompt) :], tokenizer) else []
        if ends and close and end.endswith(close):
            ends.append(end[: -len(close)])
        return cls(prompt, text, ends)


def opened_reasoning(prompt: str) -> str:
    """Return the tag by which a generation prompt opens reasoning at its end, "" if it doesn't."""
    found = _OPEN_REASONING.search(prompt)
    return found[1] if found else ""


def last_special(text: str, tokenizer: FileTokenizer) -> str:
    """Return the special token that a text ends in, "" if it ends in none."""
    pieces = tokenizer.special_pattern.split(text) if tokenizer.special_tokens else []
    return pieces[-2] if len(pieces) > 1 and not pieces[-1] else ""


class Context:
    """A text with its tokens, and which of them are learned.

    Args:
        parts: of the text, each tokenised by itself.
    """

    def __init__(self, tokenizer: FileTokenizer, *parts: str) -> None:
        self._tokenizer, self.text = tokenizer, "".join(parts)
        encoded = [tokenizer.encode_marked(part) for part in parts]
        places = itertools.accumulate(map(len, parts), initial=0)
        self.ids = np.array([i for ids, _ in encoded for i in ids], np.int64)
        spans = [
            (place + begin, place + end)
            for place, (_, found) in zip(places, encoded, strict=False)
            for begin, end in found
        ]
        self._begins, self._ends = np.array(spans, np.int64).reshape(-1, 2).T
        self._special = np.flatnonzero(np.isin(self.ids, tokenizer.special_ids))
        self.is_target = np.zeros(len(self.ids), bool)

    def num_tokens(self, beginning: str) -> int | None:
        """Return how many tokens a beginning of the text has; None for another text, or if its tokens alone are not
        the first ones of the whole."""
        if not self.text.startswith(beginning):
            return None
        # Texts on both sides of a special token are tokenised separately: what is before the last one is equal.
        place = int(np.searchsorted(self._begins[self._special], len(beginning))) - 1
        first = int(self._special[place]) if place >= 0 else 0
        ids = _ids(self._tokenizer, beginning[self._begins[first] if place >= 0 else 0 :])
        return first + len(ids) if tuple(self.ids[first : first + len(ids)]) == ids else None

    def span(self, turn: Turn) -> slice | None:
        """Return the tokens of what is learned of a turn, if the text has it as it would be generated."""
        start = self.num_tokens(turn.prompt)
        ends = (self.num_tokens(text) for text in turn.ends or [turn.text])
        end = next((end for end in ends if end is not None), None)
        if start is None or end is None:
            return None
        return slice(start, end + (not turn.ends and self.is_special(end)))  # else the next turn's first token ends it

    def overlap(self, start: int, end: int) -> np.ndarray:
        """Return which tokens have some of these characters of the text."""
        return (self._begins < self._ends) & (self._begins < end) & (self._ends > start)

    def is_special(self, place: int) -> bool:
        """Return whether there is a special token at a place."""
        return place in self._special

    def decoded(self) -> str:
        return self._tokenizer.decode_all(self.ids.tolist())

    def learn(self, turn: Turn) -> bool:
        """Make what is learned of a turn targets, and return True, if the text has it as it would be generated."""
        span = self.span(turn)
        if span is not None:
            self.is_target[span] = True
        return span is not None


def context_of(turn: Turn, closing: str, tokenizer: FileTokenizer) -> Context:
    """Return a turn's own context, in which it is learned; `closing` ends it if the template doesn't.

    Raises Unclear if the answer can't be tokenised after its prompt.
    """
    whole = Context(tokenizer, turn.text + closing)
    if whole.learn(turn):
        return whole
    # A token of the whole is partly the prompt's, and partly the answer's: the model is given the prompt's tokens.
    begin = turn.text[len(turn.prompt) :]
    parts = Context(tokenizer, turn.prompt, begin + closing)
    start = parts.num_tokens(turn.prompt) or 0
    # Some tokenizers put a space before a text, so the answer by itself would be another.
    is_same = parts.is_special(start) or parts.decoded() in (whole.text, whole.decoded())
    span = parts.span(turn) if turn.ends else slice(start, None)
    if not is_same or span is None:
        raise Unclear(
            f"this tokenizer gives {begin!r:.{_SHOWN}} other tokens after the generation prompt than by itself"
        )
    parts.is_target[span] = True
    return parts


@functools.lru_cache(1024)
def _ids(tokenizer: FileTokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode_marked(text)[0])


def difference(one: str, other: str, where: str) -> str:
    """Return a description of where two texts begin to differ."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    place = sum(1 for _ in same)
    shown = (repr(text[place : place + _SHOWN]) if text[place:] else "its end" for text in (one, other))
    return "after {!r} there is {}, and {} {}".format(one[max(0, place - _SHOWN) : place], *shown, where)
