"""One option: its type, default, legal values and help, declared as a dataclass field."""

import dataclasses
import math
import re
import types
import typing
from typing import Any, Union

from torchtitan_graph.errors import UserError
from torchtitan_graph.nearest import did_you_mean
from torchtitan_graph.small_files import BadFile, parse_toml

KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list[str]: "a list of strings",
    list[list[str]]: "a list of lists of strings",
    dict[str, Any]: "a table of numbers, strings, true or false, and lists of these",
}


def option(default: Any, help: str, **rules: Any) -> Any:
    """Declare a dataclass field that users can set; `rules` are fields of `Option`, such as `minimum`.

    A field of the type `list[Row]`, where Row is a dataclass of such fields, is an array of tables in TOML. A name that
    is a word of Python's is written with `_` after it: the option `pass` is the field `pass_`.
    """
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata={"help": help, **rules})
    return dataclasses.field(default=default, metadata={"help": help, **rules})


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of the schema, as declared by `option`. `key` is its full name, `table.key`.

    `choices` and `pattern` restrict strings: `pattern` is matched in full, and `means` says in words what matches it;
    where both are given, one is enough. With `any_case`, a choice may be given in upper or lower case. Where the kind
    is bool, `choices` are strings that are legal besides true and false.
    `minimum`, `maximum` and `below` restrict numbers; `also` lists legal numbers outside that range.
    """

    key: str
    kind: Any
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    any_case: bool = False
    minimum: float | None = None
    maximum: float | None = None
    below: float | None = None
    also: tuple[float, ...] = ()
    pattern: str | None = None
    means: str = ""

    @property
    def row(self) -> type | None:
        """The dataclass of one entry where the option is an array of tables, else None."""
        inner = typing.get_args(self.kind)[:1]
        return inner[0] if inner and dataclasses.is_dataclass(inner[0]) else None  # type: ignore[return-value]

    def legal(self) -> str:
        """Return a description of the legal values."""
        if self.choices and self.kind is bool:
            return ", ".join(("true", "false", *self.choices[:-1])) + f" or {self.choices[-1]}"
        if self.choices:
            return "one of " + ", ".join(self.choices) + (f", or {self.means}" if self.means else "")
        if self.row is not None:
            return f"tables, each [[{self.key}]], with the keys {', '.join(options(self.row))}"
        words = self.means or KINDS[self.kind]
        if self.minimum is not None:
            words += f" of at least {self.minimum}"
        if self.maximum is not None:
            words += f" and at most {self.maximum}"
        if self.below is not None:
            words += f" and below {self.below}"
        return " or ".join([words, *(str(value) for value in self.also)])

    def accept(self, value: Any) -> Any:
        """Check a value with a TOML type, and return it as the dataclass holds it.

        Raises:
            UserError: the value is not legal; the message says what is.
        """
        if self.optional and value in (None, ""):
            return None
        if self.row is not None:
            return self._accept_rows(self.row, value)
        if self.kind is float and type(value) is int and abs(value) < 2**1000:
            value = float(value)
        if self.kind is bool and isinstance(value, str) and value in self.choices:
            return value
        if not _has_kind(value, self.kind):
            hint = ", in 64 bits" if self.kind is int and type(value) is int else ""
            if self.kind is str and not isinstance(value, (list, dict)):
                hint = ", in UTF-8 and without NUL" if isinstance(value, str) else " in quotes"
            if self.kind is bool and isinstance(value, str):
                hint = did_you_mean(value, self.choices)
            raise UserError(f"must be {self.legal()}{hint}")
        if self.any_case:
            value = next((choice for choice in self.choices if choice.lower() == value.lower()), value)
        if value == "" and self.default:
            raise UserError("must not be empty")
        if not self._is_legal(value):
            raise UserError(f"must be {self.legal()}{did_you_mean(value, self.choices) if self.choices else ''}")
        return value

    def parse(self, text: str) -> Any:
        """Check a value given as text on the command line.

        Lists are separated by commas, inner lists by semicolons, or written as in TOML, ["a", "b"] or [["a", "b"],
        ["c"]]; so are tables, and arrays of tables.

        Raises:
            UserError: the text is not a legal value; the message says what is.
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
                raise UserError(f"must be {self.legal()}") from None
        elif self.kind == list[str] and not text.startswith(('["', "['")):
            value = _split(text, ",")
        elif self.kind == list[list[str]] and not text.startswith("[["):
            value = [_split(part, ",") for part in _split(text, ";")]
        elif self.row is not None or self.kind in (dict[str, Any], list[str], list[list[str]]):
            try:
                value = parse_toml(f"value = {text}", "")["value"] if text else type(self.default)()
            except BadFile:
                example = "[{key = value, ...}, ...]" if self.row is not None else "{key = value, ...}"
                example = {list[str]: "a,b", list[list[str]]: "a,b;c"}.get(self.kind, example)
                raise UserError(f"must be {self.legal()}; on the command line '{example}'") from None
        return self.accept(value)

    def _accept_rows(self, row: type, value: Any) -> list[Any]:
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise UserError(f"must be {self.legal()}")
        keys = options(row)
        accepted = []
        for number, entry in enumerate(value, 1):
            where = f"entry {number}"
            if unknown := next((name for name in entry if name not in keys), None):
                hint = did_you_mean(unknown, keys, f"; its keys are {', '.join(keys)}")
                raise UserError(f"{where}: {unknown} is not a key{hint}")
            settings = {}
            for name, option in keys.items():
                try:
                    settings[name] = option.accept(entry.get(name, option.default))
                except UserError as error:
                    said = f"{name} = {brief(entry[name])}" if name in entry else f"{name} is missing; it"
                    raise UserError(f"{where}: {said} {error}") from None
            accepted.append(row(*settings.values()))
        return accepted

    def _is_legal(self, value: Any) -> bool:
        if self.kind in (int, float):
            if value in self.also:
                return True
            low_enough = (self.maximum is None or value <= self.maximum) and (self.below is None or value < self.below)
            return abs(value) < math.inf and low_enough and (self.minimum is None or value >= self.minimum)
        if self.kind is str:
            if self.choices and value in self.choices:
                return True
            return not self.choices if self.pattern is None else re.fullmatch(self.pattern, value) is not None
        return True


