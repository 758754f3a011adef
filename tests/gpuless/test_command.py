"""`python -m torchtitan_graph.train` on the null GPU, as a user starts it: each option runs to its end and leaves what
it is there for, or is refused with what to do."""

import contextlib
import gzip
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import null_gpu
import pytest
import torch
from torch import Tensor

from torchtitan_graph.check.matrix import bits_that_differ
from torchtitan_graph.checkpoint.metadata import read_metadata
from torchtitan_graph.checkpoint.tensors import load_tensors

REPOSITORY = Path(__file__).parents[2]
SMALL = (
    "--training.seq_len 128 --validation.seq_len 128 --validation.steps 1 --validation.freq 2 --checkpoint.interval 2"
    " --metrics.log_freq 1 --lr_scheduler.warmup_steps 1 --lr_scheduler.decay_ratio 0 --model.attn sdpa"
    " --checkpoint.no-last_save_model_only"
)


@contextlib.contextmanager
def started(folder: Path, *options: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "torchtitan_graph.train", "--job.dump_folder", str(folder)]
    command += ["--job.config_file", str(REPOSITORY / "train_configs" / "llama3_debug.toml"), *SMALL.split(), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | env, **pipes)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def train(folder: Path, options: str = "", steps: int = 4, **env: str) -> tuple[int, str]:
    with started(folder, "--training.steps", str(steps), *options.split(), **env) as process:
        output, _ = process.communicate(timeout=600)
    return process.returncode, output


def end_of(output: str) -> str:
    return output[-3000:]


def saved(folder: Path, step: int) -> dict[str, Tensor]:
    """Read a checkpoint's tensors."""
    path = folder / "checkpoint" / f"step-{step}"
    metadata = read_metadata(path)
    there = metadata.state_dict_metadata.items()
    tensors = {name: torch.empty(x.size, dtype=x.properties.dtype) for name, x in there}
    load_tensors(path, metadata, tensors)
    return tensors


# --- what runs to its end ---------------------------------------------------------------------------------------------

CPU = {"LD_PRELOAD": ""}
CACHING = {"PYTORCH_NO_CUDA_MEMORY_CACHING": ""}  # as without the variable: memory is torch's, and comes back used


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_checkpoint_goes_to_the_device_and_back(mode: str, tmp_path: Path) -> None:
    """A CPU trains two steps; the null GPU goes on, touches no weight, and saves the same bits."""
    code, output = train(tmp_path, steps=2, **CPU)
    assert code == 0, end_of(output)
    code, output = train(tmp_path, f"--checkpoint.async_mode {mode}")
    assert code == 0 and "resuming after step 2" in output, end_of(output)
    first, second = saved(tmp_path, 2), saved(tmp_path, 4)
    null_gpu.tell(f"{len(second)} tensors, the same ones")
    assert all(x.any() for x in first.values()) and bits_that_differ(first, second) == []


def test_a_checkpoint_of_other_weights_is_found(tmp_path: Path) -> None:
    assert train(tmp_path, **CPU)[0] == 0
    first, second = saved(tmp_path, 2), saved(tmp_path, 4)
    assert len(bits_that_differ(first, second)) == len(first)


OPTIONS = {
    "CPU offload": "--training.enable_cpu_offload",
    "optimizer in the graph": "--compile.optimizer_in_graph",
    "eager": "--compile.mode eager",
    "float8": "--model.converters float8 --training.mixed_precision_param bfloat16",
    "gradient accumulation": "--training.global_batch_size 4",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_runs_to_its_end(name: str, tmp_path: Path) -> None:
    """With TensorBoard, validation and checkpoints; and says nothing that the user could do nothing about."""
    code, output = train(tmp_path, OPTIONS[name])
    assert code == 0, end_of(output)
    assert len(re.findall(r"step \d/4 .* validation loss", output)) == 2
    assert "saved checkpoint" in output and json.loads((tmp_path / "status.json").read_text())["state"] == "finished"
    tags = {tag for file in (tmp_path / "tb").iterdir() for tag in read_events(file)}
    assert {"train/loss", "validation/loss"} <= tags
    assert not re.findall(r"Warning: .*", output), end_of(output)


def read_events(file: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return set(EventAccumulator(str(file)).Reload().Tags()["scalars"])


def test_snapshots_and_traces_are_written(tmp_path: Path) -> None:
    profiling = "--profiling.enable_memory_snapshot --profiling.enable_profiling --profiling.profile_freq 4"
    code, output = train(tmp_path, profiling, **CACHING)
    assert code == 0, end_of(output)
    snapshot = pickle.loads((tmp_path / "memory_snapshot/step-4/rank0.pickle").read_bytes())
    trace = json.loads(gzip.decompress((tmp_path / "profile_traces/step-4/rank0.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    null_gpu.tell(f"{len(snapshot['device_traces'][0])} events of memory, {len(trace['traceEvents'])} in the trace")
    assert snapshot["segments"] and len(snapshot["device_traces"][0]) > 1000
    assert {"aten::mm", "cudaLaunchKernel"} & names == {"aten::mm"}  # what the device does only a GPU's driver tells
    peak = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    null_gpu.tell(str(peak))


# --- what ends before -------------------------------------------------------------------------------------------------


def test_a_step_that_can_not_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    code, output = train(tmp_path, "--training.local_batch_size 64", NULL_GPU_MEMORY_GIB="0.4", **CACHING)
    null_gpu.tell(output.strip().splitlines()[-1])
    assert code == 2 and "Traceback" not in output, end_of(output)
    needs, has = re.findall(r"a rank needs ([\d.]+) GiB, and has ([\d.]+): these would fit: ", output)[0]
    assert float(has) == 0.4 < float(needs)


def test_memory_that_runs_out_is_reported(tmp_path: Path) -> None:
    """In eager mode nothing tells it before."""
    options = "--compile.mode eager --training.local_batch_size 64 --profiling.enable_memory_snapshot"
    code, output = train(tmp_path, options, NULL_GPU_MEMORY_GIB="0.5", **CACHING)
    assert code == 1, end_of(output)
    report = output[output.index("rank 0, after 0 steps: out of memory: ") :].splitlines()
    for line in report[:3]:
        null_gpu.tell(line)
    assert "CUDA out of memory. Tried to allocate" in report[0] and "held: parameters 0." in report[1]
    assert any("training.local_batch_size below 64" in line for line in report)
    snapshot = pickle.loads((tmp_path / "memory_snapshot/step-1-out-of-memory/rank0.pickle").read_bytes())
    assert snapshot["segments"]


def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    """The first one is told to all ranks by a kernel, which does not run here: the step's end takes no notice of it."""
    with started(tmp_path, "--training.steps", "100000", "--checkpoint.interval", "100000") as process:
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if re.search(r"step +3/", line):
                break
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(2)
        output += process.stdout.read()
        assert process.wait(60) == 130, end_of(output)
    assert "stopped by Ctrl-C at once; start it again to resume" in output


REFUSED = {
    "--parallelism.enable_async_tensor_parallel": "tensor_parallel_degree = 1: .* nothing is sent; use a degree above",
}


@pytest.mark.parametrize("options", REFUSED)
def test_it_is_refused_with_what_to_do(options: str, tmp_path: Path) -> None:
    code, output = train(tmp_path, options)
    null_gpu.tell(output.strip().splitlines()[-1])
    assert code == 2 and re.search(REFUSED[options], output) and "Traceback" not in output, end_of(output)
