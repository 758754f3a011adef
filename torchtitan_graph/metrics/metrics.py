"""Time the steps, and log some of them to the console, metrics.jsonl and TensorBoard."""

import time
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from torchtitan_graph.config import job
from torchtitan_graph.device import peak_memory_gib
from torchtitan_graph.log import logger
from torchtitan_graph.metrics.jsonl import append, drop_after

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

TENSORBOARD_TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "tokens_seen": "train/tokens_seen",
    "tokens_per_second": "performance/tokens_per_second",
    "step_time_s": "performance/step_time_s",
    "data_loading_s": "performance/data_loading_s",
    "mfu": "performance/mfu",
    "memory_gib": "performance/memory_gib",
    "expert_imbalance": "experts/imbalance",
    "validation_loss": "validation/loss",
}


class Metrics:
    """Log step 1, every `metrics.log_freq`-th step, the last one, and each validation.

    Rank 0 logs; with `metrics.save_for_all_ranks` the others write files too, `metrics_rankR.jsonl` and a `rank_R`
    folder for TensorBoard. Use as a context manager, or call `close()`.

    Args:
        start_step: steps done before this process began. What a killed run logged for later steps is dropped.
        tokens_seen: tokens of those steps.
        flops_per_step: what this device is to compute in a step, recomputation not counted; None: not known. Set the
            attribute of that name before `end_step` where steps differ.
        peak_flops: FLOP/s this device can do; None: not known, and then there is no MFU.
        config_text: the resolved configuration, shown in TensorBoard.
    """

    def __init__(
        self,
        config: job.Metrics,
        dump_folder: Path,
        *,
        rank: int,
        total_steps: int,
        start_step: int = 0,
        tokens_seen: int = 0,
        flops_per_step: float | None = None,
        peak_flops: float | None = None,
        config_text: str = "",
    ) -> None:
        self.log_freq = config.log_freq
        self.rank = rank
        self.total_steps = total_steps
        self.flops_per_step = flops_per_step
        self.peak_flops = peak_flops
        self._json: Path | None = None
        self._tensorboard: SummaryWriter | None = None
        if rank == 0 or config.save_for_all_ranks:
            name = "metrics.jsonl" if rank == 0 else f"metrics_rank{rank}.jsonl"
            dump_folder.mkdir(parents=True, exist_ok=True)
            self._json = dump_folder / name
            drop_after(self._json, start_step)
            if config.enable_tensorboard:
                folder = dump_folder / config.save_tb_folder
                self._tensorboard = _open_tensorboard(
                    folder if rank == 0 else folder / f"rank_{rank}", start_step, config_text
                )
        self._num_steps = 0  # this and the next four: since the last log
        self._flops = 0.0
        self._step_time_s = 0.0
        self._data_loading_s = 0.0
        self._tokens_seen = tokens_seen
        self._began = 0.0
        self._pending: dict[str, Any] = {}  # the last step's values
        self._tokens_by_source: dict[str, int] | None = None

    def start_step(self) -> None:
        """Start the clock. What happens between two steps (a save, a validation) is not counted."""
        self._began = time.perf_counter()

    def end_step(
        self,
        step: int,
        *,
        loss: float | torch.Tensor,
        grad_norm: float | torch.Tensor,
        lr: float | torch.Tensor,
        tokens_seen: int,
        data_loading_s: float,
        expert_imbalance: float | torch.Tensor | None = None,
        tokens_by_source: dict[str, int] | None = None,
    ) -> None:
        """Stop the clock, and log if it is this step's turn.

        `loss`, `grad_norm`, `lr` and `expert_imbalance` may be tensors on the device: they are read only where the step
        is logged, and before the clock is stopped, so that the time covers all the device was given to do.
        `tokens_seen` counts all ranks' tokens from the run's beginning, `tokens_by_source` those of each corpus of a
        mixture. `data_loading_s` is the part of the step spent
        waiting for data.
        """
        due = step == 1 or step % self.log_freq == 0 or step == self.total_steps
        values = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "expert_imbalance": expert_imbalance}
        if due:
            values = {key: None if x is None else float(x) for key, x in values.items()}
        self._num_steps += 1
        self._flops += self.flops_per_step or 0.0
        self._step_time_s += time.perf_counter() - self._began
        self._data_loading_s += data_loading_s
        self._pending = {"step": step, "tokens_seen": tokens_seen, **values}
        self._tokens_by_source = tokens_by_source
        if due:
            self.log_pending()

    def log_pending(self) -> None:
        """Log the last step, unless it is logged: a run may end where nobody knew it would."""
        if self._num_steps == 0:
            return
        step, tokens_seen = self._pending["step"], self._pending["tokens_seen"]
        values = {key: None if x is None else float(x) for key, x in self._pending.items()}
        record: dict[str, Any] = {
            "step": step,
            "loss": values["loss"],
            "grad_norm": values["grad_norm"],
            "lr": values["lr"],
            "tokens_seen": tokens_seen,
            "tokens_per_second": (tokens_seen - self._tokens_seen) / self._step_time_s,
            "step_time_s": self._step_time_s / self._num_steps,
            "data_loading_s": self._data_loading_s / self._num_steps,
            "mfu": self._mfu(),
            "memory_gib": peak_memory_gib(),
        }
        if values["expert_imbalance"] is not None:
            record["expert_imbalance"] = values["expert_imbalance"]
        if self._tokens_by_source:
            record["tokens_by_source"] = self._tokens_by_source
        self._num_steps, self._flops, self._step_time_s, self._data_loading_s = 0, 0.0, 0.0, 0.0
        self._tokens_seen = tokens_seen
        self._write(record)
        if self.rank == 0:
            logger.info(self._console_line(record))

    def log_validation(self, step: int, loss: float) -> None:
        """Log the validation loss after `step`."""
        self._write({"step": step, "validation_loss": loss})
        if self.rank == 0:
            logger.info(f"{self._progress(step)}  validation loss {loss:.4f}")

    def close(self) -> None:
        """Close TensorBoard's file."""
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _mfu(self) -> float | None:
        if self.flops_per_step is None or self.peak_flops is None:
            return None
        return self._flops / self._step_time_s / self.peak_flops

    def _write(self, record: dict[str, Any]) -> None:
        if self._json is not None:
            append(self._json, record)
        if self._tensorboard is not None:
            for key, tag in TENSORBOARD_TAGS.items():
                if record.get(key) is not None:
                    self._tensorboard.add_scalar(tag, record[key], record["step"])
            for name, tokens in record.get("tokens_by_source", {}).items():
                self._tensorboard.add_scalar(f"data/tokens_{name}", tokens, record["step"])
            self._tensorboard.flush()  # a killed run keeps what it logged

    def _progress(self, step: int) -> str:
        width = len(str(self.total_steps))
        return f"step {step:>{width}}/{self.total_steps} {100 * step // self.total_steps:>3}%"

    def _console_line(self, record: dict[str, Any]) -> str:
        parts = [
            self._progress(record["step"]),
            f"loss {record['loss']:.4f}",
            f"grad norm {record['grad_norm']:.4f}",
            f"lr {record['lr']:.2e}",
            f"{record['tokens_per_second']:,.0f} tokens/s",
            f"{record['memory_gib']:.2f} GiB",
        ]
        if record["mfu"] is not None:
            parts.append(f"MFU {record['mfu']:.1%}")
        left = timedelta(seconds=round((self.total_steps - record["step"]) * record["step_time_s"]))
        return "  ".join([*parts, f"{left} left"])


def _open_tensorboard(folder: Path, start_step: int, config_text: str) -> "SummaryWriter":
    from torch.utils.tensorboard import SummaryWriter  # takes a second to import, so only if asked for

    # purge_step hides the points that a killed run wrote for steps that are now done again.
    writer = SummaryWriter(str(folder), purge_step=start_step + 1)
    if config_text:
        indented = "\n".join("    " + line for line in config_text.splitlines())  # Markdown: shown as it is
        writer.add_text("config", indented, start_step)
    return writer
