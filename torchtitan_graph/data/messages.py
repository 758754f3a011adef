"""The messages of a conversation as files hold them, and as chat templates take them."""

import difflib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from torchtitan_graph.data.bad_rows import BadRow
from torchtitan_graph.data.calls import Arguments
from torchtitan_graph.errors import listed

# Note [Which turns are learned]
# A message may say whether it is learned: `weight`, 1 or 0 (OpenAI, Mistral); `train` or `training`, true or false
# (axolotl); `masked`, true if it is not. What a turn of the assistant says is kept as its key LEARNED, False or absent,
# which ChatTemplate.tokens obeys; no file has such a key. No other turn is ever learned, so that one asks for it is an
# error.
LEARNED = "\0learned"
_SAYS_LEARNED = {"weight": 1, "train": True, "training": True, "masked": False}
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool",
}  # fmt: skip
_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:.*\]\s*\Z""", re.DOTALL)
_REASONING = ("thinking", "reasoning_content", "reasoning")


def messages_of(found: Any, where: str, learnable: Collection[str] = ("assistant",)) -> list[dict[str, Any]]:
    """Return the messages of a conversation as templates take them: with `role` and `content`, and further keys as they
    are. The older form has `from` and `value`. Parts of text become one text; keys that are null are dropped; arguments
    of tools that are JSON text become objects. See Note [Which turns are learned] for LEARNED.

    learnable: the roles whose turns a row may ask to be learned, and may not leave empty.

    Raises BadRow for anything else.
    """
    if isinstance(found, str) and found.lstrip().startswith("["):
        found = parse_list(found, where, "messages")
    if not isinstance(found, list) or not found:
        raise BadRow("no_value", f"{where}: a conversation is a list of messages, not {_said(found)}")
    return [_message(message, f"{where}, message {number}", learnable) for number, message in enumerate(found, 1)]


def with_system(messages: list[dict[str, Any]], system: Any, where: str) -> list[dict[str, Any]]:
    """Return a conversation with a row's system prompt as its first message; raise BadRow if it has another."""
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise BadRow("no_value", f"{where}: system is {_said(system)}; it must be text")
    first = messages[0] if messages else {}
    if first.get("role") not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if first.get("content") != system:
        raise BadRow("wrong_message", f"{where}: its system and its first message are two different system prompts")
    return messages


def tools_of(tools: Any, where: str) -> list[Any] | None:
    """Return the tools of a conversation, a list or the JSON text of one; None if there are none."""
    if isinstance(tools, str) and tools.strip():
        tools = parse_list(tools, where, "tools")
    if not tools or isinstance(tools, str):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("no_value", f"{where}: tools must be a list of objects, each the JSON schema of a tool")
    return tools


