"""Columns of a row by name: a key, or a dotted path to one inside others, as in `data.messages`."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

_MOST_PATHS = 100_000
PAIRS = (  # columns of prompts and their answers in common tables
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("query", "answer"),
    ("problem", "solution"),
    ("prompt", "response"),
    ("prompt", "answer"),
    ("input", "output"),
)


def find_column(row: Mapping[str, Any], name: str) -> list[str] | None:
    """Return the keys that lead to a column, None if the row lacks it. A key that has the dots itself comes first."""
    if name in row:
        return [name]
    for place in range(len(name) - 1, 0, -1):
        inner = row.get(name[:place]) if name[place] == "." else None
        rest = find_column(inner, name[place + 1 :]) if isinstance(inner, Mapping) else None
        if rest is not None:
            return [name[:place], *rest]
    return None


def value_of(row: Mapping[str, Any], name: str | None) -> Any:
    """Return the value of a column, None if the row lacks it or there is no name."""
    keys = None if name is None else find_column(row, name)
    value: Any = row if keys else None
    for key in keys or ():
        value = value[key]
    return value


def paths_of(row: Mapping[str, Any] | Collection[str]) -> list[str]:
    """Return the names of a row's columns, with the paths to those inside others."""
    if not isinstance(row, Mapping):
        return sorted(row)
    return sorted({path for _, path in zip(range(_MOST_PATHS), _paths(row, ""), strict=False)})


def _paths(row: Mapping[str, Any], before: str) -> Iterator[str]:
    for key, value in row.items():
        yield f"{before}{key}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{before}{key}.")


def without_nulls(value: Any) -> Any:
    """Return a value without the keys of its objects, at any depth, that are null.

    A table has one schema for all its rows, and gives an object every key that one in any other row has.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value


def likely_columns(row: Collection[str], has_template: bool) -> str:
    """Return the end of a message: the value of the option `columns` that a row's columns suggest, or an example.

    has_template: whether there is a chat template, so that a question and its answer can be a conversation.
    """
    pair = next((pair for pair in PAIRS if pair[0] in row and pair[1] in row), None)
    if pair is None:
        return (
            ", such as {text = 'content'}, {user = 'question', assistant = 'answer'} for a conversation of one turn, or"
            " {prompt = 'question', completion = 'answer'} for text"
        )
    hint = f": {{prompt = {pair[0]!r}, completion = {pair[1]!r}}}"
    if has_template:
        turn = f"{{user = {pair[0]!r}, assistant = {pair[1]!r}}}"
        hint = f": {turn} for chats, by the chat template; for plain text{hint}"
    if pair == ("instruction", "output") and "input" in row:
        hint += ". The column 'input' is not read then: write what it holds into the instruction"
    return hint
