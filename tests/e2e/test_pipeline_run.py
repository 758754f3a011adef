"""A run in pipeline stages is that of one rank: loss, norm, validation, histograms, and the weights it began with."""

import json
from pathlib import Path
from typing import Any

import pytest
from runs import train

from torchtitan_graph.analysis.measured import find_trace, measured

OPTIONS = ("--training.mixed_precision_param", "float32", "--validation.enable", "--validation.freq", "5")
STAGES = ("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble")


def numbers(folder: Path) -> list[dict[str, Any]]:
    keys = ("step", "loss", "grad_norm", "validation_loss")
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{key: record[key] for key in keys if key in record} for record in records]


@pytest.mark.slow
def test_two_stages_train_as_one_rank_does(tmp_path: Path) -> None:
    one = train("--job.dump_folder", str(tmp_path / "one"), *OPTIONS, "--checkpoint.last_save_in_hf")
    assert one.code == 0, one.output
    looked_at = ("--metrics.enable_tensorboard", "--metrics.histogram_freq", "5", "--debug.dump_graphs")
    looked_at += ("--profiling.enable_profiling", "--profiling.profile_freq", "5")
    # Four stages for two layers: the first has only the embedding, the last only the output.
    two = train("--job.dump_folder", str(tmp_path / "two"), *OPTIONS, *STAGES, *looked_at, ranks=2)
    assert two.code == 0, two.output
    for expected, found in zip(numbers(tmp_path / "one"), numbers(tmp_path / "two"), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    weights = ("--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path")
    weights += (str(tmp_path / "one" / "checkpoint" / "step-5-hf"), "--optimizer.lr", "0", "--training.steps", "1")
    read = train("--job.dump_folder", str(tmp_path / "read"), *OPTIONS, *STAGES, *weights, ranks=2)
    assert read.code == 0, read.output
    last = numbers(tmp_path / "one")[-1]["validation_loss"]
    assert numbers(tmp_path / "read")[-1]["validation_loss"] == pytest.approx(last, rel=1e-5)
    graphs = {path.parent.name for path in (tmp_path / "two" / "graphs").glob("*/*.py")}
    assert graphs == {f"stage_{stage}" for stage in range(4)}
    for rank, stages in enumerate(((0, 3), (1, 2))):
        seconds = measured(find_trace(tmp_path / "two", rank, 2))
        parts = [(f"stage {stage}, forward", f"stage {stage}, weight") for stage in stages]
        assert all(sum(seconds[part].values()) > 0 for each in parts for part in each)
