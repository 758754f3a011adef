"""The outcome of a pass on one graph: its failure, if any, and its changes."""

from __future__ import annotations

import dataclasses
import difflib
import traceback
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

from torchtitan_graph.compiler import Pass, find_problem
from torchtitan_graph.formats.replay import random_inputs
from torchtitan_graph.formats.show import line_of, readable, without_bytes
from torchtitan_graph.graph.edit import copy_graph, shape_of
from torchtitan_graph.graph.signature import Plain, signature_of
from torchtitan_graph.parallel.verify import collectives, distance, first_difference, same_bits, tolerance

RAISES, UNSOUND, ORDER, NUMBERS = "raises", "unsound", "order", "numbers"


@dataclasses.dataclass(frozen=True)
class PassFailure:
    """A failure of a pass: `kind` is one of the words above."""

    kind: str
    said: str


def apply(own: Pass, gm: GraphModule) -> GraphModule | PassFailure:
    """Run a pass on a copy of a graph; return the result, or why it can't be run."""
    try:
        after = own.run(copy_graph(gm))
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
        where = f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})"
        return PassFailure(RAISES, f"{type(error).__name__}: {error}{where}")
    if problem := find_problem(after):
        return PassFailure(UNSOUND, problem)
    if stale := _stale_values(after):
        return PassFailure(UNSOUND, stale)
    after.recompile()
    return after


def _stale_values(gm: GraphModule) -> str | None:
    """Return a text on the first node whose operator, on its inputs' metadata, contradicts its own metadata."""
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        said = node.meta["val"]
        fakes = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
        if not fakes or not isinstance(said, Tensor):
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        try:
            with fakes[0].fake_mode:  # type: ignore[attr-defined]
                found = node.target(*args, **kwargs)
        except Exception as error:
            return f"gives a graph that can't run: {line_of(node)}: {error}"
        if (found.shape, found.dtype) != (said.shape, said.dtype):
            return f"gives a graph whose node is {shape_of(found)}, not what its meta['val'] says: {line_of(node)}"
    return None


@torch.no_grad()
def outcome_on_random(own: Pass, gm: GraphModule) -> PassFailure | None:
    """Apply a pass, and run the graph before and after it on random inputs; all ranks together, and return the failure
    that all agree on. None as well where the graph before the pass can't run on such numbers."""
    after = apply(own, gm)
    failure = agree(after if isinstance(after, PassFailure) else None)
    if failure is None:
        assert isinstance(after, GraphModule)
        failure = _order(after)
    if failure is not None:
        return failure
    assert isinstance(after, GraphModule)
    inputs = list(random_inputs(layouts(gm), dist.get_rank() if dist.is_initialized() else 0).values())
    try:
        expected: list[Tensor] | None = gm(*[x.clone() for x in inputs])
    except Exception:
        expected = None
    if agree(None if expected is not None else PassFailure(RAISES, "before the pass")) is not None:
        return None
    try:
        found = after(*[x.clone() for x in inputs])
    except Exception as error:
        return agree(PassFailure(UNSOUND, f"gives a graph that can't run: {error}"))
    return agree(compare(own, gm, expected or [], found))


def _order(after: GraphModule) -> PassFailure | None:
    mine = collectives(after, {})
    by_rank = _gathered(mine)
    said = first_difference(dict(enumerate(by_rank)))
    return PassFailure(ORDER, f"ranks send in different orders: {said}") if said else None


def layouts(gm: GraphModule) -> dict[str, Plain]:
    """Return the layout of each placeholder by its name."""
    values = {node.name: node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")}
    return {name: Plain(tuple(x.shape), x.dtype) for name, x in values.items()}


def compare(own: Pass, gm: GraphModule, expected: Sequence[Tensor], found: Sequence[Tensor]) -> PassFailure | None:
    """Compare a graph's outputs before and after a pass; up to rounding for a pass that is not exact."""
    different = []
    for slot, a, b in zip(signature_of(gm).outputs, expected, found, strict=True):
        if same_bits(a, b) or (not own.exact and distance(a, b) <= tolerance(a.dtype)):
            continue
        different.append(f"{slot.kind} {slot.name} ({distance(a, b):.1e} of its norm)")
    return PassFailure(NUMBERS, f"other numbers: {', '.join(different[:5])}") if different else None


def agree(failure: PassFailure | None) -> PassFailure | None:
    """Return the failure of the first rank that has one, on all ranks."""
    return next((each for each in _gathered(failure) if each is not None), None)


def _gathered(mine: object) -> list:
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return [mine]
    by_rank: list = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, mine)
    return by_rank


def difference(before: GraphModule, after: GraphModule) -> list[str]:
    """Return the unified diff of two graphs."""
    old, new = (without_bytes(readable(gm)) for gm in (before, after))
    return list(difflib.unified_diff(old, new, "before", "after", n=1, lineterm=""))[2:]
