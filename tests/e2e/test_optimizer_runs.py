"""Muon, moments in bfloat16, the moving average and skipped steps in whole runs: resumed, in each mode, exported."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import EAGER, numbers, records, saved, train
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


def leap_at_6_and_7() -> None:
    forge_leaps(6, 7)


def leap_from_6_on() -> None:
    forge_leaps(*range(6, 20))


def forge_leaps(*steps: int) -> None:
    limits = health.Leaps.limits

    def forged(leaps: health.Leaps) -> tuple[float, float]:
        return (0.0, 0.0) if len(leaps._losses) + 1 in steps else limits(leaps)

    health.Leaps.limits = forged  # type: ignore[method-assign]


def run(folder: Path, *options: str, ranks: int = 1, patch: Callable[[], None] = compare_early) -> None:
    code, output = train("--job.dump_folder", str(folder), *OPTIONS, *options, ranks=ranks, patch=patch)
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
    run(tmp_path, "--training.steps", "3", *EAGER)
    run(tmp_path, *EAGER)
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


def test_a_step_after_a_validation_of_the_average_is_of_the_weights(tmp_path: Path) -> None:
    """FSDP2 keeps gathered what validation and samples have read."""
    reading = {
        "nothing": [],
        "validation": ["--validation.enable", "--validation.freq", "1"],
        "samples": ["--samples.prompts", "['a']", "--samples.freq", "1", "--samples.length", "4"],
    }
    for name, words in reading.items():
        always = [*EAGER, *EMA, "--training.steps", "3", "--checkpoint.no-enable"]
        train(*always, *words, "--job.dump_folder", str(tmp_path / name))
    found = {name: numbers(tmp_path / name) for name in reading}
    assert found["validation"] == found["samples"] == found["nothing"] != {}


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


# --- runs that go back ------------------------------------------------------------------------------------------------

BACK = ["--training.roll_back_after", "2", "--training.steps", "8", "--lr_scheduler.total_steps", "8"]


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        dcp_to_torch_save(folder / "checkpoint" / f"step-{step}", file.name)
        return torch.load(file.name, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, []),
        (1, ["--compile.mode", "eager"]),
        (2, ["--compile.optimizer_in_graph"]),
        (2, ["--parallelism.pipeline_parallel_degree", "2", "--checkpoint.no-last_save_in_hf"]),
    ],
)
def test_a_run_goes_back_also_if_it_is_stopped(ranks: int, options: list[str], tmp_path: Path) -> None:
    """Step 5 was the last that was taken: the run goes back to step 4 after step 7, and step 8 begins from there."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run(whole, *BACK, *options, ranks=ranks, patch=leap_at_6_and_7)
    for steps in ("6", "7", "8"):
        run(stopped, *BACK, *options, "--training.steps", steps, ranks=ranks, patch=leap_at_6_and_7)
    back, before, leaping = state(stopped, 7), state(whole, 4), state(whole, 6)
    assert back.keys() == before.keys() and all(torch.equal(back[name], before[name]) for name in back)
    assert any(not torch.equal(leaping[name], before[name]) for name in leaping)  # step 5 had changed them
    assert [record["roll_backs"] for record in records(whole) if "loss" in record] == [0] * 7 + [1]
    assert numbers(stopped) == numbers(whole)
    assert saved(stopped, 8) == saved(whole, 8)
    assert any(not torch.equal(x, before[name]) for name, x in state(whole, 8).items())


@pytest.mark.slow
def test_a_run_goes_further_back_and_ends_when_it_has_gone_back_too_often(tmp_path: Path) -> None:
    words = ["--job.dump_folder", str(tmp_path), *OPTIONS, *BACK, "--training.steps", "16"]
    code, output = train(*words, "--training.most_roll_backs", "2", patch=leap_from_6_on)
    assert code == 2
    told = "2 steps in a row were skipped (training.roll_back_after)"
    assert f"step 7: {told}: going on with the weights of step 4" in output
    assert f"step 9: {told}: going on with the weights of step 2" in output
    assert "step 11: 2 steps in a row were skipped, and the run has gone back 2 times" in output
