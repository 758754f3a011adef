"""The trainer on the null GPU: it runs to its end, and waits for the device where it is known to."""

import collections
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import null_gpu
import pytest
import torch

from torchtitan_graph import train as entry
from torchtitan_graph.data import loader
from torchtitan_graph.data.feed import Feed, Microbatches
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.steps import Steps
from torchtitan_graph.trainer import Trainer

REPOSITORY = Path(__file__).parents[2]
ARGUMENTS = "--training.steps 4 --training.seq_len 128 --training.local_batch_size 2 --validation.no-enable"
# What a step waits for, by the function and the source of its line.
EXPERTS = "--model.name qwen3 --model.flavor debugmodel_moe"
BF16 = "--training.mixed_precision_param bfloat16"
FLOAT8 = f"{EXPERTS} {BF16} --model.converters quantize.grouped_mm.float8 --quantize.grouped_mm.float8.fqns experts"
OFFSETS = ("_groups", "ends = offsets_E.tolist()")  # of experts in fp32, which torch has no grouped kernel for
LANDED = ("_landed", "torch.cuda.current_stream().synchronize()")
# A norm's squares on their way to other ranks, and back.
SENT = ("_sum_over", "there = x if device is None else x.to(device)")
SUMMED = ("_sum_over", 'return c10d.wait_tensor(c10d.all_reduce(there, "sum", group.group_name)).to(x.device)')
READ = ("wait", "self._copied.synchronize()")
LAUNCHED = ("wait", "after the optimizer was launched")


def train(folder: Path, *options: str) -> list[collections.Counter[tuple[str, str]]]:
    """Train, and give the waits of each step, by the function and the line of ours that waits; and LAUNCHED where the
    optimizer was launched before the last of them."""
    steps: list[collections.Counter[tuple[str, str]]] = []
    waited: list[int] = []  # as the null GPU has it
    of_step: null_gpu.Counts = collections.Counter()
    inner, synchronize = Trainer.train_step, torch.cuda.Event.synchronize

    def note_wait() -> None:
        stack = [f for f in traceback.extract_stack() if "/torchtitan_graph/" in f.filename]
        steps[-1][stack[-1].name, stack[-1].line or ""] += 1

    def note(message: Warning | str, *rest: object, **kwargs: object) -> None:
        if "synchroniz" in str(message):
            note_wait()

    def wait(event: torch.cuda.Event) -> None:  # torch does not warn of events
        note_wait()
        of_step.update(null_gpu.take())
        steps[-1][LAUNCHED] = int(any("FusedAdam" in what for what in of_step))
        synchronize(event)

    def step(self: Trainer, *args: object) -> bool:
        steps.append(collections.Counter())
        null_gpu.take()
        of_step.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return inner(self, *args)  # type: ignore[arg-type]
            finally:
                torch.cuda.set_sync_debug_mode("default")
                of_step.update(null_gpu.take())
                waited.append(sum(number for what, number in of_step.items() if what.startswith("wait")))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", step)
        patch.setattr(torch.cuda.Event, "synchronize", wait)
        patch.setattr(sys, "argv", ["train"])
        config = str(REPOSITORY / "train_configs" / "llama3_debug.toml")
        code = entry.main(["--job.config_file", config, "--job.dump_folder", str(folder), *ARGUMENTS.split(), *options])
    assert code == 0 and len(steps) == 4
    assert waited[1:] == [waits.total() - waits[LAUNCHED] for waits in steps[1:]], "a wait has no line"
    return steps


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--compile.mode eager",
        "--compile.optimizer_in_graph",
        f"{EXPERTS} {BF16}",
        FLOAT8,
        f"{BF16} --model.attn varlen",
    ],
)
def test_a_step_waits_once(options: str, tmp_path: Path) -> None:
    _, *after_the_first = train(tmp_path, "--metrics.log_freq", "100", *options.split())
    for waits in after_the_first[:-1]:  # the last one is logged
        assert waits == {READ: 1, LAUNCHED: 1}


def test_an_optimizer_that_is_not_fused_is_launched_after_the_wait(tmp_path: Path) -> None:
    _, *after_the_first = train(tmp_path, *["--metrics.log_freq", "100", "--optimizer.implementation", "foreach"])
    assert all(waits[READ] == 1 and not waits[LAUNCHED] for waits in after_the_first[:-1])


def test_experts_in_fp32_wait_for_their_offsets_too(tmp_path: Path) -> None:
    options = f"--metrics.log_freq 100 {EXPERTS} --training.mixed_precision_param float32"
    _, *after_the_first = train(tmp_path, *options.split())
    assert all(waits.keys() == {READ, OFFSETS, LAUNCHED} and waits[READ] == 1 for waits in after_the_first[:-1])


def test_gradients_that_go_to_the_host_are_waited_for_there(tmp_path: Path) -> None:
    _, *after_the_first = train(tmp_path, *["--metrics.log_freq", "100", "--training.enable_cpu_offload"])
    for waits in after_the_first[:-1]:
        null_gpu.tell(str(dict(waits)))
        assert waits.keys() == {READ, LANDED, SENT, SUMMED, LAUNCHED} and waits[READ] == 1 and not waits[LAUNCHED]


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
    assert all(waits.total() - waits[LAUNCHED] == 2 for waits in after_the_first[:-1])


@pytest.mark.parametrize("is_pinned", [True, False])
def test_batches_are_copied_a_step_ahead_from_pinned_memory(
    is_pinned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or, as a control, none is copied ahead, and each copy is one from memory that is not pinned."""
    copies: list[null_gpu.Counts] = []
    run = Steps.train

    def launched(steps: Steps, *args: Any) -> Any:
        copies.append(null_gpu.take())  # since the last step was launched
        return run(steps, *args)

    monkeypatch.setattr(Steps, "train", launched)
    ahead: list[int] = []
    read = Feed.next

    def noted(feed: Feed) -> Microbatches | None:
        ahead.append(sum(on_device.tokens_BL.is_cuda for on_device in feed._copied))
        return read(feed)

    monkeypatch.setattr(Feed, "next", noted)
    if not is_pinned:
        make = loader.StatefulDataLoader
        monkeypatch.setattr(loader, "StatefulDataLoader", lambda *args, **kw: make(*args, **kw | {"pin_memory": False}))
    train(tmp_path, "--metrics.log_freq", "100", "--checkpoint.no-enable")
    assert ahead == ([0, 1, 1, 1] if is_pinned else [0, 0, 0, 0])
    loose = "copy to the device, not pinned"
    assert all((counts[loose] >= 4) != is_pinned for counts in copies[1:])
