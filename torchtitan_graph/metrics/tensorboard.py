"""TensorBoard: curves in a layout of charts, with the configuration and the model as text."""

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_graph.metrics.histograms import Histogram

# The page "custom scalars": category -> chart -> patterns of the tags that share the chart.
LAYOUT = {
    "overview": {
        "loss": ["train/loss$", "validation/loss(/.*)?$"],
        "loss, by term": ["train/loss/.*"],
        "gradient norm": ["train/grad_norm$"],
        "learning rate": ["train/lr$"],
        "tokens per second": ["performance/tokens_per_second$"],
        "MFU": ["performance/mfu$"],
        "memory, GiB": ["performance/memory_gib$"],
        "waiting for data, share of a step": ["performance/data_share$"],
    },
    "ranks": {
        "busy seconds: the slowest rank, the median": ["ranks/.*_busy_s$"],
        "the slowest rank": ["ranks/slowest$"],
    },
    "metrics of the model and the loss": {"all": ["metrics/.*"]},
    "experts": {"load of the busiest expert over the mean, by layer": ["experts/imbalance.*"]},
}
PIXELS = 12  # the side of an expert's square in the picture of loads


class TensorBoard:
    """A folder of event files. Points that a killed run wrote for steps after `start_step` are hidden.

    Args:
        texts: Markdown by name, shown on the page "text".
        layout: whether to write a layout of the steps' curves; once is enough for folders shown together.
    """

    def __init__(self, folder: Path, start_step: int, texts: Mapping[str, str], layout: bool = True) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import, so only if asked for

        self._hook = threading.excepthook
        threading.excepthook = _quiet(self._hook)
        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1)
        self._tags: set[str] = set()
        self._layout: dict[str, dict[str, list]] | None = {} if layout else None
        for name, text in texts.items():
            self._writer.add_text(name, text, start_step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to the curve of each tag."""
        if self._layout is not None and "train/loss" in values:
            self._tags |= values.keys()
            if (layout := _layout_of(self._tags)) != self._layout:
                self._writer.add_custom_scalars(layout)  # TensorBoard takes the last one
                self._layout = layout
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()  # a killed run keeps the points it logged

    def texts(self, step: int, values: Mapping[str, str]) -> None:
        """Add a text to the series of each tag."""
        for tag, text in values.items():
            self._writer.add_text(tag, verbatim(text), step)
        self._writer.flush()

    def expert_loads(self, step: int, loads: Mapping[str, Tensor]) -> None:
        """Write the loads as an image: a row per layer, a square per expert, black for 0, white from twice the mean."""
        shares = torch.stack([load_E.double() / load_E.double().mean().clamp(min=1e-9) for load_E in loads.values()])
        picture = (shares / 2).clamp(max=1).repeat_interleave(PIXELS, 0).repeat_interleave(PIXELS, 1)
        self._writer.add_image("experts/load", picture.cpu(), step, dataformats="HW")

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Add a histogram to the series of each tag."""
        for tag, h in histograms.items():
            self._writer.add_histogram_raw(
                tag, h.low, h.high, h.num, h.sum, h.sum_of_squares, h.limits, h.counts, global_step=step
            )
        self._writer.flush()

    def close(self, failed: bool = False) -> None:
        try:
            self._writer.close()
        finally:
            threading.excepthook = self._hook


def _quiet(hook: Callable[[threading.ExceptHookArgs], Any]) -> Callable[[threading.ExceptHookArgs], Any]:
    """Return a hook that prints no traceback of the writer's thread: its I/O error is raised by the next call."""

    def print_others(args: threading.ExceptHookArgs) -> None:
        if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard.")):
            hook(args)

    return print_others


def _layout_of(tags: Iterable[str]) -> dict[str, dict[str, list]]:
    """Return the charts with at least one curve, as `add_custom_scalars` takes them."""
    text = "\n".join(tags)
    shown = {
        category: {
            chart: ["Multiline", patterns]
            for chart, patterns in charts.items()
            if any(re.search(pattern, text, re.MULTILINE) for pattern in patterns)
        }
        for category, charts in LAYOUT.items()
    }
    return {category: charts for category, charts in shown.items() if charts}


def verbatim(text: str) -> str:
    """Return Markdown that shows a text unchanged."""
    return "\n".join("    " + line for line in text.splitlines())
