"""Several parts of a step as one graph, so that one computes while the other communicates. See Note [Interleaving]."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torchtitan_graph.analysis.cost import Costs
from torchtitan_graph.analysis.interleave import Stream, interleaved, seconds_of, stream_of
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import call, copy_node, put_in_order, recast, value
from torchtitan_graph.graph.signature import Signature, Slot, inputs_of, layout_of
from torchtitan_graph.parallel.pipeline import BACKWARD, EARLIER, FIRST, LAST, NEXT, PAIR, StageGraph, beside
from torchtitan_graph.parallel.schedule import Schedule
from torchtitan_graph.runtime.partition import Part


def with_joined(stage: StageGraph, costs: Costs, num_microbatches: int, in_pairs: bool) -> StageGraph:
    """Return a whole model's parts with those that run several of them at once: see `StageGraph.joined`."""
    parts, sums = stage.parts.by_name, _sums(stage)
    kept = {*stage.parts.outputs["grad"].values(), *stage.parts.outputs["state"].values()}
    following = [_of_next(stage)] if in_pairs else []
    first, later = PAIR if in_pairs else BACKWARD
    joined = {
        FIRST: join([parts["gather"], parts["forward"]], costs),
        first: join([parts["backward"], *following], costs),
        LAST: join([parts["backward"], sums, parts["reduce"]], costs, kept),
    }
    if num_microbatches > 2:
        joined[later] = join([parts["backward"], sums, *following], costs)
    title = parts["reduce"].gm.meta.get("name", "").rpartition(", ")[0]
    for name, part in joined.items():
        part.gm.meta["name"] = f"{title}, {name}"
    return stage._replace(joined=joined)


def with_pairs(stages: Mapping[int, StageGraph], schedule: Schedule, rank: int, costs: Costs) -> dict[int, StageGraph]:
    """Return a rank's stages with the parts that run forward of one alongside backward of another, as its pairs ask."""
    made, places = dict(stages), list(stages)
    for forward, backward in schedule.pairs_of(rank):
        stage, other = made[forward], stages[backward]
        by_name, kept = other.parts.by_name, {*other.parts.sums, *other.parts.outputs["state"].values()}
        theirs = [by_name[name] for name in ("backward", "input", "weight") if name in by_name]
        mine = _named_next(stage.parts.by_name["forward"], ())
        kept |= {other.parts.outputs["output"].get("dx", ""), *mine.gives}
        part = join([*theirs, mine], costs, kept)
        part.gm.meta["name"] = f"stage {forward}, forward alongside backward of stage {backward}"
        made[forward] = stage._replace(joined={**stage.joined, beside(places.index(backward)): part})
    return made


def _of_next(stage: StageGraph) -> Part:
    """Return forward of the next microbatch, with names of its own for all values that microbatches don't share."""
    shared = set(stage.parts.by_name["gather"].gives)
    shared |= {node.name for slot, node in inputs_of(stage.train.gm) if slot.kind != "input"}
    return _named_next(stage.parts.by_name["forward"], shared)


def _named_next(part: Part, shared: Container[str]) -> Part:
    """Return a part with names of its own for all values but the shared ones."""

    def renamed(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name if name in shared else NEXT + name for name in names)

    return Part(part.gm, renamed(part.reads), renamed(part.gives))


def join(parts: Sequence[Part], costs: Costs, kept: Set[str] | None = None) -> Part:
    """Return one part that computes what all parts do, interleaved.

    A part reads the value of a name from the parts before it, if one gives it, else from outside. Several orders are
    tried, and the one with the shortest estimate is taken: one after the other, the parts as streams, and also what
    backward computes again as a stream.

    Args:
        kept: the values that leave it, of those that the parts give; None: all.
    """
    graph, attributes = Graph(), dict[str, Any]()
    read: dict[str, Node] = {}
    made_before = set[str]()
    for part in parts:
        for node, name in zip(part.gm.graph.find_nodes(op="placeholder"), part.reads, strict=True):
            if name not in made_before and name not in read:
                read[name] = graph.placeholder(name)
                read[name].meta = dict(node.meta)
                meta.own_annotations(read[name])
        made_before.update(part.gives)
    given: dict[str, Node] = {}
    streams: list[list[Node]] = []
    for number, part in enumerate(parts):
        placeholders = part.gm.graph.find_nodes(op="placeholder")
        new = {node: given.get(name) or read[name] for node, name in zip(placeholders, part.reads, strict=True)}
        stream: list[Node] = []
        for node in part.gm.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            new[node] = copy_node(graph, node, new.__getitem__)
            if node.op == "get_attr":
                new[node].target = f"part_{number}_{node.target}".replace(".", "_")
                attributes[str(new[node].target)] = getattr(part.gm, str(node.target))
            stream.append(new[node])
        streams.append(stream)
        outputs: Any = part.gm.graph.output_node().args[0]
        given |= {name: new[node] for name, node in zip(part.gives, outputs, strict=True)}
    gives = [name for name in given if kept is None or name in kept]
    graph.output([given[name] for name in gives])
    made = GraphModule(attributes, graph)
    inputs = tuple(Slot(name, "input", layout_of(value(node))) for name, node in read.items())
    outputs = tuple(Slot(name, "output", layout_of(value(given[name]))) for name in gives)
    made.meta["signature"] = Signature(inputs, outputs)
    costs = dataclasses.replace(costs, known={})
    orders = [
        [node for stream in streams for node in stream],
        interleaved([Stream(stream) for stream in streams], costs),
        interleaved([stream_of(stream) for stream in streams], costs),
    ]
    put_in_order(min(orders, key=lambda order: seconds_of(made, order, costs)))
    made.recompile()
    return Part(made, tuple(read), tuple(gives))


def _sums(stage: StageGraph) -> Part:
    """Return the part that adds a microbatch's gradients to the sums of the earlier ones, in place."""
    graph, backward = Graph(), stage.parts.by_name["backward"]
    outputs: Any = backward.gm.graph.output_node().args[0]
    sources = dict(zip(backward.gives, outputs, strict=True))
    terms: dict[str, Node] = {}
    earlier: dict[str, Node] = {}
    for name in stage.parts.sums:
        terms[name] = graph.placeholder(name)
        terms[name].meta = dict(sources[name].meta)
        earlier[name] = graph.placeholder(EARLIER + name)
        earlier[name].meta = dict(sources[name].meta)
        if name not in stage.parts.reduced:
            earlier[name].meta["val"] = recast(value(sources[name]), stage.reduce_dtype)
    sums = [call(graph, terms[name], torch.ops.aten.add_.Tensor, earlier[name], terms[name]) for name in terms]
    graph.output(sums)
    made = GraphModule({}, graph)
    return Part(made, tuple(str(n.target) for n in made.graph.find_nodes(op="placeholder")), tuple(terms))
