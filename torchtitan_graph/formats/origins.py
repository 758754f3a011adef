"""Origins of a graph's nodes, to plain data and back: the metadata of graph/meta.py, and annotations.

Many nodes have equal metadata, so it is a row of a table, "origins". A place in the call hierarchy is stored as the
number of its innermost scope, from 1 on, in the table "scopes", whose rows are (parent's number, a scope's `Entry`); a
scope follows its parent.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from torchtitan_graph.formats.malformed import check, size
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.hierarchy import Entry, Place

_PLAIN = (bool, int, float, str, type(None))
_OF_CODE = {"operations", "works", "scratch", "same_as"}  # no strings, only of compiled regions, which are not stored
_DEEPEST = 1000  # calls, as Python's own limit
_MOST_CALLS = 2**22  # the sum over all places of their depth: a large graph's 20,000 places are 10 deep


class Origins:
    """Builds the tables."""

    def __init__(self) -> None:
        self._rows: dict[tuple, int] = {}
        self._scopes: dict[tuple, int] = {}
        self._places: dict[Place, int] = {(): 0}

    def tables(self) -> dict[str, Any]:
        return {"origins": list(self._rows), "scopes": list(self._scopes)}

    def number(self, node: Node) -> int:
        """Return the index of a node's row."""
        places = [node.meta.get(key) for key in meta.HIERARCHIES]
        numbers = [None if each is None else tuple(map(self._place, each)) for each in places]
        words = {key: x for key, x in node.meta.get("custom", {}).items() if isinstance(x, _PLAIN)}
        row = (*(node.meta.get(key) for key in meta.KEYS), *numbers, tuple(words.items()))
        return self._rows.setdefault(row, len(self._rows))

    def _place(self, place: Place) -> int:
        if place not in self._places:
            row = (self._place(place[:-1]), *place[-1])
            self._places[place] = self._scopes[row] = len(self._scopes) + 1
        return self._places[place]


def read_origins(data: Any) -> list[dict[str, Any]]:
    """Return each row as a node's `meta`.

    Raises:
        Malformed, or another exception: the tables were not written by `Origins`.
    """
    places: list[Place] = [()]
    num_calls = 0
    for parent, *entry in data["scopes"]:
        places.append((*places[size(parent)], _entry(*entry)))
        num_calls += len(places[-1])
        check(len(places[-1]) <= _DEEPEST and num_calls <= _MOST_CALLS, "a scope that is too deep")
    return [_read(places, *row) for row in data["origins"]]


def _entry(kind: Any, name: Any, qualname: Any, path: Any, count: Any) -> Entry:
    check(kind in ("module", "function") and all(map(_is_line, (name, qualname, path))), f"the scope {name!r:.80}")
    return Entry(kind, name, qualname, path, size(count))


def _is_line(x: Any) -> bool:
    """Return whether a value is text of one line: a dump writes it in a comment."""
    return isinstance(x, str) and x.isprintable()


def _read(places: list[Place], *row: Any) -> dict[str, Any]:
    own, numbers, words = row[: len(meta.KEYS)], row[len(meta.KEYS) : -1], row[-1]
    said = zip(meta.KEYS, own, strict=True)
    check(all(x is None or (_is_line(x) and key not in _OF_CODE) for key, x in said), f"a node's words, {own!r:.80}")
    check(all(isinstance(key, str) and isinstance(x, _PLAIN) for key, x in words), "a node's annotations")
    found: dict[str, Any] = {key: x for key, x in zip(meta.KEYS, own, strict=True) if x is not None}
    for key, each in zip(meta.HIERARCHIES, numbers, strict=True):
        if each is not None:
            found[key] = tuple(places[size(number)] for number in each)
    return found | {"custom": dict(words)}
