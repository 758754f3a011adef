"""What is told, and what is refused, of a configuration that is not the one that a run began with."""

from pathlib import Path

import pytest

from torchtitan_graph.config import dump_toml, load
from torchtitan_graph.errors import UserError
from torchtitan_graph.run.drift import check_drift

MINE = '{pass = "my_passes.mine", after = "cleanup", exact = true}'


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(load(["--model.name", "qwen3"])))
    return path


def test_what_the_graph_is_made_of_may_change_and_is_told_in_the_words_of_a_file(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["--compile.extra_passes", f"[{MINE}]", "--compile.codegen", "blocks"]
    with caplog.at_level("INFO", "torchtitan_graph"):
        check_drift(saved, load(["--model.name", "qwen3", *words]))
    assert caplog.messages == [
        'changed since the run was started: compile.codegen = "blocks", was "off"',
        f"changed since the run was started: compile.extra_passes = [{MINE}], was []",
    ]


def test_another_model_is_refused_unless_it_is_allowed(saved: Path) -> None:
    with pytest.raises(UserError, match='  model.name = "llama3", was "qwen3"\n.* --job.allow_changed model.name'):
        check_drift(saved, load([]))
    check_drift(saved, load(["--job.allow_changed", "model.name"]))
