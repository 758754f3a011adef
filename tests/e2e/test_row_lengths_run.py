"""A run whose rows hold whole documents: batches of several lengths go through one graph, as they do eagerly."""

from pathlib import Path

import pytest
import torch
from runs import numbers, saved, train


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older traces of attention are of one length")
def test_a_run_on_rows_of_several_lengths_is_that_of_eager(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(40):
        (corpus / f"{number}.py").write_text(f"x = {number}\n" * (number % 13))
    options = ["--training.dataset_path", str(corpus), "--training.dynamic_seq_len", "--training.steps", "3"]
    for mode in ("graph", "eager"):
        folder = str(tmp_path / mode)
        code, output = train("--job.dump_folder", folder, "--compile.mode", mode, *options, ranks=2)
        assert code == 0, output
        assert "rows of up to 64 tokens" in output
    assert numbers(tmp_path / "graph") == numbers(tmp_path / "eager")
    assert saved(tmp_path / "graph", 3) == saved(tmp_path / "eager", 3)
