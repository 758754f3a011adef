"""A run whose rows hold whole documents: batches of several lengths go through one graph, as they do eagerly."""

from pathlib import Path

import pytest
import torch
from runs import numbers, saved, train


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older traces of attention are of one length")
@pytest.mark.parametrize(
    ("attn", "seq_len", "capture", "ranks"),
    [
        ("sdpa", 64, "make_fx", 1),
        pytest.param("sdpa", 64, "make_fx", 2, marks=pytest.mark.slow),
        pytest.param("flex", 160, "dynamo", 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_on_rows_of_several_lengths_is_that_of_eager(
    tmp_path: Path, attn: str, seq_len: int, capture: str, ranks: int
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(40):
        (corpus / f"{number}.py").write_text(f"x = {number}\n" * (number % 13))
    options = ["--training.dataset_path", str(corpus), "--training.dynamic_seq_len", "--training.steps", "3"]
    options += ["--model.attn", attn, "--training.seq_len", str(seq_len)]
    for mode, how in {"graph": ["--compile.capture", capture], "eager": []}.items():
        folder = str(tmp_path / mode)
        code, output = train("--job.dump_folder", folder, "--compile.mode", mode, *how, *options, ranks=ranks)
        assert code == 0, output
        assert f"rows of up to {seq_len} tokens" in output
    assert numbers(tmp_path / "graph") == numbers(tmp_path / "eager")
    assert saved(tmp_path / "graph", 3) == saved(tmp_path / "eager", 3)
