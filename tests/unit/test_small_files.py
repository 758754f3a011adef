"""Small files that anybody may have written: read within bounds, and refused by what they are."""

import gzip
import os
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import NotRequired, TypedDict

from torchtitan_graph.small_files import (
    BadFile,
    gunzip,
    parse_json,
    parse_toml,
    read_json,
    read_small,
    read_text,
    read_toml,
)


class Record(TypedDict):
    step: int
    loss: float | None
    name: NotRequired[str]


def test_a_record_is_read(tmp_path: Path):
    file = tmp_path / "record.json"
    file.write_text('\ufeff{"step": 3, "loss": NaN, "other": 1, "smile": "\\ud83d\\ude42"}')
    assert read_json(file, Record)["step"] == 3
    assert read_json(file, dict[str, Any])["other"] == 1


@pytest.mark.parametrize(
    "text, why",
    [
        ("{", "is not JSON"),
        ('{"step": "3", "loss": 1}', "step: Expected `int`, got `str`"),
        ('{"step": true, "loss": 1}', "step: Expected `int`, got `bool`"),
        ('{"loss": 1}', "missing required field `step`"),
        ("[]", "Expected `object`, got `array`"),
        ("[" * 100_000 + "]" * 100_000, "deep"),
        ('{"step": 1, "loss": ' + "[" * 300 + "]" * 300 + "}", "deep"),
        ('{"step": ' + "1" * 5000 + ', "loss": 1}', "5,000 digits"),
        ('{"step": 1, "loss": [' + "[]," * 5_000_000 + "[]]}", "holds more than 4,000,000 values"),
        ("\udcff", "is not JSON"),
        ('{"step": 1, "loss": null, "name": "\\ud800"}', "half of a surrogate pair"),
    ],
    ids=["cut", "text", "bool", "missing", "list", "deep", "deep-inside", "digits", "many", "not-utf8", "half"],
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str, why: str):
    file = tmp_path / "record.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BadFile, match=why) as error:
        read_json(file, Record)
    assert str(error.value).startswith(str(file))


def test_signs_in_strings_are_no_values():
    text = '{"text": "' + 'a, [b]: \\"c\\" \\\\' * 1000 + '"}'
    assert len(parse_json(text, dict[str, str], "here", max_values=5)["text"]) == 13_000
    with pytest.raises(BadFile, match="holds more than 5 values"):
        parse_json('{"a": ["\\\\", "\\"", 3, 4, 5]}', dict[str, Any], "here", max_values=5)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    for path, what in ((tmp_path / "fifo", "a FIFO"), (Path("/dev/zero"), "a device"), (tmp_path, "a folder")):
        with pytest.raises(BadFile, match=f"is not a regular file, but {what}"):
            read_small(path)


def test_sizes_are_bounded(tmp_path: Path):
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(BadFile, match="1,099,511,627,776 bytes"):
        read_small(sparse)
    with pytest.raises(BadFile, match="once unpacked"):
        gunzip(gzip.compress(bytes(10_000)), "a bomb", max_bytes=9_999)
    assert gunzip(gzip.compress(bytes(10_000)), "none", max_bytes=10_000) == bytes(10_000)
    with pytest.raises(BadFile, match="whole"):
        gunzip(gzip.compress(bytes(10_000))[:-9], "cut")


def test_errors_of_the_system_stay_what_they_are(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "none")
    with pytest.raises(OSError, match="name too long"):
        read_text(tmp_path / ("x" * 300))


def test_values_of_a_surrogate_are_no_traceback():
    with pytest.raises(BadFile):
        parse_json("\ud800", dict[str, Any], "text")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a = " + "[" * 100_000, "nested more than 100 levels deep"),
        ("a = " + "{a=" * 100_000, "nested more than 100 levels deep"),
        (".".join(["a"] * 200_000) + " = 1", "nested more than 100 levels deep"),
        ("[" + '"a" . ' * 100_000 + "a]", "nested more than 100 levels deep"),
        ("a = " + "[" * 101 + "]" * 101, "nested more than 100 levels deep"),
        ("a = " + "9" * 5000, "is not valid TOML: Exceeds the limit"),
        ("a = 1\na = 2", "is not valid TOML: Cannot overwrite a value"),
    ],
    ids=["lists", "tables", "dotted", "quoted", "one-too-deep", "digits", "twice"],
)
def test_toml_is_bounded(text: str, why: str, tmp_path: Path):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(BadFile, match=why) as error:
        read_toml(tmp_path / "mine.toml")
    assert str(error.value).startswith(str(tmp_path))


def test_dots_in_values_are_no_depth():
    text = (
        "a = ["
        + "0.5, " * 1000
        + "]\n# "
        + "..." * 1000
        + "\nb = '/usr/./x, y. z.'\n"
        + "a_.b.c = 1\n".replace("a_", "d")
    )
    assert len(parse_toml(text, "mine")["a"]) == 1000
