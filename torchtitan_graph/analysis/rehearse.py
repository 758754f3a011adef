"""Peak memory under a recomputation plan: `rematerialize` and offloading, simulated."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Container, Sequence
from typing import NamedTuple

from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.liveness import Memories, scratch_of, size_of
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.blocks import block_of, boundaries
from torchtitan_graph.graph.collectives import gathered_weights, reductions


class Held(NamedTuple):
    """Peak bytes of a graph's values without its inputs, and the bytes of these that exist when backward begins,
    without gathered weights."""

    peak: int
    kept: int


class Rehearsal:
    """Computes a graph's peak memory under recomputation plans, without editing the graph."""

    def __init__(
        self,
        gm: GraphModule,
        buckets: Sequence[Sequence[str]] = (),
        movable: Container[Node] = (),
        blocks: Container[str] = (),
    ) -> None:
        """Read the graph, without changing it.

        Args:
            buckets: names of parameters whose gradients are reduced together, when the last is computed.
            movable: values that are offloaded to the host's memory till backward, if they are saved for it.
            blocks: the boundaries at which they are offloaded and reloaded.
        """
        memories, nodes, weights = Memories(gm), list(gm.graph.nodes), gathered_weights(gm)
        owner = memories.owner
        nodes, also = _reduced_together(gm, nodes, buckets)
        place = {node: i for i, node in enumerate(nodes)}
        self._nodes = nodes
        self._inputs = [[place[x] for x in (*node.all_input_nodes, *also.get(node, ()))] for node in nodes]
        # For a view, the index of the input that it aliases.
        self._source = [
            next((i for i, x in enumerate(node.all_input_nodes) if owner[x] is owner[node]), None)
            if owner[node] is not node
            else None
            for node in nodes
        ]
        # For an operator with several results, the picked ones; for such a result, where it is picked first.
        self._results = [[place[x] for x in memories.results(node)] for node in nodes]
        self._first = [
            place[owner[node]] if node.target is operator.getitem and source is None else None
            for node, source in zip(nodes, self._source, strict=True)
        ]
        self._sizes = [size_of(node) if owner[node] is node else 0 for node in nodes]
        self._weights = [i for i, node in enumerate(nodes) if node in weights]
        self._taken = [sum(map(size_of, memories.taken(node))) for node in nodes]
        self._scratch = [scratch_of(node) for node in nodes]
        self._is_late = [node.op == "call_function" and meta.phase(node) == "backward" for node in nodes]
        self._may_move = [node in movable for node in nodes]
        self._block = [block_of(node, blocks) if any(self._may_move) else None for node in nodes]
        self._stays = [node.op in ("placeholder", "output") or node.is_impure() for node in nodes]

    def held(self, again: Container[Node]) -> Held:
        """Return the graph's memory under the plan that `rematerialize` recomputes these nodes.

        The copy of node i has the index i + n.
        """
        n, sizes, source = len(self._nodes), self._sizes, self._source
        runs, reads = self._order([node in again for node in self._nodes])
        owner, last_use = list(range(2 * n)), [-1] * (2 * n)
        for t, i in enumerate(runs):
            looks_at = source[i % n]
            first = self._first[i % n]
            if looks_at is not None:
                owner[i] = owner[reads[i][looks_at]]
            elif first is not None:
                owner[i] = first + reads[i][0] // n * n
            for x in (i, *reads[i]):
                last_use[owner[x]] = t
                for result in self._results[x % n]:
                    last_use[result + x // n * n] = t
        freed_at = [0] * len(runs)
        for i, t in enumerate(last_use):
            freed_at[t] += sizes[i % n] if t >= 0 else 0
        for i, leaves, back in self._moves(runs, reads, owner):
            freed_at[leaves] += sizes[i]
            freed_at[back - 1] -= sizes[i]
        held = peak = kept = 0
        begins = False
        for t, i in enumerate(runs):
            if not begins and (i >= n or self._is_late[i]):
                begins, kept = True, held - sum(sizes[x] for x in self._weights if last_use[x] >= t)
            held += self._taken[i % n]
            peak = max(peak, held + self._scratch[i % n])
            held -= freed_at[t]
        return Held(peak, kept)

    def _moves(self, runs: list[int], reads: list[list[int]], owner: list[int]) -> list[tuple[int, int, int]]:
        """Return the offloaded memories, as `offload_activations` chooses them: the owner, the step after which it is
        freed, and the step before which it is allocated again."""
        if not any(self._may_move):
            return []
        n = len(self._nodes)
        late = [i >= n or self._is_late[i] for i in runs]
        found = boundaries([(self._block[i % n], is_late) for i, is_late in zip(runs, late, strict=True)])
        read, first = [0] * n, dict[int, tuple[int, int]]()  # last read in forward; first in backward, with the value
        for t, i in enumerate(runs):
            for x in reads[i]:
                if owner[x] < n and late[t]:
                    first.setdefault(owner[x], (t, x))
                elif owner[x] < n:
                    read[owner[x]] = t
        moves = []
        for i, (t, x) in first.items():
            way = found.way(self._block[x % n], t) if self._may_move[x % n] else None
            if way is not None:
                moves.append((i, max(read[i], way[0]), found.begins[way[1]]))
        return [(i, leaves, back) for i, leaves, back in moves if leaves < back]

    def _order(self, is_again: list[bool]) -> tuple[list[int], list[list[int]]]:
        """Return the nodes that run, in order, and each one's inputs."""
        n = len(self._nodes)
        reads = self._inputs + [[]] * n
        has_copy = [False] * n
        runs: list[int] = []

        def with_copies(i: int) -> list[int]:
            return [j + n if is_again[j] else j for j in self._inputs[i]]

        for i, inputs in enumerate(self._inputs):
            if self._is_late[i] and any([is_again[j] for j in inputs]):
                pending = [j for j in reversed(inputs) if is_again[j] and not has_copy[j]]
                while pending:
                    j = pending[-1]
                    needed = [k for k in self._inputs[j] if is_again[k] and not has_copy[k]]
                    if needed:
                        pending += needed
                        continue
                    pending.pop()
                    if not has_copy[j]:
                        has_copy[j], reads[j + n] = True, with_copies(j)
                        runs.append(j + n)
                reads[i] = with_copies(i)
            runs.append(i)
        is_used = [False] * (2 * n)
        alive = []
        for i in reversed(runs):  # dead code: forward nodes that only backward read
            if is_used[i] or self._stays[i % n]:
                alive.append(i)
                for j in reads[i]:
                    is_used[j] = True
        return alive[::-1], reads


def _reduced_together(
    gm: GraphModule, nodes: list[Node], buckets: Sequence[Sequence[str]]
) -> tuple[list[Node], dict[Node, list[Node]]]:
    """Return the order of nodes once each bucket is reduced at once, and additional inputs of some: one operator then
    reads the inputs of several."""
    found, place = reductions(gm), {node: i for i, node in enumerate(nodes)}
    after: dict[Node, list[Node]] = {}
    also: dict[Node, list[Node]] = {}
    for names in buckets:
        bucket = [found[name] for name in names if name in found and found[name].nodes]
        if len(bucket) > 1:
            last = max((reduction.gradient for reduction in bucket), key=place.__getitem__)
            for step in itertools.zip_longest(*(reduction.nodes for reduction in bucket)):
                together = [node for node in step if node is not None]
                after.setdefault(last, []).extend(together)
                also[together[-1]] = [x for node in together for x in node.all_input_nodes]
    moved = {node for later in after.values() for node in later}
    return [x for node in nodes if node not in moved for x in (node, *after.get(node, ()))], also
