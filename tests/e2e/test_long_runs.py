"""A mixture of text and token shards, groups of parameters and an optimizer of the user's, in one run: stopped and
resumed, it is the run that never stopped."""

import subprocess
import sys
from pathlib import Path

import pytest
from runs import EAGER, TINY, numbers, records, saved, train

CONFIG = """
[optimizer]
name = "my_optimizers.Lion"
lr = 1e-3
[[optimizer.param_groups]]
pattern = "*norm*"
weight_decay = 0.0
[[optimizer.param_groups]]
pattern = "output.*"
lr = 1e-4
[[training.sources]]
dataset = "stdlib"
weight = 2.0
[[training.sources]]
dataset_path = "SHARDS"
name = "shards"
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("long")
    (folder / "text.jsonl").write_text('{"text": "two words, and two words again"}\n' * 100)
    script = [sys.executable, "-m", "torchtitan_graph.pretokenize", "--out", str(folder / "shards")]
    subprocess.run([*script, "--dataset_path", str(folder / "text.jsonl")], check=True, capture_output=True)
    tiny = Path(TINY).read_text().replace("[optimizer]\nlr = 1e-2\n", "")
    (folder / "run.toml").write_text(tiny + CONFIG.replace("SHARDS", str(folder / "shards")))
    return str(folder / "run.toml")


@pytest.mark.slow
def test_stopped_and_resumed(config: str, tmp_path: Path) -> None:
    runs = {"whole": [[]], "stopped": [["--training.steps", "2"], []]}
    for name, parts in runs.items():
        for part in parts:
            options = ["--job.config_file", config, "--job.dump_folder", str(tmp_path / name)]
            options += EAGER if name == "stopped" else []
            code, output = train(*options, "--lr_scheduler.total_steps", "5", *part)
            assert code == 0, output
    assert numbers(tmp_path / "stopped") == numbers(tmp_path / "whole")
    assert saved(tmp_path / "stopped", 5) == saved(tmp_path / "whole", 5)
    by_source = [record["tokens_by_source"] for record in records(tmp_path / "whole")]
    assert by_source == [record["tokens_by_source"] for record in records(tmp_path / "stopped")]
    last = records(tmp_path / "whole")[-1]
    assert sum(last["tokens_by_source"].values()) == last["tokens_seen"]
    assert last["tokens_by_source"]["stdlib"] > last["tokens_by_source"]["shards"] > 0
    state = saved(tmp_path / "whole", 5)
    assert "optim.output.weight.momentum" in state
    assert [group["pattern"] for group in state["optimizer"]] == ["", "*norm*", "output.*"]


def test_other_groups_and_weights_hold_from_a_resume_on(config: str, tmp_path: Path) -> None:
    options = ["--job.config_file", config, "--job.dump_folder", str(tmp_path), *EAGER]
    assert train(*options, "--training.steps", "2").code == 0
    sources = '[{dataset = "stdlib"}, {dataset_path = "SHARDS", name = "shards", weight = 0}]'
    shards = str(Path(config).parent / "shards")
    changes = ["--training.sources", sources.replace("SHARDS", shards), "--optimizer.param_groups", "[]"]
    code, output = train(*options, *changes)
    assert code == 0, output
    assert "the weights change from row 16 on" in output
    counts = [record["tokens_by_source"]["shards"] for record in records(tmp_path)]
    assert counts[1] > 0 and counts[1:] == [counts[1]] * 4
    assert [group["pattern"] for group in saved(tmp_path, 5)["optimizer"]] == [""]


@pytest.mark.slow
def test_two_ranks_use_the_rows_of_one(config: str, tmp_path: Path) -> None:
    options = ["--job.config_file", config, "--metrics.log_freq", "1"]
    assert train(*options, "--job.dump_folder", str(tmp_path / "one")).code == 0
    code, output = train(*options, "--job.dump_folder", str(tmp_path / "two"), ranks=2)
    assert code == 0, output
    one, two = records(tmp_path / "one"), records(tmp_path / "two")
    assert [r["tokens_by_source"] for r in one] == [r["tokens_by_source"] for r in two]
    position = [saved(tmp_path / name, 4)["train_state"]["data"] for name in ("one", "two")]
    assert position[0] == position[1]
    assert [r["loss"] for r in one] == pytest.approx([r["loss"] for r in two], rel=1e-2)
