"""The costs of each scope of a model: a graph's calls, summed over the modules and functions that made them.

Note [Costs by scope]
Each call of a graph is charged to one scope and to one part of the step, so that sums over scopes are complete and
count nothing twice. Its scope is its place (Note [Call hierarchy]). One with several places, as a bucket's collective,
a merged node or a compiled region, is charged to the innermost scope that contains them all; one without a place to the
root. Its part follows from its phase and its origin; a region's from its phase. Inputs, constants and the output are no
calls and cost nothing.

All costs are whole numbers: of bytes, of operations, of nanoseconds. So a sum has no order, and a table can be checked
to the last digit. Times are rounded on the clock, not one by one: those of a graph add up to its estimate, rounded.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.cost import Clock, Costs, touched
from torchtitan_graph.analysis.flops import attention_flops, matmul_flops
from torchtitan_graph.analysis.liveness import lifetimes, peak_memory, scratch_of
from torchtitan_graph.analysis.traffic import received
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.graph.hierarchy import Place, call_hierarchy

FORWARD, BACKWARD, RECOMPUTED = "forward", "backward", "recomputed"
PASSES_FORWARD, PASSES_BACKWARD = "passes in forward", "passes in backward"
PARTS = (FORWARD, BACKWARD, RECOMPUTED, PASSES_FORWARD, PASSES_BACKWARD)

_CAUSAL = 0.5  # the pairs of positions that a causal mask allows, as in Note [Estimate]


class Cost(NamedTuple):
    """Costs of calls, in bytes and nanoseconds.

    calls     number of calls
    flops     by the convention of analysis/flops.py, but on this rank, and recomputation counts
    moved     bytes read and written; 0 for views and collectives
    held      bytes of their results, and of their temporaries, that exist at the graph's peak
    received  bytes of collectives
    sending   of collectives, on their own stream: an estimate
    exposed   blocked in waits for collectives: an estimate, included in `time`
    time      on the stream that computes: an estimate
    measured  by a profiler
    """

    calls: int = 0
    flops: int = 0
    moved: int = 0
    held: int = 0
    received: int = 0
    sending: int = 0
    exposed: int = 0
    time: int = 0
    measured: int = 0


def total(costs: Iterable[Cost]) -> Cost:
    """Return the sum of costs."""
    return Cost(*map(sum, zip(*costs, strict=True)))


class Charge(NamedTuple):
    """A call of a graph: the scope and part it is charged to, its cost, and its begin and end on the estimate's clock;
    a collective's on the stream of its group."""

    node: Node
    place: Place
    part: str
    cost: Cost
    begin: int
    end: int


@dataclasses.dataclass
class Scope:
    """A call of a module or a function.

    place     its place in the call hierarchy; () is the root, the whole step
    children  the calls that it makes, in the order of their first nodes
    charges   the calls charged to this scope itself, in the graph's order
    parts     its costs, its callees' included, by part
    """

    place: Place
    children: list[Scope] = dataclasses.field(default_factory=list)
    charges: list[Charge] = dataclasses.field(default_factory=list)
    parts: dict[str, Cost] = dataclasses.field(default_factory=dict)

    @property
    def cost(self) -> Cost:
        """The sum of all parts."""
        return total(self.parts.values())

    def walk(self) -> Iterator[Scope]:
        """Yield this scope and all below it, each before its children."""
        yield self
        for child in self.children:
            yield from child.walk()


