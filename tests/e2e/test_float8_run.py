"""A run in float8 goes on from its checkpoint to the bit, in the other mode too, and on graphs that were stored."""

import shutil
from pathlib import Path

import pytest
from runs import numbers, precompile, saved, train

MODEL = ("--model.name", "my_models.experts")
LINEARS = ("--quantize.linear.float8.filter_fqns", "output,wkv_b,feed_forward,shared_experts")
EXPERTS = ("--quantize.grouped_mm.float8.fqns", "experts")
DELAYED = [
    word
    for kind in ("linear", "grouped_mm")
    for word in (f"--quantize.{kind}.float8.recipe_name", "tensorwise_delayed")
]
FLOAT8 = ("--model.converters", "float8,quantize.grouped_mm.float8", *LINEARS, *EXPERTS, *DELAYED)
OPTIONS = (*MODEL, *FLOAT8, "--validation.enable", "--validation.freq", "1", "--lr_scheduler.total_steps", "4")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_it_goes_on_where_it_was(ranks: int, tmp_path: Path) -> None:
    """On graphs that were precompiled without a stop; traced, stopped after two steps and then eager."""
    whole, first, then = (tmp_path / name for name in ("whole", "first", "then"))
    graphs = ("--compile.precompiled", str(tmp_path / "graphs"), "--training.steps", "4")
    made = precompile(*OPTIONS, *graphs, ranks=ranks)
    assert made.code == 0, made.output
    found = train("--job.dump_folder", str(whole), *OPTIONS, *graphs, ranks=ranks)
    assert found.code == 0 and "traced" not in found.output, found.output
    assert "float8: 9 linear layers, tensorwise_delayed" in found.output and "quantised weights" in found.output
    assert "float8: experts of 2 layers, tensorwise_delayed" in found.output
    code, output = train("--job.dump_folder", str(first), *OPTIONS, "--training.steps", "2", ranks=ranks)
    assert code == 0 and "traced 2 kinds of block for 3 blocks" in output, output
    shutil.copytree(first, then)
    options = (*OPTIONS, "--training.steps", "4", "--compile.mode", "eager")
    code, output = train("--job.dump_folder", str(then), *options, ranks=ranks)
    assert code == 0 and "resuming after step 2" in output, output
    assert numbers(then) == numbers(whole) and saved(then, 4) == saved(whole, 4)
    assert any(name.endswith("experts.kept.w1.amax_history") for name in saved(then, 4))
    code, output = train("--job.dump_folder", str(first), *MODEL, "--training.steps", "3")
    assert code == 2 and "unexpected: model.layers.0.attention." in output and ".amax_history" in output, output
