"""A run whose attention is within documents, as long as they come: eager's numbers, also when it is resumed."""

from pathlib import Path

import pytest
from runs import numbers, saved, train


@pytest.mark.slow
def test_a_run_is_that_of_eager_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    options = ["--model.attn", "varlen", "--validation.enable", "--validation.freq", "2"]
    for folder, more in {
        "eager": ["--compile.mode", "eager", "--training.steps", "4"],
        "graph": ["--training.steps", "4"],
        "in two": ["--training.steps", "2"],
    }.items():
        code, output = train("--job.dump_folder", str(tmp_path / folder), *options, *more)
        assert code == 0, output
    code, output = train("--job.dump_folder", str(tmp_path / "in two"), *options, "--training.steps", "4")
    assert code == 0 and "resuming after step 2" in output
    expected = saved(tmp_path / "eager", 4)
    assert saved(tmp_path / "graph", 4) == expected and saved(tmp_path / "in two", 4) == expected
    assert numbers(tmp_path / "graph") == numbers(tmp_path / "eager")


def test_what_it_can_not_do_is_refused_by_name(tmp_path: Path) -> None:
    folder = ["--job.dump_folder", str(tmp_path), "--model.attn", "varlen"]
    code, output = train(*folder, "--compile.cuda_graphs")
    assert code == 2 and "not with compile.cuda_graphs: the number of documents is not part of a" in output
    dry = ["--comm.mode", "fake_backend", "--comm.fake_device", "H100", "--training.mixed_precision_param", "float32"]
    code, output = train(*folder, *dry)
    assert code == 2 and "in bfloat16 or float16, not in torch.float32" in output
    code, output = train(*folder, *dry[:-1], "bfloat16", "--model.name", "gpt_oss", "--model.flavor", "debugmodel")
    assert code == 2 and "on a GPU its kernels have no windows here, and the mask 'sliding' of this model" in output
