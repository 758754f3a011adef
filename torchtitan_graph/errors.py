"""The error for the user, with what to change, and that of a run whose folder is another's."""

import re
from collections.abc import Sequence

_LINE, _LINES = 2000, 200  # limits of a message: characters of a line, and lines


class UserError(ValueError):
    """Error in the user's request: the message names it, what is legal, and what to do instead.

    It is shown as that message alone. Every other exception is a fault, ours or of code that we call, and keeps its
    traceback. A message may quote any file: control characters are escaped, long
    lines are cut in their middle, and secrets in addresses are left out.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class FolderLost(RuntimeError):
    """Error: this run has lost the lock of its folder, which another run may have; nothing may be written there."""


def listed(words: Sequence[str], most: int = 8, separator: str = ", ") -> str:
    """Return words as text: the first ones, and the number of the others."""
    more = f"{separator.rstrip(', ')} and {len(words) - most} more" if len(words) > most else ""
    return separator.join(words[:most]) + more


def without_secrets(text: str) -> str:
    """Return a text in which each address has `***` for its user and password, and for the query of a web address."""
    text = re.sub(r"(https?://|://(?=[^\s/'\"?#@]*:))[^\s/'\"?#]+@", r"\1***@", text)
    return re.sub(r"(https?://[^\s'\"<>?]+\?)[^\s'\"<>]*[^\s'\"<>:;,.)]", r"\1***", text)


def printable(message: str) -> str:
    """Return a text that may quote a file or an address, made safe to print: see `UserError`."""
    message = without_secrets(message)
    message = message.encode(errors="backslashreplace").decode()  # a lone surrogate can't be printed
    message = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: ascii(found[0])[1:-1], message)
    lines = message.split("\n")
    if len(lines) > _LINES:
        lines[_LINES - 1 :] = [f"... and {len(lines) - _LINES + 1:,} more lines"]
    return "\n".join(map(_short, lines))


def _short(line: str) -> str:
    if len(line) <= _LINE:
        return line
    return f"{line[: _LINE // 2]} [... {len(line) - _LINE:,} characters ...] {line[-_LINE // 2 :]}"
