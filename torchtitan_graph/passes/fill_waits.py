"""Reordering of independent work into the waits of collectives."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.cost import WAIT, Clock, Costs
from torchtitan_graph.analysis.flops import attention_flops, matmul_flops
from torchtitan_graph.analysis.liveness import Memories, held_memory, in_one_part, peaks, scratch_of, size_of
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.graph.edit import aliased, is_view, put_in_order
from torchtitan_graph.ops.operator import operator_of

_COUNTS = torch.ops._c10d_functional.all_to_all_single.default


def fill_waits(
    gm: GraphModule, blocks: Container[str], costs: Costs, part_of: Callable[[Node], str] = in_one_part
) -> GraphModule:
    """Reorder weight gradients, and in forward shared experts, to run while activations are sent. Bitwise.

        dw = mm(dy, x); dx = mm(dy, w); s = start(dx); use(wait(s))
        dx = mm(dy, w); s = start(dx); dw = mm(dy, x); use(wait(s))

    For tensor, context and expert parallelism. Only as much work is moved as the wait is estimated to take (see Note
    [Estimate]), all within a block, and only while the step's peak memory stays the same.
    """
    # For a pipeline's stage `part_of` returns the part that a node runs in: then each part's peak stays.
    sent = [n for n in gm.graph.find_nodes(op="call_function", target=WAIT) if meta.role(n) is None]
    if any(costs.link(n.all_input_nodes[0]) for n in sent):
        costs = dataclasses.replace(costs, known={})
        memories = Memories(gm)
        bound = peaks(held_memory(gm, size_of, part_of, memories=memories), part_of)
        unfilled: set[Node] = set()
        while (order := _Sweep(gm, memories, blocks, costs, part_of, bound, unfilled)).too_full:
            unfilled |= order.too_full
        put_in_order(order.made)
        gm.recompile()
    return gm


class _Sweep:
    """One walk over a graph that builds a new order of its nodes, `made`.

    A weight's gradient is delayed: to the next wait that would idle, to its first use, to the end of its block, or
    until keeping its inputs would raise the peak. In forward later nodes are moved before a wait, unless it is one of
    `unfilled`. Whether they hold too much shows only afterwards: `too_full` are the waits before which moved nodes are
    alive where the peak is exceeded.
    """

    def __init__(
        self,
        gm: GraphModule,
        memories: Memories,
        blocks: Container[str],
        costs: Costs,
        part_of: Callable[[Node], str],
        bound: Mapping[str, int],
        unfilled: Container[Node],
    ) -> None:
        self._held, self._delayed_bytes = collections.Counter[str](), collections.Counter[str]()  # by part
        self.made: list[Node] = []
        self.too_full: set[Node] = set()
        self._early: dict[Node, Node] = {}  # node moved before its place -> the wait that it fills
        self._part_of, self._bound = part_of, bound
        self._blocks, self._clock, self._unfilled = blocks, Clock(costs), unfilled
        self._scratch = {node: scratch_of(node) for node in gm.graph.nodes}
        self._taken = {node: sum(map(size_of, memories.taken(node))) for node in gm.graph.nodes}
        self._used = {node: memories.used(node) for node in gm.graph.nodes}
        self._uses = collections.Counter(owner for owners in self._used.values() for owner in owners)
        self._done: set[Node] = set()
        self._delayed: dict[Node, None] = {}
        self._block = ""
        (products, views), sends = _weight_gradients(gm), self._sending_blocks(gm)
        for node in gm.graph.nodes:
            if node in self._done:
                self._early.pop(node, None)
                continue
            if (block := self._block_of(node)) not in ("", self._block):
                self._make_all()
                self._block = block
            follows = not self._delayed.keys().isdisjoint(node.all_input_nodes)
            if (block in sends and node in products) or (node in views and follows):
                self._delay(node)
                continue
            if follows or not self._fits(node):
                self._make_all()
            if node.target is WAIT:
                self._fill(node)
            self._make(node)

    def _block_of(self, node: Node) -> str:
        """Return a node's block, or its module outside of blocks; "" for inputs and nodes that passes inserted."""
        if node.op != "call_function" or meta.role(node):
            return ""
        return block_of(node, self._blocks) or meta.module(node)

    def _sending_blocks(self, gm: GraphModule) -> set[str]:
        waits = gm.graph.find_nodes(op="call_function", target=WAIT)
        return {self._block_of(n) for n in waits if meta.phase(n) == "backward"} - {""}

    def _fits(self, node: Node) -> bool:
        """Return whether all delayed nodes could still be computed after a node within the memory bound."""
        part = self._part_of(node)
        needed = self._taken[node] + self._scratch[node] + self._delayed_bytes[part]
        return self._held[part] + needed <= self._bound[part]

    def _delay(self, node: Node) -> None:
        """Delay a node, if it fits."""
        if self._fits(node):
            self._delayed[node] = None
            self._delayed_bytes[self._part_of(node)] += self._taken[node]
        else:
            self._make_all()
            self._make(node)

    def _make_all(self) -> None:
        while self._delayed:
            self._make_next()

    def _make_next(self) -> None:
        node = next(iter(self._delayed))
        del self._delayed[node]
        self._delayed_bytes[self._part_of(node)] -= self._taken[node]
        self._make(node)

    def _make(self, node: Node) -> None:
        self._done.add(node)
        self.made.append(node)
        self._clock.advance(node)
        part = self._part_of(node)
        self._held[part] += self._taken[node]
        if self._held[part] + self._scratch[node] > self._bound[part]:
            self.too_full.update(self._early.values())
        for owner in self._used[node]:
            self._uses[owner] -= 1
            if not self._uses[owner] and self._part_of(owner) == part:
                self._held[part] -= size_of(owner)

    def _fill(self, wait: Node) -> None:
        while self._delayed and self._clock.left(wait) > 0:
            self._make_next()
        # The device-to-host read follows a dispatch's exchange of counts: the host waits for it, and other work runs.
        is_counts = wait.all_input_nodes[0].target is _COUNTS
        is_ahead = meta.role(wait) is None and meta.phase(wait) == "forward" and not is_counts
        if is_ahead and wait not in self._unfilled and self._clock.left(wait) > 0:
            found = list(self._without(wait))
            while found and not self._clock.costs.seconds(found[-1]):
                found.pop()
            for node in found:
                if self._clock.left(wait) > 0:
                    self._early[node] = wait
                    self._make(node)

    def _without(self, wait: Node) -> Iterator[Node]:
        """Yield later nodes of the block that depend neither on this wait nor on any other, in order."""
        block, needs = self._block_of(wait), {wait}
        node = wait.next
        # Gathers of backward may stand in forward already.
        while node.op != "output" and (
            not self._block_of(node) or (self._block_of(node), "forward") == (block, meta.phase(node))
        ):
            if node not in self._done:
                cuts_padding = meta.role(node) == meta.GATHER and is_view(node)
                if (cuts_padding or _may_move(node)) and needs.isdisjoint(node.all_input_nodes):
                    yield node
                else:
                    needs.add(node)
            node = node.next


def _may_move(node: Node) -> bool:
    """Return whether a node computes, in memory of its own, without communication."""
    if node.op != "call_function" or meta.role(node) or node.target is WAIT or operator_of(node.target).collective:
        return False
    return not any(is_write for _, is_write in aliased(node))


def _weight_gradients(gm: GraphModule) -> tuple[set[Node], set[Node]]:
    """Return the products only gradients at rest read, with their exclusive inputs; and the views and casts only such
    gradients read."""
    products: set[Node] = set()
    views: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        is_last_cast = node.target is torch.ops.aten._to_copy.default and all(x.op == "output" for x in node.users)
        if meta.phase(node) != "backward" or not node.users or not (is_last_cast or _may_move(node)):
            continue
        multiplies = matmul_flops(node) > 0
        rests = all(user in views or user.op == "output" or meta.role(user) for user in node.users)
        if rests and multiplies or not (multiplies or attention_flops(node)) and products.issuperset(node.users):
            products.add(node)
        elif rests and len(node.all_input_nodes) == 1:
            views.add(node)
    return products, views
