"""The formats of rows, and the columns that each reads."""

from collections.abc import Mapping
from typing import Any

from torchtitan_graph.config.option import did_you_mean

# What each form of rows reads, and the columns that are read where training.columns names no other. The forms are the
# values of training.format, and TURN: that of "chat" in which two columns are a conversation of one turn.
TURN = "turn"
COLUMNS = {
    "text": {"text": "text"},
    "chat": {"messages": "messages", "tools": "tools", "system": "system"},
    TURN: {"user": "user", "assistant": "assistant", "tools": "tools", "system": "system"},
    "completion": {"prompt": "prompt", "completion": "completion", "tools": "tools", "system": "system"},
    "preference": {
        "prompt": "prompt",
        "chosen": "chosen",
        "rejected": "rejected",
        "tools": "tools",
        "system": "system",
    },
}
OPTIONAL = ("tools", "system")  # a row may lack them
_PARTS = [*dict.fromkeys(part for parts in COLUMNS.values() for part in parts)]


def find_wrong_column(columns: Mapping[str, Any], format_: str | None) -> str | None:
    """Return what is wrong with an option `columns` with the option `format`, None if nothing is."""
    for part, name in columns.items():
        if part not in _PARTS and name in _PARTS:
            return (
                f"{part} = {name!r} is reversed: what is read comes first, then the column that holds it, as in"
                f" {{{name} = {part!r}}}"
            )
        if part not in _PARTS:
            return f"{part} is nothing that is read" + did_you_mean(part, _PARTS, f"; legal are {', '.join(_PARTS)}")
        if not isinstance(name, str):
            return f"{part} must be the name of a column"
        may_lack = {*OPTIONAL, *(["prompt"] if format_ == "preference" else [])}
        if not name and part not in may_lack:
            return f"{part} = '': a row must have it; with '' are legal {', '.join(sorted(may_lack))}, then not read"
    of = [kind for kind, parts in COLUMNS.items() if columns.keys() <= parts.keys()]
    if columns and not of:
        return f"{', '.join(columns)} are of different formats, and a corpus has one"
    for part, other in (("user", "assistant"), ("assistant", "user")):
        if part in columns and other not in columns:
            return f"{part} is named without {other}: name both, as in {{user = 'question', assistant = 'answer'}}"
    if "user" in columns and format_ == "chat":
        return None
    if columns and format_ is not None and format_ not in of:
        return f"{', '.join(columns)} is not of the format {format_!r}, which reads {', '.join(COLUMNS[format_])}"
    return None
