"""A table of each pass' changes to a graph: time, nodes, operators, predicted peak memory, bytes received, exposed
communication."""

from __future__ import annotations

import collections
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

from torchtitan_graph.analysis.cost import Costs, estimate
from torchtitan_graph.analysis.liveness import peak_memory
from torchtitan_graph.analysis.traffic import traffic

_MIB = 2**20
_ROW = "  {:24} {:>8} {:>16} {:>13} {:>13} {:>10}   {}"
# Computing a peak takes half as long as a pass. Of larger graphs only the first and the last are measured.
_LARGE = 10_000


class Written:
    """A snapshot of a graph's nodes, in order, with targets, arguments and values, for comparison after a pass, which
    may edit the graph in place. Tags are left out: they change no result."""

    def __init__(self, gm: GraphModule) -> None:
        self._calls = [(node, node.op, node.target, node.args, node.kwargs) for node in gm.graph.nodes]
        self._values = [node.meta.get("val") for node in gm.graph.nodes]

    def is_still_in(self, gm: GraphModule) -> bool:
        """Return whether `gm` has exactly these nodes. Its constants or subgraphs may still differ where `holds_more`
        is true."""
        now = Written(gm)
        return self._calls == now._calls and all(map(operator.is_, self._values, now._values))

    @property
    def holds_more(self) -> bool:
        """Return whether the graph has constants or subgraphs, which are not compared."""
        return any(op in ("get_attr", "call_module") for _, op, *_ in self._calls)


class Measured(NamedTuple):
    """A graph's peak memory in bytes without its inputs, the bytes that it receives, and its seconds of exposed
    communication."""

    peak: int
    received: int
    exposed: float

    def words(self) -> tuple[str, str, str]:
        return f"{self.peak / _MIB:.1f} MiB", f"{self.received / _MIB:.1f} MiB", f"{self.exposed * 1e3:.2f} ms"


class PassTable:
    """A row for each pass: its changes; and the peak memory, the bytes received and the estimated exposed
    communication, where they changed.

    A peak is without the inputs, which include the whole parameters until `shard_params` makes them shards.
    """

    def __init__(self, gm: GraphModule, costs: Costs) -> None:
        """Start with the graph before any pass."""
        self._costs, self._is_large, self._first = costs, len(gm.graph.nodes) > _LARGE, len(gm.graph.nodes)
        self._gm, self._operators, self._seconds = gm, _operators(gm), 0.0
        self._written, self._last = None if self._is_large else Written(gm), self._measure(gm)
        self.measured: Measured | None = self._last
        self._rows = [_row("pass", "time", "nodes", Measured._fields, "operators, the three largest changes")]
        self._rows.append(_row("traced", "", str(self._first), self._last.words()))

    def add(self, name: str, seconds: float, gm: GraphModule) -> None:
        """Add a row for the pass that returned this graph; `measured` is then the graph's, None if it was not
        measured."""
        before, after = self._operators, _operators(gm)
        nodes = f"{sum(before.values())} -> {sum(after.values())}" if before != after else ""
        found = self._last if self._written is None or self._written.is_still_in(gm) else self._measure(gm)
        shown = [new if new != old else "" for new, old in zip(found.words(), self._last.words(), strict=True)]
        self._rows.append(_row(name, f"{seconds:.2f} s", nodes, shown, _changes(before, after)))
        self._gm, self._operators, self._last = gm, after, found
        self._written = None if self._is_large else Written(gm)
        self.measured = None if self._is_large else found
        self._seconds += seconds

    def lines(self) -> list[str]:
        """Return the table, with all passes together in its last row."""
        if self._is_large:
            self._last = self._measure(self._gm)
        nodes = f"{self._first} -> {len(self._gm.graph.nodes)}"
        return [*self._rows, _row("all", f"{self._seconds:.2f} s", nodes, self._last.words())]

    def communication(self) -> str:
        """Return, as text, the exposed communication of the graph that `lines` measured last; "" for a graph without
        any."""
        found = self._estimate
        return f"communication: {found} (an estimate, by the rates of {self._costs.rates.name})" if found.sent else ""

    def _measure(self, gm: GraphModule) -> Measured:
        received = sum(each.num_bytes for each in traffic(gm, self._costs.links).values())
        self._estimate = estimate(gm, self._costs)
        return Measured(peak_memory(gm).num_bytes, received, sum(self._estimate.exposed.values()))


def _operators(gm: GraphModule) -> collections.Counter[Any]:
    """Count a graph's nodes by target; inputs, outputs and subgraphs by kind."""
    # Counted by identity: Python computes an operator's hash.
    kinds = [node.target if node.op == "call_function" else node.op for node in gm.graph.nodes]
    number, found = collections.Counter(map(id, kinds)), collections.Counter[Any]()
    for identity, kind in {id(kind): kind for kind in kinds}.items():
        found[kind] += number[identity]
    return found


def _changes(before: collections.Counter[Any], after: collections.Counter[Any]) -> str:
    found: collections.Counter[str] = collections.Counter()
    for target in before.keys() | after.keys():
        found[_name(target)] += after[target] - before[target]
    largest = sorted((name for name in found if found[name]), key=lambda name: (-abs(found[name]), name))
    return ", ".join(f"{found[name]:+d} {name}" for name in largest[:3])


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target.overloadpacket.__name__
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _row(name: str, time: str, nodes: str, measured: Sequence[str], changes: str = "") -> str:
    return _ROW.format(name, time, nodes, *measured, changes).rstrip()
