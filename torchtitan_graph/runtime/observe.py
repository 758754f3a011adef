"""Observe a graph while it runs: by module for a profiler, by work and waiting for a stopwatch, gradient by gradient
for their sum over replica groups.

Each kind of observation is a copy of the graph with calls between its nodes, made when it is first needed: an
unobserved run costs nothing, and the same operators run in the same order in any case.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.profiler import record_function

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import shape_of
from torchtitan_graph.graph.hierarchy import call_hierarchy, shown
from torchtitan_graph.graph.signature import signature_of
from torchtitan_graph.runtime.gradients import add_gives, begin_run
from torchtitan_graph.torch_private.profiler import begin_range, is_profiling
from torchtitan_graph.torch_private.tracing import boxed

WAIT = torch.ops._c10d_functional.wait_tensor.default

Edit = Callable[[Graph], None]
_UNSAFE = re.compile(r'[\x00-\x1f"\\]')


class Watchable:
    """A graph as a function of one list, which it empties; observed where a profiler or a stopwatch runs, and where its
    gradients are taken. A profiler's events have the graph's `meta["name"]`."""

    def __init__(self, gm: GraphModule) -> None:
        self._gm, self._add_spans = gm, partial(add_spans, name=gm.meta.get("name", "graph"))
        self._copies: dict[tuple[Edit, ...], Callable[[list[Tensor]], list[Tensor]]] = {}

    @functools.cached_property
    def _add_gives(self) -> Edit:
        kinds = [slot.kind for slot in signature_of(self._gm).outputs for _ in range(slot.layout.num_tensors)]
        return partial(add_gives, places=[place for place, kind in enumerate(kinds) if kind == "grad"])

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        edits: tuple[Edit, ...] = (self._add_spans,) * is_profiling() + (add_marks,) * (_stopwatch is not None)
        if begin_run():
            edits = (self._add_gives, *edits)
        if edits not in self._copies:
            self._copies[edits] = boxed(self._gm, edits)
        mark()
        outputs = self._copies[edits](inputs)
        mark()
        return outputs


def add_spans(graph: Graph, name: str) -> None:
    """Insert profiler spans of modules, `forward layers.0` around `forward layers.0.attention`, and in them of the
    nodes of the graph of that name, with the arguments of `_words`. A node that runs a graph of its own, as compiled
    code does, is one span."""
    is_open: list[tuple[str, Node]] = []
    for node in list(graph.nodes):
        if node.op != "output" and (node.op != "call_function" or node.target is operator.getitem):
            continue
        names = _span_names(node) if node.op != "output" else []
        num_kept = 0
        while num_kept < min(len(names), len(is_open)) and names[num_kept] == is_open[num_kept][0]:
            num_kept += 1
        with graph.inserting_before(node):
            while len(is_open) > num_kept:
                graph.call_function(_end_span, (is_open.pop()[1],))
            for each in names[num_kept:]:
                is_open.append((each, graph.call_function(_begin_span, (each,))))
            if node.op != "output":
                begun = graph.call_function(begin_range, (node.name, _words(node, name)))
        if node.op != "output":
            with graph.inserting_after(node):
                graph.call_function(_end_span, (begun,))


def _words(node: Node, graph: str) -> dict[str, str]:
    """Return a profiler event's arguments: the node and its origin; `analysis/measured.py` reads the first two, and the
    value's shape. A trace's writer escapes nothing."""
    places = " | ".join(map(shown, call_hierarchy(node)))
    words = {
        "node": node.name,
        "graph": graph,
        "phase": meta.phase(node),
        "origin": meta.origin(node),
        "module": meta.module(node),
        "value": shape_of(node.meta.get("val")),
        "scope": places,
    }
    return {key: _UNSAFE.sub("?", text) for key, text in words.items() if text}


def _span_names(node: Node) -> list[str]:
    """Return the spans around a node, the outermost first; a number in a module's name belongs to the word before."""
    phase, parts = meta.phase(node), re.findall(r"[^.]+(?:\.\d+)?", _UNSAFE.sub("?", meta.module(node)))
    return [phase] + [f"{phase} {'.'.join(parts[: i + 1])}" for i in range(len(parts))]


def _begin_span(name: str) -> Any:
    span = record_function(name)
    span.__enter__()
    return span


def _end_span(span: Any) -> None:
    span.__exit__(None, None, None)


def add_marks(graph: Graph) -> None:
    """Insert the stopwatch's marks before and after each wait for a collective."""
    for node in graph.find_nodes(op="call_function", target=WAIT):
        with graph.inserting_before(node):
            graph.call_function(mark)
        with graph.inserting_after(node):
            graph.call_function(mark)


class Stopwatch:
    """The time that graphs work on this device, without waits for other ranks.

    On a GPU the marks are events in the stream that computes: time that it waits for a collective's is not work.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []  # work begins, ends, begins, ends ...

    def mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> float:
        """Return the seconds of work; waits for the device."""
        if self._on_gpu and self._marks:
            self._marks[-1].synchronize()
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        return sum(begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin for begin, end in pairs)


_stopwatch: Stopwatch | None = None


@contextlib.contextmanager
def stopwatch(device: torch.device) -> Iterator[Stopwatch]:
    """Time the work of graphs inside."""
    global _stopwatch
    _stopwatch = Stopwatch(device)
    try:
        yield _stopwatch
    finally:
        _stopwatch = None


def mark() -> None:
    """Mark the begin or end of work in the active stopwatch, if there is one."""
    if _stopwatch is not None:
        _stopwatch.mark()
