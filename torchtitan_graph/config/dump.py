"""A configuration as TOML that can be loaded again."""

import json
import re
from collections.abc import Collection
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torchtitan_graph.config.job import OPTIONS, JobConfig, get
from torchtitan_graph.errors import without_secrets


def dump_toml(config: JobConfig) -> str:
    """Return every option of a configuration as TOML, with a comment on where its value came from.

    Loading the text gives an equal configuration, except for `job.config_file`, which a file can't hold.
    """
    origin = config.job.config_file
    lines = ["# The resolved configuration of a run" + (f", from {json.dumps(origin)}" if origin else "") + "."]
    return _write(config, [key for key in OPTIONS if key != "job.config_file"], lines, comments=True)


def dump_changes(config: JobConfig, leave_out: Collection[str] = ()) -> str:
    """Return the options that differ from their defaults as TOML, except for the keys in `leave_out`."""
    leave_out = {"job.config_file", *leave_out}
    keys = [key for key in OPTIONS if key not in leave_out and get(config, key) != OPTIONS[key].default]
    return _write(config, keys, [], comments=False)


def in_toml(value: Any) -> str:
    """Return a value as TOML, for a message."""
    return "not set" if value is None else without_secrets(_literal(value))


def shown(value: Any) -> Any:
    """Return an option's value without the secrets of the addresses in it."""
    if isinstance(value, list):
        return [*map(shown, value)]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: shown(getattr(value, field.name)) for field in fields(value)})
    return without_secrets(value) if isinstance(value, str) else value


def _write(config: JobConfig, keys: list[str], lines: list[str], comments: bool) -> str:
    current = ""
    for key in keys:
        table, _, name = key.rpartition(".")
        if table != current:
            lines += ["", f"[{table}]"]
            current = table
        value = get(config, key)
        text = f"# {name} is not set" if value is None else f"{name} = {_literal(value)}"
        comment = f"  # {json.dumps(config.sources[key])}" if comments and key in config.sources else ""
        lines.append(text + comment)
    return "\n".join(lines).lstrip("\n") + "\n"


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if is_dataclass(value):
        value = {field.name.removesuffix("_"): getattr(value, field.name) for field in fields(value)}
        value = {name: item for name, item in value.items() if item is not None}
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(name)} = {_literal(item)}" for name, item in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):  # a JSON string is a TOML string, but for one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _literal(name)
