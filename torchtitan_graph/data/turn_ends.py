"""The tokens that end a text: what a model has learned to write last, and what generation stops at."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtitan_graph.data.chat import ChatTemplate
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.tokenizer import FileTokenizer
from torchtitan_graph.data.tokenizer_json import read_ends, read_templates
from torchtitan_graph.errors import UserError

_ASKED = {"role": "user", "content": "Hello."}
_ANSWER, _CITY, _NAME = "Good.", "Lisbon", "weather"
_SAYS = {"role": "assistant", "content": _ANSWER}
_CALL = {"id": "call00001", "type": "function"}  # nine characters, as some templates ask for
_CALLS = {"role": "assistant", "content": ""}
_RESULT = {"role": "tool", "tool_call_id": "call00001", "name": _NAME, "content": "Sunny."}
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Return the weather.",
        "parameters": {**_PARAMETERS, "required": ["city"]},
    },
}


def ends_of_texts(reading: RowFormat, folders: Iterable[Path | None] = ()) -> list[int]:
    """Return the ids that end a text, each once: those listed in the folders' generation_config.json, those that end a
    turn of the assistant by the chat template, if there is one, and the one that ends a document.

    Raises UserError if a file can't be read, or lists something else than ids.
    """
    tokenizer = reading.tokenizer
    assert tokenizer is not None, "texts of token ids"
    ends = [end for folder in folders if folder is not None for end in read_ends(folder)]
    # Without transformers nothing renders a template, so nothing was trained by one.
    if find_spec("transformers") and has_template(reading):
        reading = dataclasses.replace(reading, chat_date=reading.chat_date or "2000-01-01")  # any day ends alike
        ends += turn_ends(reading.template, tokenizer)  # type: ignore[arg-type]  # only files have templates
    return [*dict.fromkeys([*ends, tokenizer.eos_id])]


def has_template(reading: RowFormat) -> bool:
    """Return whether there is a chat template: the one that is named, or the tokenizer's own."""
    if not isinstance(reading.tokenizer, FileTokenizer):
        return False
    return reading.chat_template is not None or "default" in read_templates(reading.tokenizer.folder)


def turn_ends(template: ChatTemplate, tokenizer: FileTokenizer) -> list[int]:
    """Return the ids of the tokens that end what the assistant says: an answer, and calls of tools.

    That is the token after an answer, or at the end of all calls; where a template writes none after the last turn, the
    token that the next turn begins with. A template that refuses these small conversations has none.
    """
    ids = {token.content: number for number, token in tokenizer.added_tokens().items() if token.content.strip()}
    special = {text: number for text, number in ids.items() if text in tokenizer.special_tokens}
    found = [_first(_after(template, None, _SAYS), ids)]
    if found == [None]:
        found = [_first(_after(template, None, _SAYS, _ASKED), ids)]
    for arguments in ({"city": _CITY}, json.dumps({"city": _CITY})):  # templates take one or the other
        calls = {**_CALLS, "tool_calls": [{**_CALL, "function": {"name": _NAME, "arguments": arguments}}]}
        end = _last(_after(template, [_TOOL], calls), special)
        if end is None and tokenizer.special_tokens:  # tokens that are not special may be between two calls
            rest = tokenizer.special_pattern.search(_after(template, [_TOOL], calls, _RESULT))
            end = special.get(rest[0]) if rest else None
        found.append(end)
    return [*dict.fromkeys(end for end in found if end is not None)]


def _after(template: ChatTemplate, tools: list[Any] | None, turn: dict[str, Any], *following: dict[str, Any]) -> str:
    """Return what a template writes after the last word of a turn; "" if it refuses the conversation or the turn."""
    try:
        text, _ = template.render([_ASKED, turn, *following], tools)
    except UserError:
        return ""
    return text.rpartition(_CITY if tools else _ANSWER)[2] if (_CITY if tools else _ANSWER) in text else ""


def _first(text: str, ids: Mapping[str, int]) -> int | None:
    """Return the id of the token that a text begins with after white space, None if it does not begin with one."""
    text = text.lstrip()
    return ids.get(max((token for token in ids if text.startswith(token)), key=len, default=""))


def _last(text: str, ids: Mapping[str, int]) -> int | None:
    """Return the id of the token that a text ends with before white space, None if it does not end with one."""
    text = text.rstrip()
    return ids.get(max((token for token in ids if text.endswith(token)), key=len, default=""))
