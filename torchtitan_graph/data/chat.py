"""Conversations to tokens: rendered by a tokenizer's chat template, with the targets that the loss is computed on."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from torchtitan_graph.data.document import Contexts, Tokens
from torchtitan_graph.data.messages import LEARNED
from torchtitan_graph.data.rendering import Renderer, Span, defaults_of
from torchtitan_graph.data.tokenizer_json import NAMED
from torchtitan_graph.data.turns import Context, Turn, Unclear, context_of, difference, last_special, opened_reasoning
from torchtitan_graph.errors import UserError, listed


class ChatTemplate(Renderer):
    """Renders conversations as `Renderer`, and finds the assistant's turns in the tokens."""

    def tokens(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[Any] | None,
        loss_on: str,
        skip: bool,
        split: bool = True,
    ) -> Tokens | Contexts:
        """Return a conversation as `loss_on` has its targets; with `skip` unclear turns have none.

        A turn that the whole doesn't render as it would be generated gets a context of its own, or is unclear without
        `split`. One whose LEARNED is False has no targets.

        Raises UserError if the template refuses the conversation, or a turn is unclear.
        """
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        chosen = turns[-1:] if loss_on == "last_assistant" else turns
        chosen = [number for number in chosen if messages[number].get(LEARNED, True)]
        messages = [{key: value for key, value in message.items() if key != LEARNED} for message in messages]
        self._warn_of_special_tokens(messages)
        text, marks = self.render(messages, tools)
        self._warn_of_calls_left_out(messages, text)
        self._warn_of_tools_left_out(messages, tools, text)
        whole = Context(self._tokenizer, text)
        if loss_on == "all":
            self._learn_all(whole, messages, tools, [number for number in turns if number not in chosen])
            return _packed([whole], whole)
        if marks:
            self._learn_marked(whole, marks, turns, chosen, lambda: self._before(messages[: turns[-1]], tools))
            self._compare_marks(whole, messages, tools, chosen)
            return _packed([whole], whole)
        return _packed(self._contexts(whole, messages, tools, chosen, skip, split), whole)

    def _contexts(
        self,
        whole: Context,
        messages: Sequence[dict[str, Any]],
        tools: list[Any] | None,
        chosen: list[int],
        skip: bool,
        split: bool,
    ) -> list[Context]:
        """Return the fewest contexts in which the turns are learned, in their order. See Note [Targets of a
        conversation]."""
        found = [whole]
        for number in reversed(chosen):
            try:
                turn = self._turn(whole, messages, tools, number)
                if not turn.ends and turn.text == whole.text:
                    found.clear()  # the next turn's first token ends it, which only a context of its own gets
                if any(context.learn(turn) for context in found):
                    continue
                found = [context for context in found if context.is_target.any()]
                if not split and (found or number + 1 < len(messages)):
                    how = difference(turn.text, whole.text, "in the whole conversation")
                    raise Unclear(f"it is rendered another way when more follows: {how}")
                closing = "" if turn.ends else self._closing(turn, messages[: number + 1], tools)
                found.append(context_of(turn, closing, self._tokenizer))
            except Unclear as error:
                if not skip:
                    raise UserError(
                        f"message {number + 1}, by the assistant: {error}. {self._remedy(split)}"
                    ) from error
        return [context for context in reversed(found) if context.is_target.any()]

    def _remedy(self, split: bool) -> str:
        read = sorted(self._read_arguments() - set(NAMED))
        ways = [] if split else ["choose training.split_turns = 'auto'"]
        if read:
            values = [
                f"{name} = {value}" for text in self.templates.values() for name, value in defaults_of(text).items()
            ]
            by_itself = (
                f"; where none is given, {self._place} sets {listed([*dict.fromkeys(values)])}" if values else ""
            )
            ways.append(
                "give an argument of the template in training.chat_template_kwargs (it reads"
                f" {listed(read)}{by_itself})"
            )
        ways += [
            "name a template in training.chat_template whose generation prompt is how its answers begin, or that marks"
            " them by {% generation %}",
            "or choose training.unclear_turns = 'skip': such a turn is not learned, and a conversation without another"
            " is left out",
        ]
        advice = ", ".join(ways)
        return advice[0].upper() + advice[1:]

    def _turn(self, whole: Context, messages: Sequence[dict[str, Any]], tools: list[Any] | None, number: int) -> Turn:
        """Return a turn as it would be generated; raise Unclear if that can't be known."""
        try:
            before, _ = self.render(messages[:number], tools, prompt=True)
            is_last = number + 1 == len(messages)
            after = whole.text if is_last else self.render(messages[: number + 1], tools)[0]
        except UserError as error:
            raise Unclear(f"what comes before it can't be rendered alone: {error}") from error
        turn = Turn.of(before, after, self._tokenizer, self._close)
        if turn.prompt != before:
            self._warn_of_empty_reasoning(turn, before, messages[:number], tools)
        return turn

    @functools.cached_property
    def _close(self) -> str:
        """What the template writes behind the token that ends an answer, if that is the last message; often nothing."""
        said = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]
        try:
            text, longer = self.render(said)[0].rstrip(), self.render([*said, said[0]])[0]
        except UserError:
            return ""
        end = text
        while token := last_special(end, self._tokenizer):
            if longer.startswith(end):
                return text[len(end) :]
            end = end[: -len(token)].rstrip()
        return ""

    def _closing(self, turn: Turn, messages: Sequence[dict[str, Any]], tools: list[Any] | None) -> str:
        """Return the token with which the next turn begins, if it ends this one, which has no end of its own."""
        role = "tool" if messages[-1].get("tool_calls") else "user"
        try:
            longer, _ = self.render([*messages, {"role": role, "content": "."}], tools)
        except UserError:
            longer = turn.text
        following = Context(self._tokenizer, longer)
        place = following.num_tokens(turn.text)
        if place is None or not following.is_special(place):
            self._warn(
                "the chat template ends no turn of the assistant by a special token: the model won't learn to stop"
            )
            return ""
        token = self._tokenizer.decode_all([int(following.ids[place])])
        if int(following.ids[place]) in self._ends:
            return token
        self._warn(
            f"the chat template ends a turn of the assistant by {token!r}, the first token of the next turn; so the"
            " model won't learn to stop after the last turn. List that token's id in eos_token_id of"
            f" {self._tokenizer.folder / 'generation_config.json'}, if it ends what the model says"
        )
        return ""

    def _learn_all(
        self, whole: Context, messages: Sequence[dict[str, Any]], tools: list[Any] | None, but: list[int]
    ) -> None:
        """Make every token a target, but those of some turns; raise UserError if they can't be known."""
        whole.is_target[:] = True
        for number in but:
            try:
                span = whole.span(self._turn(whole, messages, tools, number))
                if span is None:
                    raise Unclear("it is rendered another way in the whole conversation")
                whole.is_target[span] = False
            except Unclear as error:
                raise UserError(
                    f"message {number + 1}, by the assistant, is not to be learned, and training.loss_on = 'all' learns"
                    f" all that is rendered; which tokens it has can't be known: {error}. Choose training.loss_on ="
                    " 'assistant'"
                ) from error

    def _learn_marked(
        self, whole: Context, marks: list[Span], turns: list[int], chosen: list[int], before: Callable[[], str]
    ) -> None:
        """Make targets of what a template marks as the assistant's words in some turns, and of nothing else.

        before: returns the text of all messages before the last turn.
        """
        if len(marks) == len(turns):
            marks = [mark for mark, number in zip(marks, turns, strict=True) if number in chosen]
        elif chosen == turns[-1:] != turns and whole.text.startswith(text := before()):
            marks = [mark for mark in marks if mark.start >= len(text)]
        elif chosen != turns and chosen:
            raise UserError(
                f"the chat template marks {len(marks)} parts by {{% generation %}} in {len(turns)} turns of the"
                " assistant, so which of them are not to be learned can't be known: take the marks out of the template"
            )
        whole.is_target[:] = False
        for start, end in marks if chosen else ():
            whole.is_target |= whole.overlap(start, end)

    def _before(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None) -> str:
        """Return the text of messages without a generation prompt; raise UserError if they can't be rendered alone."""
        return self.render(messages, tools)[0] if messages else ""

    def _compare_marks(
        self, whole: Context, messages: Sequence[dict[str, Any]], tools: list[Any] | None, chosen: list[int]
    ) -> None:
        """Warn of a template that marks other tokens than the turns have which the whole renders as they would be
        generated."""
        by_prefix, has_all = Context(self._tokenizer, whole.text), True
        for number in chosen:
            try:
                has_all &= by_prefix.learn(self._turn(whole, messages, tools, number))
            except Unclear:
                has_all = False
        differs = whole.is_target != by_prefix.is_target
        if not has_all:  # what else is marked may be the other turns
            differs &= by_prefix.is_target
        differ = np.flatnonzero(differs)
        if len(differ):
            what = "marks" if whole.is_target[differ[0]] else "does not mark"
            token = self._tokenizer.decode_all([int(whole.ids[differ[0]])])
            self._warn(
                f"the chat template {what} {token!r} as what the assistant says by {{% generation %}}, other than what"
                " follows the generation prompt; the template is followed"
            )

    def _warn_of_special_tokens(self, messages: Sequence[dict[str, Any]]) -> None:
        """Warn of messages that spell special tokens: the rendered text holds both, and they are the same there."""
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

    def _warn_of_tools_left_out(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None, text: str) -> None:
        """Warn of a template that doesn't write tools: its text is the same without them. The first conversation that
        has some is looked at."""
        if not tools or self._has_seen_tools:
            return
        self._has_seen_tools = True
        with contextlib.suppress(UserError):
            if self.render(messages)[0] == text:
                self._warn(
                    "the chat template does not write tools: the model is given none. Name a template that does in"
                    " training.chat_template"
                )

    def _warn_of_empty_reasoning(
        self, turn: Turn, prompt: str, messages: Sequence[dict[str, Any]], tools: list[Any] | None
    ) -> None:
        """Warn of an answer after an empty block of reasoning that is not in the generation prompt, with the argument
        of the template that writes it there."""
        if self._has_seen_empty_reasoning:
            return
        self._has_seen_empty_reasoning = True
        tag = opened_reasoning(prompt)
        what = f"opens reasoning by {tag}" if tag else "has no block of reasoning"
        way = "name a template in training.chat_template with another generation prompt"
        for name in sorted(self._read_arguments() - set(NAMED)):
            with contextlib.suppress(UserError):
                if self._rendered(messages, tools, True, {name: False})[0] == turn.prompt:
                    way = f"set training.chat_template_kwargs = {{{name} = false}}, and chat with the export so too"
                    break
        self._warn(
            f"the chat template's generation prompt {what}, and an answer without any is rendered after an empty block:"
            f" chats begin where nothing is learned. For chats without reasoning {way}"
        )


def _packed(contexts: list[Context], whole: Context) -> Tokens | Contexts:
    """Return contexts as a document; the whole conversation without targets if there are none."""
    found = [Tokens(context.ids, context.is_target) for context in contexts or [whole]]
    return found[0] if len(found) == 1 else Contexts(tuple(found))
