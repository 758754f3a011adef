"""The text of a sequence that grows by a token at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torchtitan_graph.data.tokenizer import Tokenizer

_BEFORE = 8  # tokens of the prompt that a decoder sees before the first new one: some drop a text's first space
INCOMPLETE = "\ufffd"  # the end of a decoded text whose last character lacks bytes


class Text:
    """A continuation of a prompt, in tokens and as text.

    tokens  the new ones, without the one that ended it
    text    of these, up to where a stop string begins
    ended   why it has ended: "eos", a token that ends a text; "stop", a stop string; "length"; None if it goes on
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        ends: Collection[int] = (),
        stops: Sequence[str] = (),
    ):
        self.tokens: list[int] = []
        self.text, self.ended = "", None if max_new_tokens > 0 else "length"
        self._tokenizer, self._most, self._ends, self._stops = tokenizer, max_new_tokens, frozenset(ends), stops
        # Tokens whose text is known, as far as decoding goes on from there, and the others.
        self._known, self._new = list(prompt[-_BEFORE:]), list[int]()
        self._decoded = ""  # all text, of which `text` lacks the end that may begin a stop string

    def push(self, token: int) -> str:
        """Append a token, and return what of the text is new and final. Characters and stop strings are whole."""
        assert self.ended is None, "nothing follows an end"
        if token in self._ends:
            return self._end("eos")
        self.tokens.append(token)
        self._new.append(token)
        self._decoded += self._take()
        found = [place for stop in self._stops if (place := self._decoded.find(stop, len(self.text))) >= 0]
        if found:
            self._decoded = self._decoded[: min(found)]
            self._new = []
            return self._end("stop")
        if len(self.tokens) == self._most:
            return self._end("length")
        return self._show(len(self._decoded) - _begun(self._decoded, self._stops, len(self.text)))

    def end(self, why: str) -> str:
        """End the text, and return what of it was held back."""
        return self._end(why)

    def _end(self, why: str) -> str:
        self.ended = why
        self._decoded += self._take(is_last=True)
        return self._show(len(self._decoded))

    def _show(self, end: int) -> str:
        new, self.text = self._decoded[len(self.text) : end], self._decoded[:end]
        return new

    def _take(self, is_last: bool = False) -> str:
        """Return the text of the new tokens, "" while their last character lacks bytes. A decoder needs the tokens
        before them: it may write a space between two."""
        decode = self._tokenizer.decode
        before, all_ = decode(self._known), decode(self._known + self._new)
        if not self._new or (all_.endswith(INCOMPLETE) and not is_last):
            return ""
        self._known, self._new = self._new, []
        return all_[len(before) :]


def _begun(text: str, stops: Sequence[str], shown: int) -> int:
    """Return the length of the longest end of a text that may begin a stop string."""
    most = min(max(map(len, stops), default=1) - 1, len(text) - shown)
    return next((n for n in range(most, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0)
