"""Samples as training goes: the texts of the model, in every place that holds text, and nothing else changes."""

from pathlib import Path

import pytest
from runs import numbers, records, saved, train

SAMPLES = ["--samples.prompts", "import os,def f(", "--samples.freq", "2", "--samples.length", "5"]
TP = ["--parallelism.tensor_parallel_degree", "2"]


def sampled(folder: Path, *options: str, ranks: int = 1) -> list[list[dict[str, str]]]:
    code, output = train("--job.dump_folder", str(folder), "--training.steps", "3", *options, ranks=ranks)
    assert code == 0, output
    return [record["samples"] for record in records(folder) if "samples" in record]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["graph", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_run_is_bitwise_the_same_with_and_without_them(mode: str, tmp_path: Path) -> None:
    options = ["--compile.mode", mode]
    found = sampled(tmp_path / "with", *options, *SAMPLES, "--samples.temperature", "1")
    assert [[x["prompt"] for x in each] for each in found] == [["import os", "def f("]] * 2  # after steps 2 and 3
    assert found[0][0]["text"] and found[0] != found[1]
    assert not sampled(tmp_path / "without", *options)
    assert numbers(tmp_path / "with") == numbers(tmp_path / "without")
    assert saved(tmp_path / "with", 3) == saved(tmp_path / "without", 3)


LAYOUTS = {
    "FSDP 2": ([], 2),
    "TP 2": (TP, 2),
    "FSDP 2, eager": (["--compile.mode", "eager"], 2),
    "TP 2, eager": ([*TP, "--compile.mode", "eager"], 2),
    "HSDP 2 x 2": (["--parallelism.data_parallel_replicate_degree", "2"], 4),
    "FSDP 2 x TP 2": (TP, 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_are_the_same_in_every_layout(layout: str, tmp_path: Path) -> None:
    still = ["--optimizer.lr", "0", "--training.mixed_precision_param", "float32", "--checkpoint.no-enable", *SAMPLES]
    still += ["--training.global_batch_size", "-1"]
    options, ranks = LAYOUTS[layout]
    assert sampled(tmp_path / "several", *still, *options, ranks=ranks) == sampled(tmp_path / "one", *still)


@pytest.mark.slow
def test_tensorboard_shows_them(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ((first, _), last) = sampled(tmp_path, *SAMPLES, "--metrics.enable_tensorboard", "--checkpoint.no-enable")
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples/1/text_summary")]
    whole = [f"{x['prompt']}{x['text']}" for x in (first, last[0])]
    assert texts == ["\n".join("    " + line for line in text.splitlines()) for text in whole]
