"""The table of what is refused and ignored is complete, right, and about keys that exist."""

import fnmatch
from typing import Any

import pytest

from torchtitan_graph.config import load
from torchtitan_graph.config.job import OPTIONS
from torchtitan_graph.config.option import Option, options
from torchtitan_graph.config.support import GONE, IGNORED, REFUSED, RENAMED, SUPPORT, find_row


def other_values(option: Option) -> list[str]:
    """Return legal values of an option besides its default, as written on the command line."""
    if option.choices:
        return [choice for choice in option.choices if choice != option.default]
    if option.kind is bool:
        return [str(not option.default).lower()]
    if option.kind is int:
        return [str(max(option.default or 1, 1) + 1)]
    if option.kind is float:
        return [str((option.default or 0) / 2 + 0.25)]
    if option.row is not None:
        return [f"[{{{', '.join(f'{name} = {toml_value(part)}' for name, part in options(option.row).items())}}}]"]
    if option.kind == dict[str, Any]:
        return ["{other = 1}"]
    return [option.pattern.split("|")[0] if option.pattern else "my.other"]


def toml_value(option: Option) -> str:
    """Return a legal value as written in a file."""
    return '"other"' if option.kind is str else "0.5"


ROWS = [(key, value) for key, option in OPTIONS.items() for value in other_values(option) if key != "job.config_file"]


@pytest.mark.parametrize(("key", "text"), ROWS, ids=lambda part: part)
def test_a_value_is_refused_or_noticed_exactly_as_the_table_says(key: str, text: str) -> None:
    option = OPTIONS[key]
    row = find_row(key, option.parse(text), option.default)
    argv = [f"--{key}={text}"]
    if row is not None and row.verdict == REFUSED:
        with pytest.raises(ValueError, match="1 problem") as caught:
            load(argv)
        assert f"{key} = {text!r}: {row.instead}" in str(caught.value)
    else:
        said = [f"command line: {key} = {text!r}: ignored: {row.instead}"] if row is not None else []
        assert load(argv).notices == said


@pytest.mark.parametrize("key", [key for key in OPTIONS if key != "job.config_file"])
def test_a_default_is_never_refused_nor_noticed(key: str) -> None:
    default = OPTIONS[key].default
    text = "" if default is None else ",".join(default) if isinstance(default, list) else str(default)
    assert load([f"--{key}={text}"]).notices == []


def test_every_row_is_about_an_option_and_reached() -> None:
    for row in SUPPORT:
        reached = [
            key
            for key in OPTIONS
            if next((other for other in SUPPORT if fnmatch.fnmatchcase(key, other.key)), None) is row
        ]
        assert reached, row.key
        assert row.verdict in (REFUSED, IGNORED)
        for value in row.harmless:
            assert OPTIONS[row.key].accept(value) == value


def test_old_names_lead_to_options_and_hide_none() -> None:
    assert set(RENAMED.values()) <= set(OPTIONS)
    assert not (set(RENAMED) | set(GONE)) & set(OPTIONS)
