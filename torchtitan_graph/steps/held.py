"""Peak memory of a pipeline rank over its schedule, computed from its stages' graphs."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.liveness import (
    GATHERED,
    Memories,
    held_memory,
    input_memory,
    output_memory,
    owners,
    size_of,
)
from torchtitan_graph.graph.edit import value
from torchtitan_graph.parallel.pipeline import BACKWARD, EARLIER, FIRST, LAST, PAIR, StageGraph, beside
from torchtitan_graph.parallel.schedule import Schedule
from torchtitan_graph.runtime.partition import Part


class StagesPeak(NamedTuple):
    """A pipeline rank's peak memory in a step, above its memory from step to step: bytes by purpose, and the place;
    `part` is the stage, the part's name and its node, None while weights are gathered."""

    by: Mapping[str, int]
    where: str
    part: tuple[int, str, Node] | None

    @property
    def num_bytes(self) -> int:
        return sum(self.by.values())


KEPT, SUMS, TAKEN, RUNS = "kept for backward", "sums of gradients", "batches and messages", "what runs"


def peak_of_stages(graphs: Mapping[int, StageGraph], schedule: Schedule, rank: int) -> StagesPeak:
    """Return this rank's peak memory over its schedule: weights that are gathered once, sums of gradients, activations
    of each microbatch kept for backward, and the running part; the reductions come last, with all sums alive."""
    parts = {number: graph.parts.by_name for number, graph in graphs.items()}
    gives = {(number, name): output_memory(part.gm) for number in parts for name, part in parts[number].items()}
    sums = {number: sums_of(graph) for number, graph in graphs.items()}
    needs = {(number, name): _most(parts[number], name, sums[number]) for number in parts for name in parts[number]}
    together, places = {*schedule.pairs.values()}, list(graphs)
    for stage, other in schedule.pairs_of(rank):
        gm = graphs[stage].joined[beside(places.index(other))].gm
        kept = _freed(gm, [parts[other]["forward"]], frozenset())
        needs[stage, beside(places.index(other))] = _at_most(gm, kept, collections.Counter())
    inputs = {number: input_memory(graph.train.gm) for number, graph in graphs.items()}
    held = {GATHERED: sum(gives[number, "gather"] for number in parts), TAKEN: 0, KEPT: 0, SUMS: 0}
    peak, has_sums = StagesPeak(dict(held), GATHERED, None), set()
    for action in schedule.actions[rank]:
        stage = action.stage
        received = (graphs[stage].passed.nbytes if stage else 0) + inputs[stage]
        backward = ("backward",) if "backward" in parts[stage] else ("input", "weight")
        runs = {"F": ("forward",), "B": backward, "I": ("input",), "W": ("weight",)}.get(action.kind, ())
        for name in runs:
            held[TAKEN] += received if name == "forward" else 0
            where, run = f"{name} of microbatch {action.microbatch} in stage {stage}", name
            if action in schedule.pairs:
                _, theirs, i = schedule.pairs[action]
                run = beside(places.index(theirs))
                where += f", alongside backward of {i} in stage {theirs}"
            if action not in together:
                peak = max(peak, needs[stage, run].beside(held, where, (stage, run)), key=_size)
            if name in ("forward", "input"):
                held[KEPT] += gives[stage, name]
                continue
            # The microbatch's activations are freed; the sums of its gradients stay.
            held[TAKEN] -= received
            held[KEPT] -= sum(gives[stage, each] for each in ("forward", "input")[: 1 + (name == "weight")])
            if stage not in has_sums:
                has_sums.add(stage)
                held[SUMS] += sum(sums[stage].values())
    for stage in parts:
        needed = needs[stage, "reduce"]
        where = f"the reduction of stage {stage}, {needed.node.name}"
        peak = max(peak, needed.beside(held, where, (stage, "reduce")), key=_size)
    return peak


def peak_of_accumulation(graph: StageGraph, num_microbatches: int) -> StagesPeak:
    """Return the peak memory of a whole model's step that is cut into parts, as `peak_of_stages`."""
    parts, sums = graph.all_parts, sums_of(graph)
    held = {GATHERED: 0, TAKEN: input_memory(graph.train.gm), KEPT: 0, SUMS: 0}
    peak = StagesPeak(dict(held), "", None)
    for name, _ in runs_of(graph, num_microbatches):
        taken = held[TAKEN] * (1 + (name in PAIR))
        peak = max(peak, _most(parts, name, sums).beside({**held, TAKEN: taken}, name, (0, name)), key=_size)
        held[GATHERED] = output_memory(parts["gather"].gm)
        held[KEPT] = 0 if name in BACKWARD else output_memory(parts["forward"].gm)
        held[SUMS] = sum(sums.values()) if name != FIRST else 0
    return peak


def runs_of(graph: StageGraph, num_microbatches: int) -> list[tuple[str, int]]:
    """Return the parts of a whole model's step in their order, by name, and how often each runs."""
    (first, later), forward = (PAIR, []) if PAIR[0] in graph.joined else (BACKWARD, ["forward"])
    runs = [(FIRST, 1), *((name, 1) for name in (first, *forward))]
    runs += [(name, num_microbatches - 2) for name in (later, *forward) if num_microbatches > 2]
    return [*runs, (LAST, 1)]


