"""What profilers and the allocator's history record."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast


def is_profiling() -> bool:
    """Tell whether a torch profiler records now, whoever started it: public API knows only its own profiler's state."""
    return torch.autograd._profiler_enabled()


def begin_range(name: str, words: Mapping[str, str]) -> Any:
    """Begin a range that a profiler shows, with words beside its name if it records shapes; its `__exit__` ends it.

    `torch.profiler.record_function`, which is public, takes one word, does not show it, and is several times as slow.
    """
    span = _RecordFunctionFast(name, (), dict(words))
    span.__enter__()
    return span


def record_memory_history(on: bool) -> None:
    """Record what CUDA's allocator does from now on, or stop; there is no public form yet."""
    torch.cuda.memory._record_memory_history("all" if on else None, max_entries=100_000)


def save_memory_snapshot(path: Path) -> None:
    """Write what was recorded, and what is allocated now. A pickle of plain lists and numbers."""
    torch.cuda.memory._dump_snapshot(str(path))
