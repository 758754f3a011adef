"""Real files with a slip in them: they train, or end in exit code 2 with one message, and nothing is written."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchtitan_graph import train

REPOSITORY = Path(__file__).parents[3]
ARRAYS = """
[optimizer]
options = {}
[[optimizer.param_groups]]
pattern = "*norm*"
weight_decay = 0.0
[[training.sources]]
dataset_path = "a/b"
weight = 0.5
[[training.sources]]
dataset = "c4"
name = "web"
"""
FILES = [ARRAYS] + [
    path.read_text()
    for folder in ("train_configs", "tests/e2e", "tests/unit/config/old_files")
    for path in sorted((REPOSITORY / folder).glob("*.toml"))
]
VALUES = ["", "0", "-1", "1.5", "1e999", "nan", "true", '""', '"../../x"', '"\\u0000"', "[]", "[[]]", "{}", "[{}]"]
VALUES += [
    '[{pattern = "a", lr = -1}]',
    "{a = {b = 1}}",
    "1979-05-27",
    '"""',
    "0x10",
    "[1, 'a']",
    "'{job.dump_folder}'",
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Return a file's text after one to three slips."""
    lines = draw(st.sampled_from(FILES)).splitlines()
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(lines) - 1))
        line = lines[place]
        slip = draw(st.sampled_from(["drop", "double", "move", "value", "letter", "cut", "nest", "bytes"]))
        if slip == "drop" and len(lines) > 1:
            del lines[place]
        elif slip == "double":
            lines.insert(place, line)
        elif slip == "move":
            lines.insert(draw(st.integers(0, len(lines) - 1)), lines.pop(place))
        elif slip == "value" and "=" in line:
            lines[place] = line.split("=")[0] + "= " + draw(st.sampled_from(VALUES))
        elif slip == "letter":
            at = draw(st.integers(0, len(line)))
            lines[place] = line[:at] + draw(st.sampled_from(list("ax_.=[]{}\"'#\n0 é\x00"))) + line[at + 1 :]
        elif slip == "cut":
            lines[place] = line[: draw(st.integers(0, len(line)))]
        elif slip == "nest" and line.startswith("["):
            lines[place] = f"[{line.strip()}]"
        elif slip == "bytes":
            return "\n".join(lines).encode() + draw(st.binary(max_size=3))
    return "\n".join(lines).encode()


class Reached(Exception):
    """Everything was found to be right."""


def run(argv: list[str], folder: Path) -> list[str] | None:
    """Start a run in an empty folder up to building its blueprint; return the messages of one that was refused."""

    def reached(*_: Any) -> None:
        raise Reached

    messages: list[str] = []

    def report(error: Exception, code: int, *_: Any) -> int:
        if isinstance(error, Reached):
            raise error
        messages.append(str(error))
        return code

    before, files = Path.cwd(), sorted(folder.rglob("*"))
    os.chdir(folder)
    try:
        with patch.object(train, "Blueprint", reached), patch.object(train, "_end", report):
            code = train.main(argv)
    except Reached:
        return None
    finally:
        os.chdir(before)
        assert sorted(folder.rglob("*")) == files, "something was written"
    assert code == 2 and len(messages) == 1
    return messages


@given(content=mutated())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_slip_in_a_file(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    messages = run(["--job.config_file", str(file)], tmp_path)
    if messages is not None:
        assert any(word in messages[0] for word in ("problem", "can't be left out", "compile.disable_passes"))
        assert "run.toml" in messages[0] or "default:" in messages[0] or "compile.disable_passes" in messages[0]


@pytest.mark.parametrize("text", FILES[:1])
def test_what_is_mutated_is_right(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert run(["--job.config_file", str(file)], tmp_path) is None