def parse_list(text: str, where: str, what: str) -> Any:
    """Return the value of a JSON text in place of a list; raise BadRow if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = ""
        if text.lstrip()[:2] in ("[{", "['") and "'" in text:
            hint = "; lists in Python's own notation are not JSON, write them by json.dumps"
        raise BadRow("no_value", f"{where}: {what} is text, and no JSON: {error}{hint}") from error


def as_messages(found: Any, where: str, what: str) -> Any:
    """Return the messages that a text holds as a JSON list, which is how tables hold one; anything else as it is.

    A text is one of messages if it is a list of objects that each have a role, or `from` and `value`. Raises BadRow for
    a text that looks like messages and is no JSON.
    """
    if not isinstance(found, str) or not found.lstrip().startswith("["):
        return found
    try:
        parsed = json.loads(found)
    except (ValueError, RecursionError):
        return parse_list(found, where, what) if _LIKE_MESSAGES.match(found) else found
    is_messages = isinstance(parsed, list) and parsed and all(map(_is_message, parsed))
    return parsed if is_messages else found


def _is_message(found: Any) -> bool:
    return isinstance(found, dict) and ("role" in found or {"from", "value"} <= found.keys())


def _message(message: Any, where: str, learnable: Collection[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRow(
            "wrong_message",
            f'{where}: is {_said(message)}; a message is such as {{"role": "user", "content": "..."}}',
        )
    nulls = [key for key, value in message.items() if value is None]
    message = {key: value for key, value in message.items() if value is not None}
    if "role" not in message and "from" in message:
        sender = message.pop("from")
        role = _ROLES.get(str(sender).lower())
        message = {"role": role, "content": message.pop("value", None), **message}
        if role is None:
            raise BadRow("wrong_message", f"{where}: from is {_said(sender)}; legal are {', '.join(_ROLES)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _KNOWN_ROLES:
        near = difflib.get_close_matches(str(role), _KNOWN_ROLES, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; legal are {', '.join(_KNOWN_ROLES)}"
        raise BadRow("wrong_message", f"{where}: role is {_said(role)}{hint}")
    if "content" in message:
        message["content"] = _text_of(message["content"], where)
    elif not message.get("tool_calls") and not any(message.get(key) for key in _REASONING):
        if "content" in nulls:
            raise BadRow("wrong_message", f"{where}: its content is null, and it has neither tool_calls nor reasoning")
        raise BadRow("wrong_message", f"{where}: has no content; its keys are {listed(list(map(str, message)))}")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], where)
    message = _with_learned(message, where, learnable)
    _refuse_empty(message, where, learnable)
    return message


def _with_learned(message: dict[str, Any], where: str, learnable: Collection[str]) -> dict[str, Any]:
    """Return a message with LEARNED in place of what says whether it is learned."""
    said = {key: message.pop(key) for key in _SAYS_LEARNED if key in message}
    for key, value in said.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (value in (0, 1) and is_number if key == "weight" else isinstance(value, bool)):
            legal = "0 or 1" if key == "weight" else "true or false"
            raise BadRow("wrong_message", f"{where}: {key} is {_said(value)}; legal are {legal}")
    asks = {key: value == _SAYS_LEARNED[key] for key, value in said.items()}
    if len(set(asks.values())) > 1:
        raise BadRow("wrong_message", f"{where}: {' and '.join(map(repr, said))} say opposite things of its loss")
    if True in asks.values() and message["role"] not in learnable:
        key = next(iter(said))
        what = "of a prompt" if not learnable else f"by the {message['role']}"
        raise BadRow(
            "wrong_message",
            f"{where}: {key} = {json.dumps(said[key])} asks that a message {what} is learned, and only what the"
            " assistant answers is; take the key out",
        )
    return {**message, LEARNED: False} if False in asks.values() and message["role"] == "assistant" else message


def _refuse_empty(message: dict[str, Any], where: str, learnable: Collection[str]) -> None:
    """Raise BadRow for a learned answer without any word: it would teach the model to end at once."""
    if message["role"] not in learnable or message.get(LEARNED) is False or message.get("tool_calls"):
        return
    if not any(str(message.get(key, "")).strip() for key in ("content", *_REASONING)):
        raise BadRow("no_answer", f"{where}: is an empty answer, which would teach the model to end at once")


def _tool_calls(calls: Any, where: str) -> Any:
    """Return calls of tools with their arguments as objects: templates write those as JSON, text a second time."""
    if not isinstance(calls, list):
        raise BadRow("wrong_message", f"{where}: tool_calls is {_said(calls)}; it must be a list of calls")
    return [_call(call, where) for call in calls]


def _call(call: Any, where: str) -> Any:
    if not isinstance(call, Mapping):
        raise BadRow("wrong_message", f"{where}: a call in tool_calls is {_said(call)}; it must be an object")
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _with_arguments(function, where)}
    return _with_arguments(call, where)


def _with_arguments(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return dict(function)
    try:
        decoded = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise BadRow("wrong_message", f"{where}: the arguments of a call are text, and no JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise BadRow("wrong_message", f"{where}: the arguments of a call are {_said(decoded)}; they must be an object")
    return {**function, "arguments": Arguments(arguments, decoded)}


def _text_of(content: Any, where: str) -> str:
    if isinstance(content, str):
        # JSON can contain half a surrogate pair, which no encoding of text can.
        return content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if not isinstance(content, list):
        raise BadRow(
            "wrong_message", f"{where}: content is {_said(content)}; it must be text, or a list of parts of text"
        )
    texts = []
    for number, part in enumerate(content, 1):
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        text = part if isinstance(part, str) else part.get("text") if kind == "text" else None
        if isinstance(text, str):
            texts.append(_text_of(text, where))
        elif kind == "text":
            raise BadRow("not_text", f"{where}: the text of part {number} of its content is {_said(text)}")
        else:
            raise BadRow(
                "not_text", f"{where}: a part of its content is {_said(kind or part)}, and models here read text only"
            )
    return "".join(texts)


def _said(found: Any) -> str:
    return "null" if found is None else f"{found!r:.80}"
