"""Overlap of copies between host and device with computation: start early, wait late."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.liveness import size_of
from torchtitan_graph.analysis.timeline import Timeline
from torchtitan_graph.graph import meta
from torchtitan_graph.ops.copies import arrived, landed, offload


def overlap_copies(gm: GraphModule, buckets: Sequence[Sequence[str]]) -> GraphModule:
    """Start host-to-device copies a bucket early, and wait for device-to-host copies a bucket late. Bitwise.

        a' = arrived(reload(a)); use(a'); b' = arrived(reload(b)); use(b')
        ra = reload(a); rb = reload(b); a' = arrived(ra); use(a'); b' = arrived(rb); use(b')

    The copies of a bucket of parameters start where those of the one before are waited for; those of a bucket of
    gradients are waited for where the last of the next one starts. So the device holds one bucket of shards more than
    the one in use, in either direction. The first copies of backward would be held through the loss: they start as
    early as the step's peak memory allows.
    """
    bucket_of = {name: i for i, names in enumerate(buckets) for name in names}

    def runs_of(nodes: list[Node]) -> list[list[Node]]:
        """Group consecutive nodes of one bucket."""
        runs = itertools.groupby(nodes, key=lambda n: (bucket_of[meta.param(n) or ""], meta.phase(n)))
        return [list(run) for _, run in runs]

    fetched = runs_of([n for n in _calls(gm, arrived) if meta.role(n) == meta.GATHER])
    sent = runs_of([n for n in _calls(gm, offload) if meta.role(n) == meta.REDUCE])
    first = None  # the first run of backward
    for before, run in itertools.pairwise([[], *fetched]):
        is_alike = before and meta.phase(before[0]) == meta.phase(run[0])
        first = run if before and not is_alike else first
        for node in run:
            (before if is_alike else run)[0].prepend(_start(node))
    if first is not None:
        starts, timeline = [_start(node) for node in first], Timeline(gm)
        size = sum(map(size_of, starts))
        timeline.start_earlier(starts, timeline.place[starts[0]], timeline.first, size)
    for run, after in itertools.pairwise(sent):
        for copy in run:
            (there,) = copy.users
            after[-1].prepend(there)
    _land_last(gm)
    gm.recompile()
    return gm


def _land_last(gm: GraphModule) -> None:
    """Move the host's waits to the end, when it has nothing more to launch."""
    on_host = set(_calls(gm, landed))
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and (node in on_host or not on_host.isdisjoint(node.all_input_nodes)):
            on_host.add(node)
            gm.graph.output_node().prepend(node)


def _calls(gm: GraphModule, target: torch._ops.OpOverload) -> list[Node]:
    """Return the calls of an operator in order."""
    return [node for node in gm.graph.nodes if node.target is target]


def _start(wait: Node) -> Node:
    return wait.args[0]  # type: ignore[return-value]
