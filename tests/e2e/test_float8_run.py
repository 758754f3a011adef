"""A run in float8 goes on from its checkpoint to the bit, in the other mode too, and on graphs that were stored."""

import shutil
from pathlib import Path

from runs import numbers, precompile, saved, train

FLOAT8 = ("--model.converters", "float8", "--quantize.linear.float8.filter_fqns", "output")
DELAYED = ("--quantize.linear.float8.recipe_name", "tensorwise_delayed")
OPTIONS = (*FLOAT8, *DELAYED, "--validation.enable", "--validation.freq", "1", "--lr_scheduler.total_steps", "4")


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """On graphs that were precompiled without a stop; traced, stopped after two steps and then eager."""
    whole, first, then = (tmp_path / name for name in ("whole", "first", "then"))
    graphs = ("--compile.precompiled", str(tmp_path / "graphs"), "--training.steps", "4")
    made = precompile(*OPTIONS, *graphs, ranks=2)
    assert made.code == 0, made.output
    found = train("--job.dump_folder", str(whole), *OPTIONS, *graphs, ranks=2)
    assert found.code == 0 and "traced" not in found.output, found.output
    assert "float8: 14 linear layers, tensorwise_delayed" in found.output and "quantised weights" in found.output
    code, output = train("--job.dump_folder", str(first), *OPTIONS, "--training.steps", "2", ranks=2)
    assert code == 0 and "traced 1 kind of block for 2 blocks" in output, output
    shutil.copytree(first, then)
    options = (*OPTIONS, "--training.steps", "4", "--compile.mode", "eager")
    code, output = train("--job.dump_folder", str(then), *options, ranks=2)
    assert code == 0 and "resuming after step 2" in output, output
    assert numbers(then) == numbers(whole) and saved(then, 4) == saved(whole, 4)
    assert any(name.endswith("amax_history") for name in saved(then, 4))
    code, output = train("--job.dump_folder", str(first), "--training.steps", "3")
    assert code == 2 and "unexpected: model.layers.0.attention.wq.amax_history" in output, output
