"""CUDA graphs on the null GPU, which refuses in a capture what the driver refuses: waits, copies from memory that is
not pinned, and what came before on other streams. What is allocated lies in the recorder's pool."""

import os

os.environ.pop("PYTORCH_NO_CUDA_MEMORY_CACHING", None)  # the pool is the caching allocator's

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import null_gpu
import pytest
import torch
from test_trainer import BF16, EXPERTS, REPOSITORY
from torch import Tensor

from torchtitan_graph import device as devices
from torchtitan_graph import train as entry
from torchtitan_graph.runtime import pieces
from torchtitan_graph.trainer import Trainer

QUIET = (
    "--training.steps 5 --training.seq_len 128 --training.local_batch_size 2 --metrics.log_freq 100"
    " --validation.no-enable --checkpoint.no-enable --compile.cuda_graphs"
)
SDPA, OPTIMIZER = "--model.attn sdpa", "--compile.optimizer_in_graph"
FP32 = "--training.mixed_precision_param float32"


def train(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: str, before: Callable[[Trainer], None] = lambda _: None
) -> list[null_gpu.Counts]:
    """Train, and give what each step asks of the GPU; `before` is called before each of them."""
    found: list[null_gpu.Counts] = []
    inner = Trainer.train_step

    def step(self: Trainer, *args: object) -> bool:
        before(self)
        null_gpu.take()
        try:
            return inner(self, *args)  # type: ignore[arg-type]
        finally:
            found.append(null_gpu.take())

    monkeypatch.setattr(Trainer, "train_step", step)
    config = str(REPOSITORY / "train_configs" / "llama3_debug.toml")
    arguments = ["--job.config_file", config, "--job.dump_folder", str(folder), *QUIET.split(), *options.split()]
    assert entry.main(arguments) == 0
    return found


def refused(steps: list[null_gpu.Counts]) -> list[str]:
    """Give what was refused in a capture, and what it ran that no replay does again."""
    return sorted(what for counts in steps for what in counts if what.startswith(("refused", "not captured")))


@pytest.mark.parametrize(
    "options", ["", f"{SDPA} {BF16} {OPTIMIZER}", f"{SDPA} {FP32} {EXPERTS}", f"{SDPA} {BF16} {EXPERTS} {OPTIMIZER}"]
)
def test_a_step_is_recorded_once_and_replayed(options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So nothing waits or copies in a capture, and no parameter, buffer or state has moved between steps."""
    outside = watch_allocations(monkeypatch)
    first, second, *later = train(tmp_path, monkeypatch, options)
    assert len(later) == 3 and not refused([first, second, *later]) and not outside
    assert first["capture"] == 0 and second["replay"] == second["capture"] > 0  # nothing runs while it is recorded
    for counts in later:
        assert counts["capture"] == 0 and counts["replay"] == second["capture"]
    null_gpu.tell(f"{second['capture']} pieces; {kernels(first)} kernels as it is, {kernels(later[0])} beside them")
    assert kernels(later[0]) < kernels(first)


def kernels(counts: null_gpu.Counts) -> int:
    return sum(n for what, n in counts.items() if what.startswith(("kernel ", "product ")))


def watch_allocations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give the sizes of what is allocated in a capture and lies in no pool of a recorder; they come when it records."""
    outside: list[int] = []
    record = devices.CudaRecorder.record

    def in_no_pool() -> dict[int, int]:
        segments = [x for x in torch.cuda.memory_snapshot() if tuple(x["segment_pool_id"]) == (0, 0)]
        blocks = [block for segment in segments for block in segment["blocks"]]
        return {block["address"]: block["size"] for block in blocks if block["state"] == "active_allocated"}

    def watched(self: devices.CudaRecorder, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        before: dict[int, int] = {}

        def noted() -> list[Tensor]:
            before.update(in_no_pool())
            results = run()
            outside.extend(size for address, size in in_no_pool().items() if address not in before)
            return results

        return record(self, noted)

    monkeypatch.setattr(devices.CudaRecorder, "record", watched)
    return outside


def test_numbers_that_the_host_reads_in_a_piece_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts in fp32 read where their rows end, so pieces are cut there."""
    declared = pieces.operator_of
    always = lambda target: dataclasses.replace(declared(target), records=bool(declared(target).records))  # noqa: E731
    monkeypatch.setattr(pieces, "operator_of", always)
    with pytest.raises(RuntimeError, match="during CUDA graph capture"):
        train(tmp_path, monkeypatch, f"{SDPA} {FP32} {EXPERTS}")


def test_a_parameter_that_moves_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def move(trainer: Trainer) -> None:
        if trainer.step == 3:
            embedding = trainer.model.tok_embeddings
            assert embedding is not None
            embedding.weight = torch.nn.Parameter(embedding.weight.detach().clone())

    steps = train(tmp_path, monkeypatch, SDPA, move)
    assert [counts["capture"] > 0 for counts in steps] == [False, True, False, True, False]


def copied_from_the_host(is_waited_for: bool) -> list[Tensor]:
    host = torch.ones(4, pin_memory=True)
    copy = torch.ops.torchtitan_graph.reload(host, "cuda")
    return [torch.ops.torchtitan_graph.arrived(copy, host) if is_waited_for else copy]


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_copies_beside_what_is_computed_begin_and_end_with_it(is_waited_for: bool) -> None:
    """Their stream is in the capture if it waits for the one that computes; that one has to wait for it in turn."""
    copied_from_the_host(True)  # so there is pinned memory
    null_gpu.take()
    recorder = devices.CudaRecorder(torch.cuda.graph_pool_handle())
    with contextlib.nullcontext() if is_waited_for else pytest.raises(RuntimeError):
        recorder.record(partial(copied_from_the_host, is_waited_for))
    assert not refused([null_gpu.take()])


EARLIER: list[Any] = []  # what is there before the capture begins: an event, another stream, its memory


def on_another_stream() -> list[Tensor]:
    with torch.cuda.stream(EARLIER[1]):
        return [torch.empty(1 << 20, device="cuda").zero_()]


@pytest.mark.parametrize(
    "run, what",
    [
        (lambda: [torch.ones(4, device="cuda").sum().item()], "refused in a capture: cudaStreamSynchronize"),
        (lambda: torch.cuda.synchronize(), "refused in a capture: cudaDeviceSynchronize"),
        (
            lambda: [torch.ones(4).to("cuda", non_blocking=True)],
            "unless the CPU tensor is pinned",
        ),
        (
            lambda: torch.cuda.current_stream().wait_event(EARLIER[0]),
            "refused in a capture: to wait for what came before",
        ),
        (on_another_stream, "not captured: "),
    ],
    ids=["number", "wait", "copy", "earlier", "stream"],
)
def test_what_a_capture_may_not_do_is_found(
    run: Callable[[], list[Tensor]], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = watch_allocations(monkeypatch)
    torch.ones(4, device="cuda").sum()
    EARLIER.extend([torch.cuda.Event(), torch.cuda.Stream()])
    EARLIER[0].record()
    with torch.cuda.stream(EARLIER[1]):  # a segment that is not given back, for there is something in it
        EARLIER.append(torch.empty(1 << 20, device="cuda"))
    null_gpu.take()
    raised = ""
    try:
        devices.CudaRecorder(torch.cuda.graph_pool_handle()).record(run)
    except RuntimeError as error:
        raised = str(error)
    assert what in "\n".join([*refused([null_gpu.take()]), raised])
    assert bool(outside) == (run is on_another_stream)
