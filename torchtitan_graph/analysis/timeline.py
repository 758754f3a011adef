"""Placement of operators that start early: copies and collectives, within a graph's peak memory."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.liveness import held_memory, in_one_part, peaks, size_of


class Timeline:
    """The memory held while each of a graph's nodes runs, and its limit there: the peak of the node's part.

    Places are indices of `nodes`, the graph's order when the timeline was made. What is started earlier is counted as
    held from there on, so that the next placement sees it.
    """

    def __init__(self, gm: GraphModule, part_of: Callable[[Node], str] = in_one_part) -> None:
        held = held_memory(gm, size_of, part_of)
        peak = peaks(held, part_of)
        self.nodes, self._held = list(held), [*held.values()]
        self._limits = [peak[part_of(node)] for node in self.nodes]
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.first = next(i for i, node in enumerate(self.nodes) if node.op != "placeholder")
        self._moved = set[Node]()

    def start_earlier(
        self, nodes: list[Node], until: int, earliest: int, num_bytes: int, scratch: int = 0, partway: bool = True
    ) -> int:
        """Move nodes together, in order, as early as the memory that they allocate allows; return their new place.

        Args:
            until: the place from which their memory is counted already.
            earliest: the place before which none is moved. Where `partway` is false they are moved there, or stay.
            num_bytes, scratch: the memory that they hold from their new place on, and that they need to run.
        """
        place = until
        while place > earliest and self._held[place - 1] + num_bytes + scratch <= self._limits[place - 1]:
            place -= 1
        if place != earliest and not partway:
            return until
        for i in range(place, until):
            self._held[i] += num_bytes
        moved = [node for node in nodes if self.place[node] >= place]
        self._moved.update(moved)
        following = next(node for node in self.nodes[place:] if node not in self._moved)
        for node in moved:
            following.prepend(node)
        return place
