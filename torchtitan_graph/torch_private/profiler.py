"""State of profilers, and the CUDA allocator's history."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast


def is_profiling() -> bool:
    """Return whether a torch profiler records now, by whomever it was started: public API knows only its own profiler's
    state."""
    return torch.autograd._profiler_enabled()


def begin_range(name: str, words: Mapping[str, str]) -> Any:
    """Begin a range in a profiler's trace, with `words` as its arguments if it records shapes; its `__exit__` ends it.

    `torch.profiler.record_function`, which is public, has one string argument, does not show it, and is several times
    as slow.
    """
    span = _RecordFunctionFast(name, (), dict(words))
    span.__enter__()
    return span


def record_memory_history(on: bool) -> None:
    """Start or stop recording the history of CUDA's allocator; there is no public form yet."""
    torch.cuda.memory._record_memory_history("all" if on else None, max_entries=100_000)


def save_memory_snapshot(path: Path) -> None:
    """Write the recorded history and the current allocations: a pickle of plain lists and numbers."""
    torch.cuda.memory._dump_snapshot(str(path))
