"""The form in which a chat template takes the calls of tools: found by rendering a small conversation."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torchtitan_graph.errors import UserError

ASKED = {"role": "user", "content": "Hello."}
CITY, NAME = "Lisbon", "weather"
CALL = {"id": "call00001", "type": "function"}  # nine characters, as some templates ask for
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}}
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Return the weather.",
        "parameters": {**_PARAMETERS, "required": ["city"]},
    },
}


class Arguments(dict[str, Any]):
    """The arguments of a call as an object, with the JSON text that the row has."""

    def __init__(self, text: str, decoded: Mapping[str, Any]) -> None:
        super().__init__(decoded)
        self.text = text


class CallForm(NamedTuple):
    """How messages with calls are given to a template: `content` is added where a message has none, and arguments are
    JSON text or objects."""

    content: Mapping[str, Any]
    as_text: bool

    def apply(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message in this form."""
        if not isinstance(calls := message.get("tool_calls"), list) or not calls:
            return message
        calls = [self._call(call) for call in calls] if self.as_text else calls
        return {**self.content, **message, "tool_calls": calls}

    def _call(self, call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        if isinstance(function := call.get("function"), Mapping):
            return {**call, "function": _with_text(function)}
        return _with_text(call)


def call_form(render: Callable[[list[dict[str, Any]]], str]) -> CallForm:
    """Return the form in which a template writes the arguments of a call as JSON; the one of rows if none is.

    render: returns the text of messages, raises UserError if the template refuses them.
    """
    calls = [{**CALL, "function": {"name": NAME, "arguments": {"city": CITY}}}]
    contents: Sequence[Mapping[str, Any]] = ({}, {"content": None}, {"content": ""})
    for form in (CallForm(content, as_text) for content in contents for as_text in (False, True)):
        try:
            text = render([ASKED, form.apply({"role": "assistant", "tool_calls": calls})])
        except UserError:
            continue
        if CITY in text and "{'city'" not in text and "None" not in text:
            return form
    return CallForm({}, False)


def _with_text(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if not isinstance(arguments, Mapping):
        return dict(function)
    text = getattr(arguments, "text", "").strip() or json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": text}