def _size(peak: StagesPeak) -> int:
    return peak.num_bytes


class _Most(NamedTuple):
    """The node at a part's peak memory: the bytes allocated by then, and those freed, of kept values and of sums."""

    made: int
    kept: int
    sums: int
    node: Node

    def beside(self, held: Mapping[str, int], where: str, part: tuple[int, str]) -> StagesPeak:
        """Return the peak of the part where so much is held from before."""
        now = {**held, KEPT: held[KEPT] - self.kept, SUMS: held[SUMS] - self.sums, RUNS: self.made}
        return StagesPeak(now, where, (*part, self.node))


def _most(parts: Mapping[str, Part], name: str, sums: Mapping[str, int]) -> _Most:
    gm = parts[name].gm
    return _at_most(gm, _last_reads(parts, name), _last_reads_of_sums(gm, sums if name in ("reduce", LAST) else {}))


def _at_most(gm: GraphModule, kept_until: Mapping[Node, int], sums_until: Mapping[Node, int]) -> _Most:
    kept = summed = 0
    held, found = held_memory(gm, size_of), []
    for node in gm.graph.nodes:
        found.append(_Most(held[node], kept, summed, node))
        kept, summed = kept + kept_until[node], summed + sums_until[node]
    return max(found, key=lambda each: each.made - each.kept - each.sums)


def _last_reads(parts: Mapping[str, Part], name: str) -> collections.Counter[Node]:
    """Return the bytes freed after each node of a part, of values kept for it that no later part reads."""
    gm, order = parts[name].gm, [each for each in parts if each in ("forward", "backward", "input", "weight")]
    name = "backward" if name in (LAST, *BACKWARD, *PAIR) else name
    if name not in order[1:]:
        return collections.Counter()
    before, after = order[: order.index(name)], order[order.index(name) + 1 :]
    read_later = {value for each in after for value in parts[each].reads}
    return _freed(gm, [parts[each] for each in before], read_later)


def _freed(gm: GraphModule, before: Iterable[Part], read_later: Set[str]) -> collections.Counter[Node]:
    """Return the bytes freed after each node of a graph, of values that earlier parts give and no later one reads."""
    last_use, number = Memories(gm).last_use, {node: i for i, node in enumerate(gm.graph.nodes)}
    last = {str(x.target): number[last_use[x]] for x in gm.graph.find_nodes(op="placeholder")}
    nodes, found = list(gm.graph.nodes), collections.Counter[Node]()
    for each in before:
        owner, lying = owners(each.gm), collections.defaultdict[Node, list[str]](list)
        for value_name, x in zip(each.gives, each.gm.graph.output_node().args[0], strict=True):  # type: ignore[arg-type]
            lying[owner[x]].append(value_name)  # type: ignore[index]
        for memory, values in lying.items():
            if (here := [last[x] for x in values if x in last]) and read_later.isdisjoint(values):
                found[nodes[max(here)]] += size_of(memory)
    return found


def _last_reads_of_sums(gm: GraphModule, sums: Mapping[str, int]) -> collections.Counter[Node]:
    """Return the bytes of sums freed after each node of the reduction."""
    last_use, found = Memories(gm).last_use, collections.Counter[Node]()
    for x in gm.graph.find_nodes(op="placeholder"):
        found[last_use[x]] += sums.get(str(x.target).removeprefix(EARLIER), 0)
    return found


def in_flight(schedule: Schedule, stage: int) -> int:
    """Return the most microbatches whose activations a stage's rank keeps at once, divided by its stages, rounded up.

    Its stages share a memory; and ranks that keep equally many in all have equal graphs.
    """
    rank = schedule.rank_of[stage]
    held = most = 0
    for action in schedule.actions[rank]:
        held += (action.kind == "F") - (action.kind in ("B", "W"))
        most = max(most, held)
    return max(-(-most // len(schedule.stages_of(rank))), 1)


def sums_of(graph: StageGraph) -> dict[str, int]:
    """Return the bytes of a stage's summed gradients by their values' names: in the dtype of their reduction, unless
    they are reduced already."""
    reduced = graph.parts.reduced
    terms = _terms(graph).items()
    return {name: x.numel() * (x if name in reduced else graph.reduce_dtype).itemsize for name, x in terms}


def bytes_of_adding(graph: StageGraph) -> int:
    """Return the bytes read and written in adding a later microbatch's gradients to the sums, cast as they are read."""
    return sum(x.nbytes for x in _terms(graph).values()) + 2 * sum(sums_of(graph).values())


def cast_for_sums(graph: StageGraph) -> int:
    """Return the bytes read and written in casting the first microbatch's gradients to the sums' dtype."""
    itemsize = graph.reduce_dtype.itemsize
    terms = [x for name, x in _terms(graph).items() if name not in graph.parts.reduced]
    return sum(x.numel() * (x.itemsize + itemsize) for x in terms if x.dtype != graph.reduce_dtype)


def _terms(graph: StageGraph) -> dict[str, Any]:
    return {node.name: value(node) for node in graph.train.gm.graph.nodes if node.name in graph.parts.sums}
