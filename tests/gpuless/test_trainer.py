"""The trainer on the null GPU: it runs to its end, and waits for the device where it is known to."""

import collections
import sys
import traceback
import warnings
from pathlib import Path

import null_gpu
import pytest
import torch

from torchtitan_graph import train as entry
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.trainer import Trainer

REPOSITORY = Path(__file__).parents[2]
ARGUMENTS = "--training.steps 4 --training.seq_len 128 --training.local_batch_size 2 --validation.no-enable"
# What a step waits for, by the function and the source of its line.
EXPERTS = "--model.name qwen3 --model.flavor debugmodel_moe"
BF16 = "--training.mixed_precision_param bfloat16"
OFFSETS = ("_groups", "ends = offsets_E.tolist()")  # of experts in fp32, which torch has no grouped kernel for
READ = ("_read", "numbers = iter(torch.cat(here).tolist())")


def train(folder: Path, *options: str) -> list[collections.Counter[tuple[str, str]]]:
    """Train, and give the waits of each step, by the function and the line of ours that waits."""
    steps: list[collections.Counter[tuple[str, str]]] = []
    inner = Trainer.train_step

    def note(message: Warning | str, *rest: object, **kwargs: object) -> None:
        if "synchroniz" in str(message):
            stack = [f for f in traceback.extract_stack() if "/torchtitan_graph/" in f.filename]
            steps[-1][stack[-1].name, stack[-1].line or ""] += 1

    def step(self: Trainer, *args: object) -> bool:
        steps.append(collections.Counter())
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return inner(self, *args)  # type: ignore[arg-type]
            finally:
                torch.cuda.set_sync_debug_mode("default")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", step)
        patch.setattr(sys, "argv", ["train"])
        config = str(REPOSITORY / "train_configs" / "llama3_debug.toml")
        code = entry.main(["--job.config_file", config, "--job.dump_folder", str(folder), *ARGUMENTS.split(), *options])
    assert code == 0 and len(steps) == 4
    return steps


@pytest.mark.parametrize("options", ["", "--compile.mode eager", "--compile.optimizer_in_graph", f"{EXPERTS} {BF16}"])
def test_a_step_waits_once(options: str, tmp_path: Path) -> None:
    _, *after_the_first = train(tmp_path, "--metrics.log_freq", "100", *options.split())
    for waits in after_the_first[:-1]:  # the last one is logged
        assert waits == {READ: 1}


def test_experts_in_fp32_wait_for_their_offsets_too(tmp_path: Path) -> None:
    options = f"--metrics.log_freq 100 {EXPERTS} --training.mixed_precision_param float32"
    _, *after_the_first = train(tmp_path, *options.split())
    assert all(waits.keys() == {READ, OFFSETS} and waits[READ] == 1 for waits in after_the_first[:-1])


def test_validation_waits_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, found = Trainer.validate, []

    def validate(self: Trainer) -> float:
        null_gpu.take()
        loss = inner(self)
        found.append({what: n for what, n in null_gpu.take().items() if what.startswith("wait ")})
        return loss

    monkeypatch.setattr(Trainer, "validate", validate)
    train(tmp_path, "--validation.enable", "--validation.freq", "2", "--validation.steps", "3")
    assert found[-1] == {"wait cudaStreamSynchronize": 1}


def test_a_number_that_is_read_in_the_step_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "after_step", lambda model, state: next(model.parameters()).sum().item())
    _, *after_the_first = train(tmp_path, "--metrics.log_freq", "100")
    assert all(waits.total() == 2 for waits in after_the_first[:-1])
