"""The costs of a graph's scopes as a table of text, forward and backward side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from torchtitan_graph.analysis.scopes import FORWARD, PASSES_FORWARD, Charge, Cost, Scope, total, tree

# A column of `Cost`: its title, its smallest unit, and the factor between units.
_COLUMNS = {
    "calls": ("nodes", 1, 1, [""]),
    "flops": ("", 1, 1000, ["FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"]),
    "moved": ("moved", 1, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]),
    "held": ("held", 1, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]),
    "received": ("received", 1, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]),
    "time": ("estimate", 1000, 1000, ["us", "ms", "s"]),
    "measured": ("measured", 1000, 1000, ["us", "ms", "s"]),
}
_WIDTH = 9


def by_type(charged: Iterable[Charge], kind: str) -> Iterator[Charge]:
    """Charge calls to modules alone, or to functions alone: the innermost around them. `kind` is "module" | "function"
    of `Entry.type`."""
    for each in charged:
        yield each._replace(place=tuple(entry for entry in each.place if entry.type == kind))


def scope_table(charged: Iterable[Charge], depth: int) -> list[str]:
    """Return the lines of a table: a row for each scope down to `depth` calls below the root, its callees included.

    Each column has two parts, forward and backward, by the phase in which recomputed nodes and those of passes run. A
    column without any cost is left out.
    """
    root = tree(charged)
    whole = root.cost
    columns = [_Column(name, getattr(whole, name)) for name in _COLUMNS if getattr(whole, name)]
    rows = [scope for scope in root.walk() if len(scope.place) <= depth]
    names = [f"{'  ' * len(scope.place)}{scope.place[-1] if scope.place else 'all'}" for scope in rows]
    width = max(map(len, names))
    lines = [
        " ".join([" " * width, *(f"{column.title:>{2 * _WIDTH + 1}}" for column in columns)]),
        " ".join(["scope".ljust(width), *[f"{'forward':>{_WIDTH}} {'backward':>{_WIDTH}}"] * len(columns)]),
    ]
    for name, scope in zip(names, rows, strict=True):
        sides = _sides(scope)
        cells = [column.cell(side) for column in columns for side in sides]
        lines.append(" ".join([name.ljust(width), *cells]).rstrip())
    return lines


def _sides(scope: Scope) -> tuple[Cost, Cost]:
    """Return the costs in forward and in backward."""
    forward = [cost for part, cost in scope.parts.items() if part in (FORWARD, PASSES_FORWARD)]
    backward = [cost for part, cost in scope.parts.items() if part not in (FORWARD, PASSES_FORWARD)]
    return total([Cost(), *forward]), total([Cost(), *backward])


class _Column:
    """A column of costs, in the largest unit of which the whole graph has at least ten."""

    def __init__(self, name: str, whole: int) -> None:
        words, first, step, units = _COLUMNS[name]
        level = min(int(math.log(max(whole / first / 10, 1), step)), len(units) - 1) if step > 1 else 0
        self.title = ", ".join(filter(None, [words, units[level]]))
        self._name, self._divisor, self._digits = name, first * step**level, 0 if step == 1 else 2

    def cell(self, cost: Cost) -> str:
        """Return the cost as text; blank for 0."""
        value = getattr(cost, self._name)
        return " " * _WIDTH if not value else f"{value / self._divisor:{_WIDTH},.{self._digits}f}"
