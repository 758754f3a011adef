"""The error for data that is not a stored graph, and checks that raise it."""

from __future__ import annotations

from typing import Any


class Malformed(ValueError):
    """Data that is not a stored graph."""


def check(sound: bool, what: str) -> None:
    """Raise Malformed, with `what`, unless `sound`."""
    if not sound:
        raise Malformed(what)


def size(x: Any) -> int:
    """Return a size or an index, after a check that it is one."""
    check(type(x) is int and 0 <= x < 2**48, f"the size {x!r}")
    return x