def options(table: type, prefix: str = "") -> dict[str, Option]:
    """Return every option below a dataclass by its full key, in the order of declaration."""
    found: dict[str, Option] = {}
    hints = typing.get_type_hints(table)
    for field in dataclasses.fields(table):
        key, kind = prefix + field.name.removesuffix("_"), hints[field.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            found |= options(kind, key + ".")
        elif "help" in field.metadata:
            optional = typing.get_origin(kind) in (Union, types.UnionType)
            if optional:
                parts = typing.get_args(kind)
                kind, optional = next(part for part in parts if part is not type(None)), type(None) in parts
            default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore
            found[key] = Option(key, kind, optional, default, **field.metadata)
    return found


def show(value: Any) -> str:
    """Return a value as written on the command line."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(str, value)) or "empty"
    if value == {}:
        return "empty"
    return str(value) if value != "" else "empty"


def brief(value: Any) -> str:
    """Return a value for an error message, cut where it is long."""
    if isinstance(value, list):  # rows of a table: what is set in them
        value = [
            {name.rstrip("_"): x for name, x in vars(row).items() if x is not None}
            if dataclasses.is_dataclass(row)
            else row
            for row in value
        ]
    if isinstance(value, bool):
        return str(value).lower()
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 200 else text[:200] + "..."


def _has_kind(value: Any, kind: Any) -> bool:
    if kind == list[str]:
        return isinstance(value, list) and all(_has_kind(item, str) for item in value)
    if kind == list[list[str]]:
        return isinstance(value, list) and all(_has_kind(item, list[str]) for item in value)
    if kind == dict[str, Any]:
        return isinstance(value, dict) and all(_has_kind(name, str) and _is_plain(item) for name, item in value.items())
    if type(value) is not kind:  # not isinstance: a bool is not a number here
        return False
    if kind is int:
        return -(2**63) <= value < 2**63
    # Undecodable bytes of an argv; and no file's name can hold a NUL.
    return kind is not str or not any("\ud800" <= char <= "\udfff" or char == "\0" for char in value)


def _is_plain(value: Any) -> bool:
    """Return whether TOML can hold a value, other than tables, dates and infinite numbers."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return any(_has_kind(value, kind) for kind in (bool, int, str)) or (type(value) is float and math.isfinite(value))


def _split(text: str, separator: str) -> list[str]:
    return [part.strip() for part in text.split(separator) if part.strip()]
