"""A run whose rows hold whole documents: batches of several lengths go through one graph, as they do eagerly."""

from pathlib import Path

import pytest
import torch
from runs import EAGER, numbers, records, saved, train


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


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older traces of attention are of one length")
def test_padding_is_in_no_number_of_experts(tmp_path: Path) -> None:
    """Batches of one row, here in eager mode, have no padding; those of four, through a graph, have."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(40):
        (corpus / f"{number}.py").write_text(f"x = {number}\n" * (1 + number % 7))
    options = ["--training.dataset_path", str(corpus), "--training.dynamic_seq_len", "--training.steps", "2"]
    options += ["--model.name", "my_models.experts", "--training.mixed_precision_param", "float32"]
    options += ["--moe.load_balance_loss", "0.1", "--moe.load_balance_over", "sequence", "--moe.router_z_loss", "0.01"]
    options += ["--training.global_batch_size", "4", "--metrics.log_expert_loads"]
    for rows, mode in {"4": [], "1": EAGER}.items():
        folder = "--job.dump_folder", str(tmp_path / rows)
        code, output = train(*folder, "--training.local_batch_size", rows, *mode, *options)
        assert code == 0, output
    for four, one in zip(records(tmp_path / "4"), records(tmp_path / "1"), strict=True):
        assert four["expert_loads"] == one["expert_loads"] and four["tokens_seen"] == one["tokens_seen"]
        assert four["loss_terms"] == pytest.approx(one["loss_terms"], rel=2e-6)
        assert four["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-5)
