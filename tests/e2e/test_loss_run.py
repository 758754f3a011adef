"""Whole runs with a loss of the user's own: one rank, pipeline stages and a resume agree, also in metrics."""

import json
from pathlib import Path
from typing import Any

import pytest
from runs import train

OWN = ("--loss.name", "own_loss.focal.focal_loss", "--training.mixed_precision_param", "float32")
OPTIONS = (*OWN, "--validation.enable", "--validation.freq", "5")


def numbers(folder: Path) -> list[dict[str, Any]]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {**record.get("metrics", {}), **{k: record[k] for k in ("step", "loss", "validation_loss") if k in record}}
        for record in records
    ]


@pytest.mark.slow
def test_two_stages_train_as_one_rank_does(tmp_path: Path) -> None:
    stages = ("--parallelism.pipeline_parallel_degree", "2")
    for name, more, ranks in (("one", (), 1), ("two", stages, 2)):
        run = train("--job.dump_folder", str(tmp_path / name), *OPTIONS, *more, ranks=ranks)
        assert run.code == 0, run.output
    one, two = numbers(tmp_path / "one"), numbers(tmp_path / "two")
    assert "accuracy" in one[0] and "validation_loss" in one[-1]
    for expected, found in zip(one, two, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    for name, parts in (("whole", ("5",)), ("resumed", ("4", "5"))):
        for steps in parts:
            more = ("--training.steps", steps, "--lr_scheduler.total_steps", "5")
            run = train("--job.dump_folder", str(tmp_path / name), *OWN, *more, ranks=2)
            assert run.code == 0, run.output
    assert numbers(tmp_path / "resumed") == numbers(tmp_path / "whole")
