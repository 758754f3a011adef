"""Whatever is in a file or on a command line, it ends as a configuration or as an error that names the options."""

import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchtitan_graph.config import JobConfig, check, dump_toml, load
from torchtitan_graph.config.job import OPTIONS
from torchtitan_graph.config.resolve import one_line
from torchtitan_graph.config.support import RENAMED, UNSUPPORTED
from torchtitan_graph.errors import UserError

REAL_KEYS = [*OPTIONS, *RENAMED, *UNSUPPORTED]
PARTS = sorted({part for key in REAL_KEYS for part in key.split(".")})
WORDS = st.sampled_from(
    ["true", "false", "-1", "0", "1", "2", "9" * 5000, "1e999", "nan", "", "op", "c4_test", "8B_flex", "a,b;c"]
)
NAMES = st.sampled_from(PARTS) | st.text("ab-_.=é \"'\\\n", max_size=4)
CHARS = st.characters(exclude_categories=["Cs"])
HUGE = "0x" + "f" * 5000  # an integer of so many digits that Python refuses to print it
SCALARS = (
    st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.just(HUGE)
    | st.floats()
    | WORDS
    | st.text(CHARS, max_size=5)
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2))


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted(name)} = {toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if value == HUGE:
        return HUGE
    return quoted(value) if isinstance(value, str) else str(value).lower()


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def run(argv: list[str], given_names: str) -> None:
    try:
        config = load(argv)
    except UserError as error:
        message = str(error)
        first, *lines = message.split("\n")
        assert (
            type(error) is UserError and first == f"{len(lines)} problem{'s'[: len(lines) > 1]} in the configuration:"
        )
        assert all(line.startswith("  ") and line[2:].isprintable() and len(line) < 3000 for line in lines), message
        names = (one_line(key)[:1000] for key in given_names.split("\0"))
        assert any(f": {key}" in message or key in message for key in names), message
        return
    assert isinstance(config, JobConfig)
    dump_toml(config)
    try:
        check(config, 4)
    except UserError as error:
        assert type(error) is UserError and any(key in str(error) for key in OPTIONS)


@given(
    tables=st.dictionaries(NAMES, VALUES | st.dictionaries(NAMES, VALUES, max_size=3), max_size=3),
    keyed=st.dictionaries(st.sampled_from(REAL_KEYS), VALUES, max_size=3),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_toml(tables: dict, keyed: dict, tmp_path: Path) -> None:
    for key, value in keyed.items():
        *path, leaf = key.split(".")
        table = tables
        for part in path:
            if not isinstance(table.get(part), dict):
                table[part] = {}
            table = table[part]
        table[leaf] = value
    file = tmp_path / "fuzz.toml"
    file.write_text("\n".join(f"{quoted(name)} = {toml(value)}" for name, value in tables.items()), encoding="utf-8")
    run(["--job.config_file", str(file)], "\0".join(tables))


@given(
    st.lists(
        st.sampled_from([f"--{key}" for key in REAL_KEYS]).flatmap(
            lambda flag: st.sampled_from([flag, flag.replace(".", ".no-", 1), flag[:-1], flag + "=2", flag + "="])
        )
        | WORDS
        | st.text(CHARS, max_size=6),
        max_size=6,
    ).filter(lambda argv: not {"-h", "--help"} & set(argv))
)
@settings(max_examples=300, deadline=None)
def test_any_command_line(argv: list[str]) -> None:
    names = [word.removeprefix("--").partition("=")[0].replace("-", "_") for word in argv]
    run(argv, "\0".join([*argv, *names, *(name.replace(".no_", ".") for name in names)]))
