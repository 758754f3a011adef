"""The messages of a conversation as files hold them, and as chat templates take them."""

import difflib
from collections.abc import Mapping
from typing import Any

from torchtitan_graph.errors import UserError, listed

_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool",
}  # fmt: skip
_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")


def messages_of(found: Any, where: str) -> list[dict[str, Any]]:
    """Return the messages of a conversation as templates take them: with `role` and `content`, and further keys as they
    are. The older form has `from` and `value`. Parts of text become one text; keys that are null are dropped.

    Raises UserError for anything else.
    """
    if not isinstance(found, list) or not found:
        raise UserError(f"{where}: a conversation is a list of messages, not {_said(found)}")
    return [_message(message, f"{where}, message {number}") for number, message in enumerate(found, 1)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f'{where}: is {_said(message)}; a message is such as {{"role": "user", "content": "..."}}')
    message = {key: value for key, value in message.items() if value is not None}
    if "role" not in message and "from" in message:
        sender = message.pop("from")
        role = _ROLES.get(str(sender).lower())
        message = {"role": role, "content": message.pop("value", None), **message}
        if role is None:
            raise UserError(f"{where}: from is {_said(sender)}; legal are {', '.join(_ROLES)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _KNOWN_ROLES:
        near = difflib.get_close_matches(str(role), _KNOWN_ROLES, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; legal are {', '.join(_KNOWN_ROLES)}"
        raise UserError(f"{where}: role is {_said(role)}{hint}")
    if "content" in message:
        message["content"] = _text_of(message["content"], where)
    elif "tool_calls" not in message and not (message.keys() & {"thinking", "reasoning_content", "reasoning"}):
        raise UserError(f"{where}: has no content; its keys are {listed(list(map(str, message)))}")
    return message


def _text_of(content: Any, where: str) -> str:
    if isinstance(content, str):
        # JSON can contain half a surrogate pair, which no encoding of text can.
        return content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if not isinstance(content, list):
        raise UserError(f"{where}: content is {_said(content)}; it must be text, or a list of parts of text")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        text = part if isinstance(part, str) else part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise UserError(f"{where}: a part of its content is {_said(kind or part)}, and models here read text only")
        texts.append(_text_of(text, where))
    return "".join(texts)


def _said(found: Any) -> str:
    return "null" if found is None else f"{found!r:.80}"
