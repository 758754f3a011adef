"""A conversation with a model, on a terminal."""

from __future__ import annotations

import dataclasses
import datetime
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.tokenizer import FileTokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.generate.generation import Options, generate
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.parallel.agree import on_rank_0

HELP = "/reset starts again, /system TEXT sets the system prompt and starts again, Ctrl-C stops an answer, Ctrl-D ends"


class Chat:
    """A conversation, rendered for the model by the chat template that it was trained with, or its tokenizer's.

    On several ranks all run it together: rank 0 reads and prints.

    Raises:
        UserError: the tokenizer has no chat template.
    """

    def __init__(self, model: Decoder, reading: RowFormat, options: Options, device: torch.device):
        self._template = dataclasses.replace(reading, chat_date=datetime.date.today().isoformat()).template
        assert isinstance(reading.tokenizer, FileTokenizer), "others have no template"
        self._model, self._tokenizer, self._device, self._options = model, reading.tokenizer, device, options
        self._messages: list[dict[str, Any]] = []

    def run(self, system: str = "") -> None:
        """Talk until the input ends."""
        self._begin(system)
        while (line := on_rank_0(_read)) is not None:
            command, _, rest = line.partition(" ")
            if command in ("/reset", "/system"):
                self._begin(system := rest.strip() if command == "/system" else system)
            elif command.startswith("/"):
                _print(f"{command}: no command; {HELP}\n")
            elif line.strip():
                self._reply(line)

    def _begin(self, system: str) -> None:
        self._messages = [{"role": "system", "content": system}] if system else []

    def _reply(self, line: str) -> None:
        """Print the answer to a line. Without one the line is no part of the conversation."""
        asked, said = [*self._messages, {"role": "user", "content": line}], ""
        try:
            for new in self._answer(asked):
                said += new
                _print(new)
        except KeyboardInterrupt:
            pass  # what was said of it stays
        except UserError as error:
            _print(f"{error}; /reset starts again")
        _print("\n")
        if said:
            self._messages = [*asked, {"role": "assistant", "content": said.strip()}]

    def _answer(self, asked: list[dict[str, Any]]) -> Iterator[str]:
        text, _ = self._template.render(asked, prompt=True)
        tokens, _ = self._tokenizer.encode_marked(text)  # the template has written the tokens that begin a text
        for step in generate(self._model, self._tokenizer, [tokens], self._options, self._device):
            yield step[0][1]


def _read() -> str | None:
    """Return the user's next line, None at the end."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            return input(prompt)
        except EOFError:
            return None
        except KeyboardInterrupt:
            print("\n" + HELP)


def _print(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, end="", flush=True)
