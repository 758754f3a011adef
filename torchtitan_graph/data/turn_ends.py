"""The tokens that end a text: what a model has learned to write last, and what generation stops at."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtitan_graph.data.calls import ASKED, CALL, CITY, NAME, TOOL
from torchtitan_graph.data.chat import ChatTemplate
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.tokenizer import FileTokenizer
from torchtitan_graph.data.tokenizer_json import read_ends
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger

_ANSWER = "Good."
_SAYS = {"role": "assistant", "content": _ANSWER}
_CALLS = {"role": "assistant", "content": ""}
_RESULT = {"role": "tool", "tool_call_id": "call00001", "name": NAME, "content": "Sunny."}


def ends_of_texts(reading: RowFormat, folders: Iterable[Path | None] = ()) -> list[int]:
    """Return the ids that end a text, each once: those listed in the folders' generation_config.json, those that end a
    turn of the assistant by the chat template, if there is one, and the one that ends a document.

    A template that can't be read, such as a file that is gone, is replaced by the tokenizer's own with a warning.

    Raises UserError if another file can't be read, or lists something else than ids.
    """
    tokenizer = reading.tokenizer
    assert tokenizer is not None, "texts of token ids"
    ends = [end for folder in folders if folder is not None for end in read_ends(folder)]
    if find_spec("transformers"):  # without it nothing renders a template, so nothing was trained by one
        ends += _template_ends(reading)
    return [*dict.fromkeys([*ends, tokenizer.eos_id])]


def _template_ends(reading: RowFormat) -> list[int]:
    if not reading.has_template:
        return []
    reading = dataclasses.replace(reading, chat_date=reading.chat_date or "2000-01-01")  # any day ends alike
    try:
        template = reading.template
        if reading.chat_template is not None:
            template.check_syntax()
    except UserError as error:
        if reading.chat_template is None:
            raise
        logger.warning(f"{error}. Texts end as by the tokenizer's own files")
        return _template_ends(dataclasses.replace(reading, chat_template=None, chat_template_kwargs={}))
    return turn_ends(template, reading.tokenizer)  # type: ignore[arg-type]  # only files have templates


def turn_ends(template: ChatTemplate, tokenizer: FileTokenizer) -> list[int]:
    """Return the ids of the tokens that end what the assistant says: an answer, and calls of tools.

    That is the token after an answer, or at the end of all calls; where a template writes none after the last turn, the
    token that the next turn begins with. A template that refuses these small conversations has none.
    """
    ids = {token.content: number for number, token in tokenizer.added_tokens().items() if token.content.strip()}
    special = {text: number for text, number in ids.items() if text in tokenizer.special_tokens}
    found = [_first(_after(template, None, _SAYS), ids)]
    if found == [None]:
        found = [_first(_after(template, None, _SAYS, ASKED), ids)]
    for arguments in ({"city": CITY}, json.dumps({"city": CITY})):  # templates take one or the other
        calls = {**_CALLS, "tool_calls": [{**CALL, "function": {"name": NAME, "arguments": arguments}}]}
        end = _last(_after(template, [TOOL], calls), special)
        if end is None and tokenizer.special_tokens:  # tokens that are not special may be between two calls
            rest = tokenizer.special_pattern.search(_after(template, [TOOL], calls, _RESULT))
            end = special.get(rest[0]) if rest else None
        found.append(end)
    return [*dict.fromkeys(end for end in found if end is not None)]


def _after(template: ChatTemplate, tools: list[Any] | None, turn: dict[str, Any], *following: dict[str, Any]) -> str:
    """Return what a template writes after the last word of a turn; "" if it refuses the conversation or the turn."""
    try:
        text, _ = template.render([ASKED, turn, *following], tools)
    except UserError:
        return ""
    return text.rpartition(CITY if tools else _ANSWER)[2] if (CITY if tools else _ANSWER) in text else ""


def _first(text: str, ids: Mapping[str, int]) -> int | None:
    """Return the id of the token that a text begins with after white space, None if it does not begin with one."""
    text = text.lstrip()
    return ids.get(max((token for token in ids if text.startswith(token)), key=len, default=""))


def _last(text: str, ids: Mapping[str, int]) -> int | None:
    """Return the id of the token that a text ends with before white space, None if it does not end with one."""
    text = text.rstrip()
    return ids.get(max((token for token in ids if text.endswith(token)), key=len, default=""))
