"""The changes of each pass in a graph, node by node, recorded while the passes run."""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.changes import Measured
from torchtitan_graph.formats.show import call_of, marks_of, target_of
from torchtitan_graph.graph import meta

ADDED, REMOVED, CHANGED, MOVED = "added", "removed", "changed", "moved"


class Change(NamedTuple):
    """A node that a pass changed: how, its name, operator and module, and its line before and after ("" where it is
    absent). One that moved stands in another order among the nodes, and is otherwise the same."""

    kind: str
    name: str
    operator: str
    module: str
    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class Passed:
    """A pass that ran: its name, its seconds, the number of calls after it, the log table's figures of the graph then,
    if measured, and the changes."""

    name: str
    seconds: float
    num_calls: int
    measured: Measured | None
    changes: list[Change]


@dataclasses.dataclass
class Watched:
    """A graph in its present state, and the passes that made it."""

    gm: GraphModule
    passes: list[Passed]
    _lines: dict[str, _Line]


class _Line(NamedTuple):
    seen: tuple[Any, ...]  # the values the text is made of: while they are the same, the text is too
    text: str
    operator: str
    module: str
    place: int


class PassWatch:
    """An observer of passes that records every graph by its name. A graph that is started again, as while a memory
    budget is searched, replaces the one before."""

    def __init__(self) -> None:
        self.graphs: dict[str, Watched] = {}

    def look(self, graph: str, name: str, seconds: float, gm: GraphModule, measured: Measured | None = None) -> None:
        """Record a graph before any pass ("traced"), or after one."""
        before = self.graphs[graph]._lines if name != "traced" else {}
        lines = _lines(gm, before)
        if name == "traced":
            self.graphs[graph] = Watched(gm, [Passed(name, seconds, len(lines), measured, [])], lines)
            return
        watched = self.graphs[graph]
        watched.gm, watched._lines = gm, lines
        watched.passes.append(Passed(name, seconds, len(lines), measured, _changes(before, lines)))


def _lines(gm: GraphModule, before: dict[str, _Line]) -> dict[str, _Line]:
    found = {}
    calls = (node for node in gm.graph.nodes if node.op in ("call_function", "call_module"))
    for place, node in enumerate(calls):
        seen = _seen(node)
        known = before.get(node.name)
        if known is not None and len(seen) == len(known.seen) and all(map(_same, seen, known.seen)):
            found[node.name] = known._replace(place=place)
        else:
            text = f"{call_of(node)}  # {marks_of(node)}"
            found[node.name] = _Line(seen, text, target_of(node), meta.module(node), place)
    return found


def _seen(node: Node) -> tuple[Any, ...]:
    marks = meta.phase(node), meta.module(node), meta.tag(node), meta.role(node), meta.param(node), meta.region(node)
    return node.target, node.args, node.kwargs, node.meta.get("val"), *marks


def _same(a: object, b: object) -> bool:
    return a is b or (isinstance(a, str) and a == b)


def _changes(before: dict[str, _Line], after: dict[str, _Line]) -> list[Change]:
    """Return the changes between two graphs' lines, in the order of the new graph; removed nodes are last."""
    moved = _moved([(name, before[name].place) for name in after if name in before])
    found = []
    for name, new in after.items():
        old = before.get(name)
        if old is None:
            found.append(Change(ADDED, name, new.operator, new.module, "", new.text))
        elif old.text != new.text:
            found.append(Change(CHANGED, name, new.operator, new.module, old.text, new.text))
        elif name in moved:
            found.append(Change(MOVED, name, new.operator, new.module, old.text, new.text))
    gone = [(name, old) for name, old in before.items() if name not in after]
    return found + [Change(REMOVED, name, old.operator, old.module, old.text, "") for name, old in gone]


def _moved(places: list[tuple[str, int]]) -> set[str]:
    """Return the smallest set of nodes that moved: all but a longest subsequence still in order."""
    ends: list[int] = []  # of an increasing subsequence of each length, the least last place
    at: list[int] = []  # the entry with that place
    previous: list[int] = []
    for i, (_, place) in enumerate(places):
        length = bisect.bisect_left(ends, place)
        previous.append(at[length - 1] if length else -1)
        ends[length : length + 1] = [place]
        at[length : length + 1] = [i]
    stay, i = set(), at[-1] if at else -1
    while i >= 0:
        stay.add(places[i][0])
        i = previous[i]
    return {name for name, _ in places} - stay
