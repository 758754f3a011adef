"""A run that memory runs out for says what held it."""

import re
import sys
from pathlib import Path

import patched_train
import pytest
from runs import train


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process' memory")
def test_memory_that_runs_out_is_reported(tmp_path: Path) -> None:
    # Scores are masked by 1024 x 128 x 128 bfloat16, 32 MiB, which fit into what is left; a step takes 314 MiB at its
    # peak, which do not, even where the masks of the first step make room.
    options = ["--training.local_batch_size", "1024", "--training.global_batch_size", "-1", "--training.seq_len", "128"]
    code, output = train("--job.dump_folder", str(tmp_path), *options, patch=patched_train.have_little_memory_left)
    assert code == 1, output
    found = re.search(r"rank 0, after 1 steps: out of memory: (.*)", output, re.DOTALL)
    assert found, output
    report = found[1]
    largest = report[report.index("the largest tensors:") : report.index("what takes less memory:")].splitlines()
    assert re.search(r"values of the step: .*\w+\[[\d, ]+\]", "\n".join(largest)), report
    assert "  training.local_batch_size below 1024; " in report


def test_memory_that_runs_out_in_setup_is_reported(tmp_path: Path) -> None:
    code, output = train("--job.dump_folder", str(tmp_path), patch=patched_train.ask_for_a_pebibyte_in_setup)
    assert code == 1, output
    report = output[output.index("rank 0, after 0 steps: out of memory: ") :]
    held, largest, rest = report.split("\n", 3)[1:]
    assert held.startswith("held: parameters 0.") and largest == "the largest tensors:"
    assert len(re.findall(r"^ +[\d.]+ GiB  parameters: ", rest, re.MULTILINE)) == 2, report
    assert "what takes less memory:" in rest


@pytest.mark.slow
def test_a_step_that_can_not_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    """Two ranks share a machine of 20 MiB, and each needs more than half with all activations kept."""
    options = ["--training.local_batch_size", "16", "--training.global_batch_size", "-1", "--training.seq_len", "256"]
    options += ["--activation_checkpoint.mode", "none", "--job.dump_folder", str(tmp_path)]
    code, output = train(*options, ranks=2, patch=patched_train.have_a_little_memory, MEMORY_GIB="0.020")
    assert code == 2, output
    needs, has, others = re.findall(r"a rank needs ([\d.]+) GiB, and has ([\d.]+): these would fit: (.*)", output)[0]
    assert float(needs) > float(has)
    assert 'activation_checkpoint.mode = "memory_budget", memory_budget = 0: 0.00' in others
    assert "Traceback" not in output and 'mode = "none"' not in others
