"""Policy: the recomputation that a memory budget needs. It only writes tags; `rematerialize` acts on them."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Container, Sequence
from typing import NamedTuple

from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.cut import hull, kept
from torchtitan_graph.analysis.flops import flops_of
from torchtitan_graph.analysis.keeping import Forward, chosen, elementwise_again, forward_of, movable, moved, values_of
from torchtitan_graph.analysis.liveness import size_of
from torchtitan_graph.analysis.rehearse import Rehearsal
from torchtitan_graph.analysis.traffic import group_of
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import aliased
from torchtitan_graph.parallel.recompute import Budget

# Operations that a present GPU computes in the time of reading or writing a byte, and of receiving one.
_BYTE, _BYTE_RECEIVED = 100, 1000
_LEAST_GAIN = 32  # a level that saves less than this share of a block's kept memory is left out


class Point(NamedTuple):
    """The cost of one choice: bytes kept from forward to backward, peak memory, operations added."""

    kept: int
    peak: int
    flops: int


@dataclasses.dataclass(frozen=True)
class Curve:
    """The trade-off of memory for work, from mode none to full recomputation; and the chosen point. `flops` are those
    of the whole graph."""

    points: list[Point]
    chosen: Point
    flops: int

    def added(self, point: Point) -> float:
        """Return the share of the graph's operations that a choice adds; 0 where the graph has no products."""
        return point.flops / self.flops if self.flops else 0.0


class _Level(NamedTuple):
    """A recomputation level of a block: its nodes, the bytes still kept, and the work and operations it adds."""

    again: frozenset[Node]
    kept: int
    work: int
    flops: int


def tag_budget(
    gm: GraphModule,
    blocks: Container[str],
    budget: Budget | None,
    buckets: Sequence[Sequence[str]],
    offload: Container[str] = (),
) -> GraphModule:
    """Tag RECOMPUTE in blocks, with the least work that meets the memory budget. Bitwise.

        a = mm(x, w); s = silu(a); y = mm(s, v)       s and, where that is too much, a are tagged

    A kind of block has levels: minimum cuts, at every price of memory in work. Blocks move to their next level in the
    order of the cost per byte, the first blocks first, until the step's peak memory meets the budget. The peak is
    estimated by rehearsal, so nothing is recomputed where gradients set it. Activations that the modules in `offload`
    then keep are in the host's memory. `gm.meta["curve"]` holds the choices.
    """
    if budget is None or not any(meta.phase(node) == "backward" for node in gm.graph.nodes):
        return gm
    forward = forward_of(gm, blocks)
    names = [name for name in forward.groups if name is not None]
    rehearsal = Rehearsal(gm, buckets, movable(gm, offload), blocks)
    plan = _Plan(gm, budget, rehearsal, forward, [_levels(forward.groups[name], forward) for name in names])
    level_of = plan.solve()
    for name, levels, level in zip(names, plan.levels, level_of, strict=True):
        if level:  # else `tag_elementwise` chooses the same
            for node in forward.groups[name]:
                if meta.tag(node) is None:
                    meta.write(node, tag=meta.RECOMPUTE if node in levels[level].again else meta.SAVE)
    gm.meta["curve"] = Curve(plan.curve, plan.point(level_of), sum(map(flops_of, gm.graph.nodes)))
    return gm


