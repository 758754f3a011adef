"""A graph as columns of numbers and string indices: the data of the page.

Every list of a table has a row per call, per scope, and so on. A string is stored once, in `Strings`; tables hold its
index. Costs of calls are not summed here: the page sums them, over other scopes too (blocks of a kind).
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.changes import Measured
from torchtitan_graph.analysis.cost import WAIT, Costs
from torchtitan_graph.analysis.liveness import WORKSPACE, lifetimes, peak_memory, scratch_of
from torchtitan_graph.analysis.scopes import PARTS, Charge, Cost, tree
from torchtitan_graph.analysis.traffic import group_of, kind_of
from torchtitan_graph.explorer.watch import Passed, Watched
from torchtitan_graph.formats.show import call_of, name_of_group, target_of
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import shape_of
from torchtitan_graph.graph.hierarchy import Place, call_hierarchy, shown

MEASURES = [name for name in Cost._fields if name != "calls"]


class Strings:
    """The distinct strings of a page, by index."""

    def __init__(self) -> None:
        self.table: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str | None) -> int:
        """Return a string's index; None is the empty string."""
        text = text or ""
        if text not in self._numbers:
            self._numbers[text] = len(self.table)
            self.table.append(text)
        return self._numbers[text]


def graph_data(
    name: str,
    gms: Sequence[GraphModule],
    charged: Sequence[Charge],
    costs: Costs,
    watched: Watched,
    strings: Strings,
    notes: Sequence[str] = (),
    rest: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return the page's data of a graph.

    Args:
        gms: the graph; of a pipeline's stage its parts, in the order in which they run.
        charged: its calls, as `scopes.charges` gives them for the same costs, of parts by `scopes.in_a_row`.
        watched: the passes that made it, from "traced" on, and their result, before a stage is cut.
        notes: lines of text shown with it.
        rest: bytes held outside the graph, by purpose: parameters, the optimizer's state, ...
    """
    s, scopes = strings.number, list(tree(charged).walk())
    number_of = {scope.place: i for i, scope in enumerate(scopes)}
    number = {charge.node: i for i, charge in enumerate(charged)}
    by_name = {charge.node.name: i for charge, i in reversed(list(zip(charged, range(len(charged)), strict=True)))}

    def given(source: str) -> int:
        """Return the index of the call that a name refers to; for a graph's input, a negative number from its name's
        index. A part's inputs have the names they had in the part before."""
        return by_name.get(source, -1 - s(source))

    return {
        "name": name,
        "notes": list(notes),
        "parts": list(PARTS),
        "measures": MEASURES,
        "is_measured": any(charge.cost.measured for charge in charged),
        "scopes": {
            "parent": [number_of[scope.place[:-1]] if scope.place else -1 for scope in scopes],
            **{
                key: [s(str(getattr(scope.place[-1], key))) if scope.place else s("") for scope in scopes]
                for key in ("type", "name", "qualname", "path")
            },
            "count": [scope.place[-1].count if scope.place else 0 for scope in scopes],
        },
        "calls": {
            "name": [s(charge.node.name) for charge in charged],
            "operator": [s(target_of(charge.node)) for charge in charged],
            "call": [s(call_of(charge.node)) for charge in charged],
            "value": [s(shape_of(charge.node.meta.get("val"))) for charge in charged],
            "scope": [number_of[charge.place] for charge in charged],
            "part": [PARTS.index(charge.part) for charge in charged],
            "origin": [s(meta.origin(charge.node)) for charge in charged],
            "source": [s(meta.source_line(charge.node)) for charge in charged],
            "places": [s(_places(charge.node, charge.place)) for charge in charged],
            "begin": [charge.begin for charge in charged],
            "end": [charge.end for charge in charged],
            "inputs": [[given(x.name) for x in charge.node.all_input_nodes] for charge in charged],
            **{key: [getattr(charge.cost, key) for charge in charged] for key in MEASURES},
        },
        "memory": {"rest": list((rest or {}).items()), **_memory(gms, number, strings)},
        "collectives": _collectives(charged, number, costs, strings),
        "passes": [
            _passed(each, _whole(watched.gm, charged) if each is watched.passes[-1] else None, strings)
            for each in watched.passes
        ],
    }


def _places(node: Node, charged_to: Place) -> str:
    """Return the scopes a call stands for, if there are several: a line for each."""
    places = call_hierarchy(node)
    return "\n".join(map(shown, places)) if len(places) > 1 else ""


def _memory(gms: Sequence[GraphModule], number: dict[Node, int], strings: Strings) -> dict[str, Any]:
    """Return the lifetimes of the graphs' memory: the owning call, the first and last call, bytes and purpose. Other
    nodes between the calls hold nothing."""
    columns = ("owner", "begin", "end", "bytes", "purpose", "scratch_at", "scratch")
    found: dict[str, Any] = {"peak": 0, "workspace": WORKSPACE, **{key: [] for key in columns}}
    most = -1
    for gm in gms:
        calls = [(i, node) for i, node in enumerate(gm.graph.nodes) if node in number]
        places, first = [i for i, _ in calls], number[calls[0][1]] if calls else 0
        for each in lifetimes(gm):
            found["owner"].append(number[each.owner])
            found["begin"].append(first + bisect.bisect_left(places, each.begin))
            found["end"].append(first + bisect.bisect_right(places, each.end) - 1)
            found["bytes"].append(each.num_bytes)
            found["purpose"].append(strings.number(each.purpose))
        for _, node in calls:
            if size := scratch_of(node):
                found["scratch_at"].append(number[node])
                found["scratch"].append(size)
        peak = peak_memory(gm)
        if peak.num_bytes > most:
            most, found["peak"] = peak.num_bytes, number.get(peak.node, first + max(len(calls) - 1, 0))
    return found


def _collectives(
    charged: Sequence[Charge], number: dict[Node, int], costs: Costs, strings: Strings
) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {key: [] for key in ("call", "axis", "kind", "ranks", "wait")}
    for charge in charged:
        if (link := costs.link(charge.node)) is None:
            continue
        waits = [number[user] for user in charge.node.users if user.target is WAIT]
        found["call"].append(number[charge.node])
        found["axis"].append(strings.number(link.axis))
        found["kind"].append(strings.number(kind_of(charge.node)))
        found["ranks"].append(strings.number(name_of_group(str(group_of(charge.node)))))
        found["wait"].append(min(waits, default=-1))
    return found


def _whole(gm: GraphModule, charged: Sequence[Charge]) -> Measured:
    """Return a graph's peak memory, and the sums of its calls' communication."""
    cost = [charge.cost for charge in charged]
    return Measured(peak_memory(gm).num_bytes, sum(x.received for x in cost), sum(x.exposed for x in cost) / 1e9)


def _passed(each: Passed, last: Measured | None, strings: Strings) -> dict[str, Any]:
    """Return a pass as columns. Some passes on large graphs are not measured: `last` is the result of `_whole`."""
    measured = each.measured or last
    columns = list(zip(*each.changes, strict=True)) or [()] * 6
    keys = ("kind", "name", "operator", "module", "before", "after")
    return {
        "name": each.name,
        "seconds": each.seconds,
        "calls": each.num_calls,
        "measured": measured and [measured.peak, measured.received, round(measured.exposed * 1e9)],
        "changes": {key: list(map(strings.number, column)) for key, column in zip(keys, columns, strict=True)},
    }
