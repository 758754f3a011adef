"""Disable Python's garbage collector while a graph is built, and while steps run."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection inside, except `gc.collect`; restore the collector afterwards, whatever was raised. A
    graph is many small objects that stay: the collector would scan all of them again and again, which takes a third of
    the time to build a large graph, and frees next to nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
