"""A configuration survives being written and loaded, whatever it holds."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchtitan_graph.config import JobConfig, dump_toml, load
from torchtitan_graph.config.dump import dump_changes
from torchtitan_graph.config.job import OPTIONS, put
from torchtitan_graph.config.option import Option, options
from torchtitan_graph.config.support import FLAVOR_SUFFIXES

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


def values(option: Option) -> st.SearchStrategy:
    low, high = option.minimum or 0, option.maximum or (option.below or 2**62) - 1
    kinds = {
        bool: st.booleans(),
        int: st.integers(int(low), int(high)),
        float: st.floats(low, option.maximum or option.below or 1e300, exclude_max=option.below is not None),
        str: st.sampled_from(
            option.choices
            or [x for x in ("2", "op", "a.b", "2026-01-31", "http://a:1") if re.fullmatch(option.pattern, x)]
        )
        if option.choices or option.pattern
        else TEXT,
        list[str]: st.lists(TEXT),
        list[list[str]]: st.lists(st.lists(TEXT)),
        dict[str, Any]: st.dictionaries(
            TEXT, TEXT | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.lists(st.floats(0, 1))
        ),
    }
    if option.row is not None:
        rows = st.builds(option.row, *map(values, options(option.row).values()))
        return st.lists(rows, max_size=2)
    return st.none() | kinds[option.kind] if option.optional else kinds[option.kind]


WRITTEN = [option for option in OPTIONS.values() if option.key not in ("job.config_file", "model.name")]


def is_translated(key: str, value: object) -> bool:
    """Return whether loading turns a value into another."""
    if key == "job.dump_folder":
        return "{" in str(value) or "}" in str(value)
    return value == "c4_test" or (key == "model.flavor" and str(value).endswith(tuple(s for s, _ in FLAVOR_SUFFIXES)))


@pytest.mark.parametrize("write", [dump_toml, dump_changes])
@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip(write, data, tmp_path: Path) -> None:
    config = JobConfig()
    for option in data.draw(st.lists(st.sampled_from(WRITTEN), max_size=8)):
        value = data.draw(values(option))
        if not is_translated(option.key, value):
            put(config, option.key, value)
    path = tmp_path / "config.toml"
    path.write_text(write(config), encoding="utf-8")
    loaded = load(["--job.config_file", str(path)])
    loaded.job.config_file = None
    assert loaded == config
    assert loaded.notices == []


def test_a_resolved_file_says_where_values_come_from(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[training]\nsteps = 7")
    text = dump_toml(load(["--job.config_file", str(path), "--optimizer.lr", "1e-3"]))
    assert f'steps = 7  # "{path}"' in text
    assert 'lr = 0.001  # "command line"' in text
    assert "# seed is not set" in text


def test_changes_hold_only_what_differs() -> None:
    assert dump_changes(load(["--training.steps", "7"])) == "[training]\nsteps = 7\n"
