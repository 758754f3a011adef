"""Refuse data that no graph was stored as."""

from __future__ import annotations

from typing import Any


class Malformed(ValueError):
    """Data that no graph was stored as."""


def check(sound: bool, what: str) -> None:
    """Raise Malformed, with what it is about, unless it is sound."""
    if not sound:
        raise Malformed(what)


def size(x: Any) -> int:
    """Give a size, or a place in a list."""
    check(type(x) is int and 0 <= x < 2**48, f"the size {x!r}")
    return x
