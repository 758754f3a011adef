"""A run on graphs that were precompiled is the run that traces, and other runs are refused them."""

from pathlib import Path

import pytest
from runs import Result, numbers, precompile, records, saved, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

OPTIONS = ("--validation.enable", "--validation.freq", "3", "--compile.record_call_hierarchy")


@pytest.mark.slow
def test_a_precompiled_run_is_the_one_that_traces(reference: tuple[Path, Result], tmp_path: Path) -> None:
    """To the bit, optimizer included; its log says that nothing was traced. The fast tier's is test_float8_run.py."""
    graphs, run = ("--compile.precompiled", str(tmp_path / "graphs")), tmp_path / "run"
    made = precompile(*OPTIONS, *graphs, "--compile.optimizer_in_graph", ranks=2)  # which the run has not
    assert made.code == 0 and "1 different graphs for 2 ranks" in made.output, made.output
    assert "compile.optimizer_in_graph: that graph is not stored; each run traces it in its first step" in made.output
    assert {path.suffix for path in (tmp_path / "graphs").iterdir()} == {".json", ".gz"}
    watched = ("--metrics.enable_tensorboard", "--profiling.enable_profiling", "--profiling.profile_freq", "4")
    found = train("--job.dump_folder", str(run), *OPTIONS, *graphs, *watched, ranks=2)
    assert found.code == 0 and "read from" in found.output and "traced" not in found.output, found.output
    assert numbers(run) == numbers(reference[0])
    (table,) = EventAccumulator(str(run / "tb")).Reload().Tensors("scopes/text_summary")
    assert b"attention:Attention" in table.tensor_proto.string_val[0], "the hierarchy was stored"
    losses = [[r["validation_loss"] for r in records(f) if "validation_loss" in r] for f in (run, reference[0])]
    assert losses[0] == losses[1] != []
    assert saved(run, 4) == saved(reference[0], 4)
    other = train("--job.dump_folder", str(tmp_path / "other"), *OPTIONS, *graphs, "--training.seq_len", "32")
    assert other.code == 2 and "training.seq_len is 32, was 64" in other.output, other.output
    assert "degree of dp_shard is 1, was 2" in other.output and "NGPU=1 python -m" in other.output


def test_precompile_asks_for_a_folder() -> None:
    found = precompile(ranks=1)
    assert found.code == 2 and "compile.precompiled is not set" in found.output
