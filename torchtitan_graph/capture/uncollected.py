"""Keep Python's collector of cycles away: while a graph is built, and while steps are taken."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect nothing inside, but by `gc.collect`; afterwards the collector is as it was, whatever was raised. A graph
    is many small objects that stay: the collector would walk through all of them again and again, which takes a third
    of the time to build a large graph, and find next to nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