class _Plan:
    """The levels of all blocks, and the step's memory at each choice of them."""

    def __init__(
        self, gm: GraphModule, budget: Budget, rehearsal: Rehearsal, forward: Forward, levels: list[list[_Level]]
    ) -> None:
        self.levels, self._budget, self._rehearsal = levels, budget, rehearsal
        self._others = {node for node in gm.graph.nodes if meta.tag(node) == meta.RECOMPUTE}
        self._others |= elementwise_again(forward.groups.get(None, []), forward)
        steps = [
            ((after.work - before.work) / (before.kept - after.kept), block)
            for block, of_block in enumerate(levels)
            for before, after in itertools.pairwise(of_block)
        ]
        self._moves = sorted(steps)
        # The choices on the curve: after all moves of one price.
        self._ends = [0, *(i + 1 for i, (a, b) in enumerate(itertools.pairwise(self._moves)) if a[0] != b[0])]
        self._ends += [len(self._moves)] if self._moves else []
        self._found: dict[tuple[int, ...], Point] = {}
        self.curve = [self.point(self._after(end)) for end in self._ends]

    def point(self, level_of: Sequence[int]) -> Point:
        """Return the cost of a choice, the level of each block, by rehearsal."""
        if (key := tuple(level_of)) not in self._found:
            of_blocks = [levels[level] for levels, level in zip(self.levels, level_of, strict=True)]
            held = self._rehearsal.held(self._others.union(*(each.again for each in of_blocks)))
            peak = held.peak + (self._budget.in_flight - 1) * held.kept
            self._found[key] = Point(held.kept, peak, sum(each.flops for each in of_blocks))
        return self._found[key]

    def _after(self, num_moves: int) -> list[int]:
        level_of = [0] * len(self.levels)
        for _, block in self._moves[:num_moves]:
            level_of[block] += 1
        return level_of

    def solve(self) -> list[int]:
        """Return each block's level: the fewest moves whose peak memory meets the budget, or the lowest peak."""
        most, least = self.curve[0].peak, min(point.peak for point in self.curve)
        asked = self._budget.num_bytes
        target = max(least, int(least + self._budget.fraction * (most - least)) if asked is None else asked)

        def fits(level_of: Sequence[int]) -> bool:
            return self.point(level_of).peak <= target

        first = next(i for i, point in enumerate(self.curve) if point.peak <= target)
        low, high = self._ends[max(first - 1, 0)], self._ends[first]
        while high - low > 1:  # low does not fit, high does; the peak falls evenly, or not at all
            above, below = (self.point(self._after(n)).peak for n in (low, high))
            step = (high - low) * (above - target) // max(above - below, 1)
            for guess in (low + step, (low + high) // 2):
                guess = min(max(guess, low + 1), high - 1)
                low, high = (low, guess) if fits(self._after(guess)) else (guess, high)
                if high - low <= 1:
                    break
        level_of = self._after(high)
        # Backward soon frees the last blocks: recomputation of theirs that the peak does not need is undone.
        spared = 1
        while spared <= len(level_of) and fits([*level_of[:-spared], *[0] * spared]):
            level_of[-spared:] = [0] * spared
            spared *= 2
        return level_of


def _levels(nodes: list[Node], forward: Forward) -> list[_Level]:
    """Return a block's levels: first the choice of `tag_elementwise`, then more and more recomputation."""
    first = elementwise_again(nodes, forward)
    work = {node: 0 if node in first else _work(node) for node in nodes}
    values = values_of(nodes, forward, work.get)
    network = tuple(values.values())
    levels: list[_Level] = []
    for places in (frozenset(i for i, node in enumerate(values) if node in first), *hull(network)):
        again = chosen(values, forward, places)
        size = kept(network, places)
        if not levels or size < levels[-1].kept - levels[0].kept // _LEAST_GAIN:
            flops = sum(flops_of(node) for node in again - first)
            levels.append(_Level(frozenset(again), size, sum(work[node] or 0 for node in again), flops))
    return levels


def _work(node: Node) -> int | None:
    """Return the work of recomputing a node's value, in operations; None where that would write to a value."""
    if node.target is operator.getitem:
        source: Node = node.args[0]  # type: ignore[assignment]
        return None if meta.tag(source) == meta.SAVE else 0
    if any(writes for _, writes in aliased(node)):
        return None
    received = size_of(node) if group_of(node) else 0
    return flops_of(node) + _BYTE * moved(node) + _BYTE_RECEIVED * received
