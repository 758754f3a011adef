"""Conversations rendered by a tokenizer's chat template."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_graph.data.tokenizer import FileTokenizer, Tokenizer
from torchtitan_graph.data.tokenizer_json import read_templates
from torchtitan_graph.errors import UserError
from torchtitan_graph.patience import refuse_unreadable
from torchtitan_graph.small_files import read_small


class ChatTemplate:
    """Renders conversations by a Jinja template of a tokenizer.

    Args:
        file: with another template; not set: the tokenizer's own.
        date: YYYY-MM-DD, for templates that write the day.

    Raises UserError if there is no template, or the tokenizer has none of the tokens that templates are made of.
    """

    def __init__(self, tokenizer: Tokenizer, file: str | None = None, date: str | None = None) -> None:
        if not isinstance(tokenizer, FileTokenizer):
            raise UserError("bytes have no chat template; take a model with a tokenizer of its own")
        self._tokenizer, self._date = tokenizer, date
        if file is not None:
            with refuse_unreadable(f"chat_template = {file!r}"):
                self._templates = {"default": read_small(Path(file).expanduser()).decode(errors="replace")}
        else:
            self._templates = read_templates(tokenizer.folder)
        if "default" not in self._templates:
            raise UserError(
                f"{tokenizer.folder}: has no chat template: no chat_template.jinja, and no chat_template in"
                " tokenizer_config.json"
            )

    def render(
        self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None, prompt: bool = False
    ) -> tuple[str, Any]:
        """Return a conversation's text, and what a template marks as the assistant's words; with `prompt` the text asks
        for the next answer. Raises UserError if the template refuses it."""
        from torchtitan_graph.transformers_private import render_chat  # imports transformers, which takes seconds

        template = self._templates.get("tool_use" if tools else "default", self._templates["default"])
        try:
            return render_chat(template, list(messages), tools, prompt, self._tokenizer.named_tokens, self._strftime)
        except UserError:
            raise
        except Exception as error:  # of Jinja, or of the code in the template
            raise UserError(f"the chat template refuses it: {type(error).__name__}: {error}") from error

    def _strftime(self, form: str) -> str:
        import datetime

        return datetime.datetime.fromisoformat(self._date or "").strftime(form)
