"""Overlap of collectives with computation: start early, wait late."""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.cost import Costs
from torchtitan_graph.analysis.flops import matmul_flops
from torchtitan_graph.analysis.liveness import in_one_part, owners, scratch_of, size_of
from torchtitan_graph.analysis.timeline import Timeline
from torchtitan_graph.analysis.traffic import collective_of, group_of
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.collectives import made_from_inputs
from torchtitan_graph.graph.edit import aliased
from torchtitan_graph.ops.operator import ALL_TO_ALL, operator_of

c10d = torch.ops._c10d_functional


def overlap_collectives(gm: GraphModule, costs: Costs, part_of: Callable[[Node], str] = in_one_part) -> GraphModule:
    """Start each gather when the one before is waited for, or earlier; wait for each reduction when the next one
    starts. Bitwise.

        a' = wait(start(a)); use(a'); b' = wait(start(b)); use(b')
        sa = start(a); sb = start(b); a' = wait(sa); use(a'); b' = wait(sb); use(b')

    One bucket is gathered ahead: memory stays at two blocks' weights. Where that is estimated not to be enough to hide
    a gather (see Note [Estimate]), it starts earlier, as long as the step's peak memory stays the same: the first
    gather of backward, say, not before the loss, where it would be alive at that peak. Gradients reduced in two stages
    (over shards, then over replicas) start the second stage when the next bucket starts its first. Rows to experts or
    back, and their counts, are sent as soon as they are computed, and the copy of the counts to the host starts right
    then: the host waits for it only before it sends the rows, while the device sorts them. Other waits stand right
    before their first use.
    """
    # For a pipeline's stage `part_of` returns the part that a node runs in: then each part's peak stays.
    gathers: list[Node] = []
    reductions: list[list[Node]] = []  # the waits of each reduction, stage by stage
    others: list[Node] = []
    for node in gm.graph.nodes:
        if node.target is not c10d.wait_tensor.default:
            continue
        if meta.role(node) == meta.GATHER:
            gathers.append(node)
        elif meta.role(node) != meta.REDUCE:
            others.append(node)
        elif reductions and _start(node).args[0] is reductions[-1][-1]:
            reductions[-1].append(node)
        else:
            reductions.append([node])
    for before, wait in itertools.pairwise(gathers):
        if meta.phase(before) == meta.phase(wait):
            for node in made_from_inputs(_start(wait)):
                before.prepend(node)
    for start in (_start(wait) for wait in others if collective_of(_start(wait)) is ALL_TO_ALL):
        _send_early(start)
    _start_host_reads_early(gm)
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for wait in (wait for wait in others if wait.users):
        min(wait.users).prepend(wait)
    starts = [_start(stages[0]) for stages in reductions]
    for number, stages in enumerate(reductions):
        for later, wait in enumerate(stages, start=number + 1):
            place = starts[later] if later < len(starts) else gm.graph.output_node()
            for node in _results(wait, order, limit=order[place]):
                place.prepend(node)
    _start_earlier(gm, gathers, [_start(wait) for stages in reductions for wait in stages], costs, part_of)
    gm.recompile()
    return gm


def _send_early(start: Node) -> None:
    """Move an exchange, with what only puts its message together, right behind what these read."""
    chain, reads = {start}, list(start.all_input_nodes)
    while reads:
        node = reads.pop()
        op = operator_of(node.target)
        is_local = node.op == "call_function" and not (op.waits or op.attention or op.recompute == "never")
        is_small = is_local and not matmul_flops(node) and not any(is_write for _, is_write in aliased(node))
        if node not in chain and is_small and chain.issuperset(node.users):
            chain.add(node)
            reads += node.all_input_nodes
    place = max(x for node in chain for x in node.all_input_nodes if x not in chain)
    for node in sorted(chain, reverse=True):
        place.append(node)


def _start_host_reads_early(gm: GraphModule) -> None:
    """Move the device-to-host copy of the exchanged rows' counts right behind the exchange of the counts."""
    read = ((node, operator_of(node.target).host_reads) for node in gm.graph.nodes)
    for splits in dict.fromkeys(node.args[place] for node, place in read if place is not None):
        if operator_of(splits.target).recompute != "never":
            continue
        sent, received = splits.all_input_nodes
        chain = [splits]
        while received.target is not c10d.all_to_all_single.default:
            chain.append(received)
            (received,) = received.all_input_nodes
        while sent > received:
            chain.append(sent)
            (sent,) = sent.all_input_nodes
        for node in chain:
            received.append(node)


def _start_earlier(
    gm: GraphModule, gathers: list[Node], reductions: list[Node], costs: Costs, part_of: Callable[[Node], str]
) -> None:
    """Move gathers early enough to finish before their waits, within the graph's peak memory. They keep their order."""
    if not any(costs.link(_start(wait)) for wait in gathers):
        return
    timeline, owner = Timeline(gm, part_of), owners(gm)
    times = _times(timeline.nodes, costs)
    latest = _latest_starts(gathers, reductions, times, timeline.place, costs)
    earliest = timeline.first
    for wait in gathers:
        start, chain = _start(wait), made_from_inputs(_start(wait))
        size = sum(map(size_of, {owner[node] for node in chain}))
        wanted = max(earliest, bisect.bisect_right(times, latest[wait]) - 1)
        place = timeline.start_earlier(chain, timeline.place[start], wanted, size, scratch_of(start))
        earliest = max(earliest, place)


def _times(nodes: list[Node], costs: Costs) -> list[float]:
    """Return the time at which each node would begin if no wait took time."""
    seconds = (0.0 if costs.link(node) else costs.seconds(node) for node in nodes)
    return list(itertools.accumulate(seconds, initial=0.0))[:-1]


def _latest_starts(
    gathers: list[Node], reductions: list[Node], times: list[float], order: dict[Node, int], costs: Costs
) -> dict[Node, float]:
    """Return the latest start of each gather, by its wait, that finishes in time: its group must then also send the
    next gather and the reductions meanwhile."""
    found: dict[Node, float] = {}
    pending: dict[str | None, list[Node]] = collections.defaultdict(list)  # by group, in order
    for start in sorted(reductions, key=order.__getitem__):
        pending[group_of(start)].append(start)
    following: dict[str | None, float] = {}
    for wait in reversed(gathers):
        group, due = group_of(_start(wait)), times[order[wait]]
        begin = min(due, following.get(group, due)) - costs.seconds(_start(wait))
        others = pending[group]
        while others and times[order[others[-1]]] >= due:
            others.pop()
        while others and times[order[others[-1]]] > begin:
            begin -= costs.seconds(others.pop())
        found[wait] = following[group] = begin
    return found


def _start(wait: Node) -> Node:
    return wait.args[0]  # type: ignore[return-value]


def _results(node: Node, order: dict[Node, int], limit: int) -> list[Node]:
    """Return `node` and all its descendants before place `limit`, in order."""
    found, pending = {node}, [node]
    while pending:
        for user in pending.pop().users:
            if order[user] < limit and user not in found:
                found.add(user)
                pending.append(user)
    return sorted(found, key=order.__getitem__)
