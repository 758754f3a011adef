"""What one option is: its type, default, legal values and help, declared beside its dataclass field."""

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Union

KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list[str]: "a list of strings",
    list[list[str]]: "a list of lists of strings",
}


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    also: Sequence[float] = (),
    pattern: str | None = None,
) -> Any:
    """Declare a dataclass field that users can set.

    `choices` and `pattern` restrict strings (`pattern` is matched in full), `minimum`, `maximum` and `below` numbers;
    `also` lists numbers outside that range which are legal all the same.
    """
    rules = {
        "help": help,
        "choices": tuple(choices),
        "minimum": minimum,
        "maximum": maximum,
        "below": below,
        "also": tuple(also),
        "pattern": pattern,
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=rules)
    return dataclasses.field(default=default, metadata=rules)


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of the schema, as declared by `option`. `key` is its full name, `table.key`."""

    key: str
    kind: Any
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...]
    minimum: float | None
    maximum: float | None
    below: float | None
    also: tuple[float, ...]
    pattern: str | None

    def legal(self) -> str:
        """Describe the legal values in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        words = KINDS[self.kind]
        if self.minimum is not None:
            words += f" of at least {self.minimum}"
        if self.maximum is not None:
            words += f" and at most {self.maximum}"
        if self.below is not None:
            words += f" and below {self.below}"
        if self.pattern is not None:
            words += f" matching {self.pattern}"
        return " or ".join([words, *(str(value) for value in self.also)])

    def accept(self, value: Any) -> Any:
        """Check a value that has a type, as TOML gives it, and return it as the dataclass holds it.

        Raises:
            ValueError: the value is not legal; the message says what is.
        """
        if self.optional and value in (None, ""):
            return None
        if self.kind is float and type(value) is int and abs(value) < 2**1000:
            value = float(value)
        if not _has_kind(value, self.kind):
            quotes = " in quotes" if self.kind is str and not isinstance(value, (list, dict)) else ""
            raise ValueError(f"must be {self.legal()}{quotes}")
        if not self._is_legal(value):
            hint = nearest(value, self.choices) if self.choices else None
            raise ValueError(f"must be {self.legal()}" + (f"; did you mean {hint}?" if hint else ""))
        return value

    def parse(self, text: str) -> Any:
        """Check a value given as text on the command line. Lists are separated by commas, inner lists by semicolons.

        Raises:
            ValueError: the text is not a legal value; the message says what is.
        """
        if self.optional and text == "":
            return None
        value: Any = text
        if self.kind is bool:
            value = {"true": True, "false": False}.get(text.lower(), text)
        elif self.kind in (int, float):
            try:
                value = self.kind(text)
            except ValueError:
                raise ValueError(f"must be {self.legal()}") from None
        elif self.kind == list[str]:
            value = _split(text, ",")
        elif self.kind == list[list[str]]:
            value = [_split(part, ",") for part in _split(text, ";")]
        return self.accept(value)

    def _is_legal(self, value: Any) -> bool:
        if self.kind in (int, float):
            if value in self.also:
                return True
            low_enough = (self.maximum is None or value <= self.maximum) and (self.below is None or value < self.below)
            return abs(value) < math.inf and low_enough and (self.minimum is None or value >= self.minimum)
        if self.kind is str:
            chosen = not self.choices or value in self.choices
            return chosen and (self.pattern is None or re.fullmatch(self.pattern, value) is not None)
        return True


def options(table: type, prefix: str = "") -> dict[str, Option]:
    """Return every option below a dataclass by its full key, in the order of declaration."""
    found: dict[str, Option] = {}
    hints = typing.get_type_hints(table)
    for field in dataclasses.fields(table):
        key, kind = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            found |= options(kind, key + ".")
        elif "help" in field.metadata:
            optional = typing.get_origin(kind) in (Union, types.UnionType)
            if optional:
                kind = next(part for part in typing.get_args(kind) if part is not type(None))
            default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore
            found[key] = Option(key, kind, optional, default, **field.metadata)
    return found


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name most like a mistyped one, or None when none is near. A right key in a wrong table is near."""
    names = list(names)
    leaf = name.rpartition(".")[2]
    same_leaf = [other for other in names if "." in name and other.rpartition(".")[2] == leaf]
    close = difflib.get_close_matches(name, same_leaf or names, n=1, cutoff=0.0 if same_leaf else 0.6)
    return close[0] if close else None


def show(value: Any) -> str:
    """Return a value as a user would write it on the command line."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(str, value)) or "empty"
    return str(value) if value != "" else "empty"


def _has_kind(value: Any, kind: Any) -> bool:
    if kind == list[str]:
        return isinstance(value, list) and all(_has_kind(item, str) for item in value)
    if kind == list[list[str]]:
        return isinstance(value, list) and all(_has_kind(item, list[str]) for item in value)
    if type(value) is not kind:  # not isinstance: a bool is not a number here
        return False
    return kind is not str or not any("\ud800" <= char <= "\udfff" for char in value)  # undecodable bytes of an argv


def _split(text: str, separator: str) -> list[str]:
    return [part.strip() for part in text.split(separator) if part.strip()]
