"""Console output during training: a line per logged step, and on a terminal a progress bar between the lines."""

from datetime import timedelta
from typing import Any

DATA_SHARE_SHOWN = 0.05  # waiting for data is shown from this share of a step on
BAR_WIDTH = 20


def progress(step: int, total_steps: int) -> str:
    """Return the step and percentage done as text."""
    return f"step {step:>{len(str(total_steps))}}/{total_steps} {100 * step // total_steps:>3}%"


def step_line(record: dict[str, Any], total_steps: int) -> str:
    """Return a step's record as a line."""
    parts = [
        progress(record["step"], total_steps),
        f"loss {record['loss']:.4f}",
        f"grad norm {record['grad_norm']:.4f}",
        f"lr {record['lr']:.2e}",
        f"{record['tokens_per_second']:,.0f} tokens/s",
        f"{record['memory_gib']:.2f} GiB",
    ]
    if record["mfu"] is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    data_share = record["data_loading_s"] / record["step_time_s"]
    if data_share >= DATA_SHARE_SHOWN:
        parts.append(f"waiting for data {data_share:.0%}")
    return "  ".join([*parts, _left(record["step"], total_steps, record["step_time_s"])])


def progress_bar(step: int, total_steps: int, step_time_s: float) -> str:
    """Return a progress bar with the seconds per step and the time left."""
    filled = BAR_WIDTH * step // total_steps
    bar = "━" * filled + "─" * (BAR_WIDTH - filled)
    return f"{bar}  {progress(step, total_steps)}  {step_time_s:.2f} s/step  {_left(step, total_steps, step_time_s)}"


def _left(step: int, total_steps: int, step_time_s: float) -> str:
    return f"{timedelta(seconds=round((total_steps - step) * step_time_s))} left"
