"""Names that mean nothing here are refused or noticed exactly as the table says, and shown nowhere else."""

import re
from pathlib import Path
from typing import Any

import pytest

from torchtitan_graph.config import JobConfig, dump_toml, load
from torchtitan_graph.config.dump import dump_changes
from torchtitan_graph.config.job import OPTIONS
from torchtitan_graph.config.manual import option_help, tables
from torchtitan_graph.config.option import brief
from torchtitan_graph.config.support import REFUSED, RENAMED, UNSUPPORTED, UNSUPPORTED_VALUES
from torchtitan_graph.errors import UserError


def toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return str(value).lower() if isinstance(value, (bool, int, float)) else repr(value)


def other(value: Any) -> Any:
    """Return a value of the same type."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, (int, float)) else ["other"] if isinstance(value, list) else "other"


def text(value: Any) -> str:
    """Return a value as written on the command line."""
    return "" if value is None else ",".join(value) if isinstance(value, list) else str(value)


def findings(argv: list[str]) -> list[str]:
    try:
        return load(argv).notices
    except UserError as error:
        return [line.strip() for line in str(error).splitlines()[1:]]


def write(folder: Path, key: str, value: Any) -> str:
    table, _, name = key.rpartition(".")
    path = folder / "run.toml"
    path.write_text(f"[{table}]\n{name} = {toml(value)}")
    return str(path)


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_a_name_is_refused_or_noticed_as_the_table_says_unless_its_value_is_harmless(key: str, tmp_path: Path) -> None:
    name = UNSUPPORTED[key]
    value = other(name.harmless[0] if name.harmless else "")
    said = name.instead if name.verdict == REFUSED else f"{name.verdict}: {name.instead}"
    file = write(tmp_path, key, value)
    assert findings(["--job.config_file", file]) == [f"{file}: {key} = {brief(value)}: {said}"]
    assert findings([f"--{key}={text(value)}"]) == [f"command line: {key} = {text(value)!r}: {said}"]
    if value is True:
        assert findings([f"--{key}"]) == [f"command line: {key} = 'true': {said}"]
    for harmless in name.harmless:
        assert findings([f"--{key}={text(harmless)}"]) == []
        assert findings([f"--{key}={text(value)}", f"--{key}={text(harmless)}"]) == []  # the last one counts
        if harmless is not None:
            assert findings(["--job.config_file", write(tmp_path, key, harmless)]) == []


@pytest.mark.parametrize("value", [True, 2.0, "four", [1], {"a": 1}])
def test_a_value_of_another_type_is_not_harmless(value: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    value_text = "{a = 1}" if isinstance(value, dict) else toml(value)
    file.write_text(f"[compile]\nbackend = {value_text}")
    (line,) = findings(["--job.config_file", str(file)])
    assert "regions are compiled by Inductor alone" in line


def test_flags_without_a_value() -> None:
    assert findings(["--memory_estimation.no-enable", "--checkpoint.no-enable"]) == []
    assert (
        "memory_estimation.enable = 'true': not built"
        in findings(["--memory_estimation.enable", "--debug.seed", "1"])[0]
    )
    assert "only true-or-false options" in findings(["--parallelism.no-pipeline_parallel_degree"])[0]


@pytest.mark.parametrize(("key", "value"), UNSUPPORTED_VALUES)
def test_values_that_are_not_built(key: str, value: str, tmp_path: Path) -> None:
    instead = UNSUPPORTED_VALUES[key, value]
    assert findings([f"--{key}={value}"]) == [f"command line: {key} = {value!r}: {instead}"]
    file = write(tmp_path, key, value)
    assert findings(["--job.config_file", file]) == [f"{file}: {key} = {value!r}: {instead}"]
    assert findings(["--job.config_file", file, f"--{key}={OPTIONS[key].choices[-1]}"]) == []  # overridden


def test_a_default_is_never_refused_nor_noticed() -> None:
    for key, option in OPTIONS.items():
        assert key == "job.config_file" or load([f"--{key}={text(option.default)}"]).notices == [], key


def test_passes_that_are_gone_are_left_out_with_a_notice() -> None:
    config = load(["--compile.disable_passes", "merge_equal,reuse_logits"])
    assert config.compile.disable_passes == ["merge_equal"]
    (line,) = config.notices
    assert "ignored: reuse_logits: the loss's operator saves this memory itself" in line


def test_old_names_lead_to_known_ones_and_no_name_is_in_two_tables() -> None:
    assert set(RENAMED.values()) <= {*OPTIONS, *UNSUPPORTED}
    assert len({*OPTIONS, *UNSUPPORTED, *RENAMED}) == len(OPTIONS) + len(UNSUPPORTED) + len(RENAMED)
    assert all(OPTIONS[key].kind is str and value not in OPTIONS[key].choices for key, value in UNSUPPORTED_VALUES)


def test_help_and_dumps_show_only_what_does_something() -> None:
    shown = [option_help(None), *map(option_help, tables()), dump_toml(JobConfig()), dump_changes(JobConfig())]
    for key in UNSUPPORTED:
        table, _, name = key.rpartition(".")
        for page in shown:
            assert key not in page
            section = re.search(rf"(?ms)^\[{re.escape(table)}\]$(.*?)(?=^\[|\Z)", page)
            assert section is None or f"\n{name} = " not in section[1]


@pytest.mark.slow
def test_a_hint_names_only_what_works() -> None:
    """Whatever is mistyped, in one way each: a hint leads to an option, never to a name that is refused in turn."""
    for i, key in enumerate([*OPTIONS, *RENAMED, *UNSUPPORTED]):
        leaf = key.rpartition(".")[2]
        typos = key[:-1], key + "s", key.replace("e", "", 1), f"training.{leaf}x", leaf, f"no_{key}", key.upper()
        typo = typos[i % len(typos)]
        if typo in {*OPTIONS, *RENAMED, *UNSUPPORTED}:
            continue
        (line,) = findings([f"--{typo}=1"])
        hint = line.partition("did you mean ")[2].rstrip("?").removeprefix("--").replace(".no-", ".")
        assert not hint or hint in OPTIONS or hint in tables(), line
