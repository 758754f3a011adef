"""Comparison of both captures of a function: where the graphs differ, and what only one of them detects."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from torchtitan_graph.capture.calls import called_as
from torchtitan_graph.capture.dynamo import CAPTURES, Guards
from torchtitan_graph.capture.stamp import described
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.errors import UserError
from torchtitan_graph.formats.show import line_of
from torchtitan_graph.passes.cleanup import cleanup

aten = torch.ops.aten
_COPIES = (aten.clone, aten.copy, aten.copy_, aten._to_copy, aten.lift_fresh_copy, aten.contiguous)


class Difference(NamedTuple):
    """A node that only one graph has, or in which they differ, as each capture shows it."""

    kind: str
    make_fx: str | None
    dynamo: str | None

    def __str__(self) -> str:
        return f"{self.kind}\n      make_fx  {self.make_fx or 'nothing'}\n      dynamo   {self.dynamo or 'nothing'}"


class Comparison(NamedTuple):
    """The result of both captures of a function.

    seconds      the CPU time of each
    refused      why a capture refused the function, by its name
    num_nodes    of the graph, cleaned up
    differences  differing nodes
    values       Python values that the graph depends on besides its inputs, guarded in Dynamo's graph alone
    """

    seconds: dict[str, float]
    refused: dict[str, str]
    num_nodes: int
    differences: list[Difference]
    values: list[str]

    @property
    def is_same(self) -> bool:
        return not self.refused and not self.differences

    def lines(self) -> list[str]:
        """Return the comparison as lines, without the values."""
        took = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())
        if self.refused:
            return [f"{name} does not take it: {why}" for name, why in self.refused.items()]
        if self.differences:
            return [f"they differ in {len(self.differences)} places ({took})", *(f"  {x}" for x in self.differences)]
        checked = f"; {len(self.values)} values of Python that it depends on are checked by dynamo's alone"
        return [f"the same, {self.num_nodes} nodes ({took}){checked if self.values else ''}"]


class Comparing:
    """A `Capture` that captures each function both ways: it returns make_fx's graph, and keeps the comparison."""

    def __init__(self) -> None:
        self.found: list[Comparison] = []

    def __call__(
        self, fn: Callable[..., Any], module: nn.Module | None = None, *, stack_traces: bool = False, **others: Any
    ) -> Callable[..., TracedResult]:
        """Capture both ways. `others` are a `Capture`'s other arguments; those for one capture make the other refuse.

        Raises:
            UserError: neither can; the reason is make_fx's.
        """

        def capture(*args: Any, **kwargs: Any) -> TracedResult:
            traced: dict[str, TracedResult] = {}
            seconds: dict[str, float] = {}
            refused: dict[str, UserError] = {}

            def take(name: str, stack_traces: bool) -> TracedResult:
                found = CAPTURES[name](fn, module, stack_traces=stack_traces, **others)(*args, **kwargs)
                return dataclasses.replace(found, gm=cleanup(found.gm))

            for name in CAPTURES:
                begin = time.process_time()
                try:
                    traced[name] = take(name, stack_traces)
                except UserError as error:
                    refused[name] = error
                seconds[name] = time.process_time() - begin
            if not traced:
                raise refused["make_fx"]
            found = [] if refused else list(differing(traced["make_fx"].gm, traced["dynamo"].gm))
            if found and not stack_traces:  # source lines cost time: only if there is a difference
                found = list(differing(take("make_fx", True).gm, take("dynamo", True).gm))
            guards = [x.guards for x in traced.values() if isinstance(x.guards, Guards)]
            values = dict.fromkeys(value for each in guards for value in each.values)
            words = {name: str(error) for name, error in refused.items()}
            first = next(iter(traced.values()))
            self.found.append(Comparison(seconds, words, len(first.gm.graph.nodes), found, list(values)))
            return first

        return capture


@called_as("compare_captures(fn, module=model)(*arguments)")
def compare_captures(
    fn: Callable[..., Any], module: nn.Module | None = None, *, device: Any = "cpu"
) -> Callable[..., Comparison]:
    """Return a callable that captures `fn`, which closes over `module`, both ways for the arguments it is called with.

    Raises:
        UserError: neither can.
    """

    def compare(*args: Any, **kwargs: Any) -> Comparison:
        comparing = Comparing()
        comparing(fn, module, device=device)(*args, **kwargs)
        return comparing.found[0]

    return compare


# --- node by node -----------------------------------------------------------------------------------------------------


def differing(first: GraphModule, second: GraphModule) -> Iterator[Difference]:
    """Yield the nodes in which two cleaned graphs differ, module by module: by operator, by constant arguments, and by
    results. For graphs with equal nodes, the first with other inputs."""
    ours, theirs = _by_module(first), _by_module(second)
    is_same = True
    for place in dict.fromkeys((*ours, *theirs)):
        a, b = ours.get(place, []), theirs.get(place, [])
        for difference in _differing_of(a, b):
            is_same = False
            yield difference
    if is_same:
        pairs = zip(first.graph.nodes, _wired(first), second.graph.nodes, _wired(second), strict=True)
        other = next(((x, y) for x, wired, y, its in pairs if wired != its), None)
        if other is not None:
            yield Difference("other arguments", *map(line_of, other))


class _Seen(NamedTuple):
    """A node for comparison: all of it but its name and its inputs."""

    node: Node
    target: Any
    constants: str
    layouts: tuple


def _by_module(gm: GraphModule) -> dict[tuple[str, str], list[_Seen]]:
    found: dict[tuple[str, str], list[_Seen]] = {}
    for node, (target, arguments, layouts, phase, module, *_) in zip(gm.graph.nodes, described(gm), strict=True):
        held = getattr(gm, str(node.target)) if node.op == "get_attr" else None
        what = _digest(held) if isinstance(held, Tensor) else target
        seen = _Seen(node, what, re.sub(r"%\d+", "%", arguments), layouts)
        found.setdefault((phase, module), []).append(seen)
    return found


def _wired(gm: GraphModule) -> list[str]:
    return [arguments for _, arguments, *_ in described(gm)]


def _digest(x: Tensor) -> tuple:
    """Return a constant's key by its values: each capture may have its own copy."""
    held = b"" if x.is_meta else x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return "constant", x.shape, x.dtype, hashlib.sha256(held).digest()


def _differing_of(ours: list[_Seen], theirs: list[_Seen]) -> Iterator[Difference]:
    """Yield the differences of two graphs in one module and phase: operators first, then constants and layouts."""
    matcher = difflib.SequenceMatcher(None, [x.target for x in ours], [y.target for y in theirs], autojunk=False)
    for _, i, j, k, m in matcher.get_opcodes():
        for x, y in itertools.zip_longest(ours[i:j], theirs[k:m]):
            if x is None or y is None or (x.target, x.constants, x.layouts) != (y.target, y.constants, y.layouts):
                yield Difference(_kind(x, y), x and line_of(x.node), y and line_of(y.node))


def _kind(x: _Seen | None, y: _Seen | None) -> str:
    if x is not None and y is not None:
        if x.target != y.target:
            return "other constant" if x.node.op == y.node.op == "get_attr" else "other operator"
        return "other constant" if x.constants != y.constants else "other shape, dtype or strides"
    (extra,) = filter(None, (x, y))
    return "extra copy" if getattr(extra.target, "overloadpacket", None) in _COPIES else "extra operator"