def charges(gm: GraphModule, costs: Costs, measured: Mapping[str, float] | None = None) -> list[Charge]:
    """Charge each call of a graph. See Note [Costs by scope].

    Args:
        costs: seconds of nodes on a kind of device, the groups' links, and the fractions that masks allow; attention
            counts as causal where its fraction is unknown, and in compiled regions.
        measured: the seconds that a profiler measured, by the nodes' names.

    Raises:
        UserError: a measured name is not a call of this graph: the profile is another graph's.
    """
    calls = [node for node in gm.graph.nodes if node.op in ("call_function", "call_module")]
    measured = measured or {}
    if unknown := measured.keys() - {node.name for node in calls}:
        name = min(unknown)
        near = difflib.get_close_matches(name, [node.name for node in calls], n=1)
        raise UserError(
            f"the profile measured {len(unknown)} nodes that are not in this graph, such as {name}"
            f"{f' (there is {near[0]})' if near else ''}: it is of another graph. Profile a run of this configuration"
        )
    held, clock, found = _held_at_peak(gm), Clock(costs), []
    for node in calls:
        now, sent, stood = _times(clock)
        clock.advance(node)
        then, sent_too, stood_too = _times(clock)
        begin, end, sending, link = now, then, sent_too - sent, costs.link(node)
        if sending:  # on its own stream, from when that is free
            wait = next((user for user in node.users if user.all_input_nodes[0] is node), None)
            end = _ns(clock.now + clock.left(wait)) if wait is not None else begin + sending
            begin = end - sending
        cost = Cost(
            calls=1,
            flops=operations_of(node, costs.visible),
            moved=touched(node) if costs.computing(node) and link is None else 0,
            held=held.get(node, 0),
            received=received(node, link.degree) if link is not None else 0,
            sending=sending,
            exposed=stood_too - stood,
            time=then - now,
            measured=_ns(measured.get(node.name, 0.0)),
        )
        found.append(Charge(node, _scope_of(node), _part(node), cost, begin, end))
    return found


def _times(clock: Clock) -> tuple[int, int, int]:
    """Return the clock's time, the time of other streams, and its exposed part."""
    return _ns(clock.now), _ns(sum(clock.sent.values())), _ns(sum(clock.exposed.values()))


def in_a_row(graphs: Sequence[Sequence[Charge]]) -> list[Charge]:
    """Combine the charges of graphs that run one after another, as the parts of a pipeline's stage. At the peak, only
    the values of the graph with the largest peak are held."""
    most = max(graphs, key=lambda charged: total(each.cost for each in charged).held, default=())
    found: list[Charge] = []
    for charged in graphs:
        now = max((each.end for each in found), default=0)
        for each in charged:
            held = each.cost.held if charged is most else 0
            cost = each.cost._replace(held=held)
            found.append(each._replace(cost=cost, begin=each.begin + now, end=each.end + now))
    return found


def tree(charged: Iterable[Charge]) -> Scope:
    """Sum charges over their scopes, and return the root."""
    root = Scope(())
    known = {root.place: root}

    def scope(place: Place) -> Scope:
        if place not in known:
            known[place] = Scope(place)
            scope(place[:-1]).children.append(known[place])
        return known[place]

    for charge in charged:
        scope(charge.place).charges.append(charge)
    for each in reversed(list(root.walk())):  # children before their parents
        for part in PARTS:
            costs = [own.cost for own in each.charges if own.part == part]
            costs += [child.parts[part] for child in each.children if part in child.parts]
            if costs:
                each.parts[part] = total(costs)
    return root


def _scope_of(node: Node) -> Place:
    """Return the innermost scope that contains all of a node's places."""
    places = call_hierarchy(node)
    same = itertools.takewhile(lambda entries: len(set(entries)) == 1, zip(*places, strict=False))
    return tuple(entries[0] for entries in same)


def _part(node: Node) -> str:
    # A region is a call of its original nodes, not an addition of its pass.
    origin = meta.phase(node) if meta.region(node) else meta.origin(node)
    if origin in (FORWARD, BACKWARD, RECOMPUTED):
        return origin
    return PASSES_BACKWARD if meta.phase(node) == BACKWARD else PASSES_FORWARD


def operations_of(node: Node, visible: Mapping[str, float]) -> int:
    """Return a node's FLOPs, attention's for the fraction that the mask of its block allows, or as causal."""
    if known := meta.operations(node) or matmul_flops(node):
        return round(known)
    return round(attention_flops(node) * visible.get(block_of(node, visible) or "", _CAUSAL))


def _held_at_peak(gm: GraphModule) -> dict[Node, int]:
    """Return the bytes held at a graph's peak, by the node that owns them, or has them as temporaries."""
    peak = peak_memory(gm).node
    number = {node: i for i, node in enumerate(gm.graph.nodes)}[peak]
    found = {each.owner: each.num_bytes for each in lifetimes(gm) if each.begin <= number <= each.end}
    found[peak] = found.get(peak, 0) + scratch_of(peak)
    return found


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
