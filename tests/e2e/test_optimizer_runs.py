"""Muon, moments in bfloat16, the moving average and skipped steps in whole runs: resumed, in each mode, exported."""

import tempfile
from pathlib import Path

import pytest
import torch
from runs import numbers, records, saved, train
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from torchtitan_graph.metrics import health

EMA = ["--optimizer.ema_decay", "0.5"]
OPTIONS = [
    *("--optimizer.name", "Muon", "--optimizer.state_dtype", "bfloat16", *EMA),
    *("--training.skip_leaps", "0.75", "--lr_scheduler.total_steps", "5", "--checkpoint.last_save_in_hf"),
    "--validation.enable",
]
WITHOUT_EMA = [word for word in OPTIONS if word not in EMA]
MODES = {
    "optimizer in graph": ["--compile.optimizer_in_graph"],
    "eager": ["--compile.mode", "eager"],
    "Adam": ["--optimizer.name", "Adam", "--optimizer.implementation", "foreach", "--compile.optimizer_in_graph"],
}


def compare_early() -> None:
    """Skip steps that leap from the third on: the runs have five."""
    health.FEWEST = 2


def run(folder: Path, *options: str, ranks: int = 1) -> None:
    code, output = train("--job.dump_folder", str(folder), *OPTIONS, *options, ranks=ranks, patch=compare_early)
    assert code == 0, output


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        dcp_to_torch_save(folder / "checkpoint" / "step-5", file.name)
        return torch.load(file.name, weights_only=True)


def test_a_run_that_was_stopped_skips_the_same_steps_and_ends_with_the_same_bits(whole: Path, tmp_path: Path) -> None:
    run(tmp_path, "--training.steps", "3")
    run(tmp_path)
    skipped = [record["skipped_steps"] for record in records(whole) if "loss" in record]
    assert skipped[-1] > skipped[1] == 0
    assert skipped == [record["skipped_steps"] for record in records(tmp_path) if "loss" in record]
    assert numbers(tmp_path) == numbers(whole)
    assert saved(tmp_path, 5) == saved(whole, 5)


def test_the_average_is_exported_and_the_weights_are_saved(whole: Path) -> None:
    here = tensors(whole)
    exported = load_file(whole / "checkpoint" / "step-5-hf" / "model.safetensors")
    weight, average = (here[key] for key in ("model.norm.weight", "optim.norm.weight.average"))
    assert torch.equal(exported["model.norm.weight"], average) and not torch.equal(average, weight)
    assert here["optim.layers.0.attention.wq.weight.momentum_buffer"].dtype == torch.bfloat16


@pytest.mark.slow
def test_validation_is_of_the_average(whole: Path, tmp_path: Path) -> None:
    """Which, with a decay of 0, is the weights."""
    run(tmp_path / "zero", "--optimizer.ema_decay", "0")
    train("--job.dump_folder", str(tmp_path / "none"), *WITHOUT_EMA, patch=compare_early)
    of_average, of_weights, without = (
        [record["validation_loss"] for record in records(folder) if "validation_loss" in record]
        for folder in (whole, tmp_path / "zero", tmp_path / "none")
    )
    assert of_weights == without != of_average and without


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_on_two_ranks(mode: str, tmp_path: Path) -> None:
    """Against the graph's mode with the optimizer outside."""
    outside = [] if mode != "Adam" else MODES["Adam"][:-1]
    run(tmp_path / "graph", *outside, ranks=2)
    run(tmp_path / "other", *MODES[mode], ranks=2)
    assert numbers(tmp_path / "graph") == numbers(tmp_path / "other")
    assert saved(tmp_path / "graph", 5) == saved(tmp_path / "other", 5)
