"""The one owner of `node.meta`: the project's metadata of a node, written and read.

phase    "forward" | "backward"
module   name of the innermost submodule whose call made the node ("" outside any)
tag      a memory policy's choice: SAVE | RECOMPUTE (read by `rematerialize`) | OFFLOAD (by `offload_activations`)
role     of a layout pass' node: GATHER | REDUCE, with its parameter
region   name of the part of the graph that is compiled together (read by `compile_regions`)
operations  FLOPs of a compiled region, attention counted as causal
works    bytes and FLOPs of a compiled region's kernels: `cost.Work`
scratch  bytes of temporaries that a compiled region needs while it runs
same_as  of a compiled region's result, the number of the first result in the same memory
origin   of a node that neither forward nor autograd made: RECOMPUTED, or the name of the pass that made it
call_hierarchy, fwd_call_hierarchy  where it was made, see graph/hierarchy.py; only where the trace recorded it
"""

import bisect
import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.graph.hierarchy import Place, below, call_hierarchy, fwd_call_hierarchy, meta_of

SAVE, RECOMPUTE, OFFLOAD = "save", "recompute", "offload"
GATHER, REDUCE = "gather", "reduce"
RECOMPUTED = "recomputed"

T = TypeVar("T")

_TORCH = Path(torch.__file__).parent
KEYS = ("phase", "module", "tag", "role", "param", "region", "operations", "works", "scratch", "same_as", "origin")
HIERARCHIES = ("call_hierarchy", "fwd_call_hierarchy")


def _reader(key: str, default: T) -> Callable[[Node], T]:
    return lambda node: node.meta.get(key, default)


phase, module = _reader("phase", "forward"), _reader("module", "")
tag: Callable[[Node], str | None] = _reader("tag", None)
role: Callable[[Node], str | None] = _reader("role", None)
param: Callable[[Node], str | None] = _reader("param", None)
region: Callable[[Node], str | None] = _reader("region", None)
operations, scratch = _reader("operations", 0.0), _reader("scratch", 0)
works: Callable[[Node], tuple[Any, ...]] = _reader("works", ())
same_as: Callable[[Node], int | None] = _reader("same_as", None)


def origin(node: Node) -> str:
    """Return a node's origin: "forward", autograd ("backward"), RECOMPUTED, or the name of a pass."""
    return meta_of(node).get("origin", phase(node))


def source_line(node: Node) -> str | None:
    """Return the innermost source line outside torch that made the node, as `layers/rope.py:31`; None where the trace
    recorded none."""
    frames = re.findall(r'File "(.*)", line (\d+)', node.meta.get("stack_trace") or "")
    for path, number in reversed(frames):
        if not Path(path).is_relative_to(_TORCH):
            return f"{'/'.join(Path(path).parts[-2:])}:{number}"
    return None


def write(node: Node, **values: str | float | tuple[Any, ...] | None) -> None:
    """Set some of the keys above; None removes one."""
    for key, value in values.items():
        assert key in KEYS, key
        if value is None:
            node.meta.pop(key, None)
        else:
            node.meta[key] = value


def inherit(node: Node, source: Node) -> None:
    """Copy phase, module, stack trace, annotations and places of `source` to a new node of a pass, but neither tag nor
    role."""
    for key in ("phase", "module", "stack_trace", "custom", "seq_nr", "origin", *HIERARCHIES):
        if key in source.meta:
            node.meta[key] = source.meta[key]
    own_annotations(node)
    if _pass:
        node.meta["origin"] = _pass


def own_annotations(node: Node) -> None:
    """Replace a copied node's dictionary of annotations by a copy, which a user's pass may write to."""
    if node.meta.get("custom"):
        node.meta["custom"] = dict(node.meta["custom"])


def stand_for(node: Node, sources: Iterable[Node]) -> None:
    """Set a merged node's places to those of all `sources`."""
    each = list(sources)
    for key in HIERARCHIES:
        if places := dict.fromkeys(place for source in each for place in source.meta.get(key, ())):
            node.meta[key] = tuple(places)


def fill_places(gm: GraphModule) -> None:
    """Set the places of nodes without any, which a pass made by FX's own means, to those of their inputs, or else of
    their users."""
    silent = [
        node
        for node in gm.graph.nodes
        if node.op in ("call_function", "call_module") and "call_hierarchy" not in node.meta
    ]
    for node in silent:
        stand_for(node, node.all_input_nodes)
        node.meta["origin"] = _pass
    for node in reversed(silent):
        if "call_hierarchy" not in node.meta:
            stand_for(node, node.users)


def recomputed(node: Node) -> None:
    """Mark a node as recomputed in backward: its forward origin is the place that it repeats."""
    node.meta["origin"] = RECOMPUTED
    if "call_hierarchy" in node.meta:
        node.meta["fwd_call_hierarchy"] = node.meta["call_hierarchy"]


_pass = ""  # the running pass


@contextlib.contextmanager
def made_by(name: str) -> Iterator[None]:
    """Record a pass' name as the origin of nodes that inherit from others meanwhile."""
    global _pass
    before, _pass = _pass, name
    try:
        yield
    finally:
        _pass = before


def move(node: Node, old: str, new: str, places: Callable[[Place], Place]) -> None:
    """Move a node, copied from one block's graph, to another block: `old` and `new` are the blocks' names; `places`
    maps each place to the new one."""
    name = module(node)
    if name == old or name.startswith(f"{old}."):
        write(node, module=new + name[len(old) :])
        node.meta["custom"] = node.meta["custom"] | {"module": module(node)}
    for key in HIERARCHIES:
        if key in node.meta:
            node.meta[key] = tuple(map(places, node.meta[key]))


def unsettle(node: Node) -> None:
    """Mark a copied sum of gradients, so that the next `settle` computes its origin."""
    node.meta.pop("phase")
    node.meta |= {"custom": {"phase": "backward"}, "seq_nr": sys.maxsize}  # a sum has the counter's value: see _is_sum
    if "call_hierarchy" in node.meta:
        node.meta["custom"]["place"], node.meta["is_grad"] = (), False


def settle(gm: GraphModule) -> None:
    """Convert the tracer's annotations of the nodes into the keys above, once, right after tracing.

    A backward node gets the module, the annotations and the stack trace of the forward node with its autograd sequence
    number, in nested subgraphs as well; one of a module that backward calls, to recompute a checkpointed region, has
    its own. The phase itself comes from the tracer's mark on the engine.
    """
    _settle(gm, inherited=None)


def _settle(gm: GraphModule, inherited: Node | None) -> None:
    forward: dict[int, Node] = {}  # autograd's sequence number -> the node that incremented it
    numbers: list[int] = []  # its keys, increasing
    for node in gm.graph.nodes:
        if inherited is None and "phase" in node.meta:
            continue  # copied from a block's graph, see capture/stamp.py: it was settled there
        custom = dict(node.meta.get("custom") or {})
        is_backward = custom.pop("phase", None) == "backward"
        place, source = custom.pop("place", None), None
        if not custom.get("module"):
            custom.pop("module", None)
        seq_nr = node.meta.get("seq_nr")
        if is_backward:
            # The second of two gradients in a sum by the engine, or the forward node.
            source = node.args[1] if _is_sum(node, numbers) else _forward_of(seq_nr, forward, numbers)
            if isinstance(source, Node) and "module" not in custom:
                custom = dict(source.meta["custom"])
                _copy_stack_trace(node, source)
        elif seq_nr is not None and (not numbers or seq_nr > numbers[-1]):
            # The counter is incremented just before the operator runs; a later node that autograd does not record has
            # the same number.
            forward[seq_nr] = node
            numbers.append(seq_nr)
        if inherited is not None:
            custom, source = inherited.meta["custom"] | custom, inherited
            is_backward = phase(inherited) == "backward"
            _copy_stack_trace(node, inherited)
        node.meta["custom"] = custom
        write(node, phase="backward" if is_backward else "forward", module=custom.get("module", ""))
        if place is not None:
            _settle_place(node, place, source if is_backward else None)
        for argument in node.all_input_nodes:
            if argument.op == "get_attr" and isinstance(nested := getattr(gm, str(argument.target), None), GraphModule):
                _settle(nested, inherited=node)


def _settle_place(node: Node, place: Place, source: Any) -> None:
    """Write a node's place; for a backward node also its forward origins, if it has any."""
    is_again = node.meta.pop("is_grad", False) and phase(node) == "backward" and bool(place)
    if phase(node) == "backward":
        origins = fwd_call_hierarchy(source) or call_hierarchy(source) if isinstance(source, Node) else ()
        node.meta["fwd_call_hierarchy"] = origins or ((),)
        node.meta["call_hierarchy"] = tuple(below(origin, place) for origin in origins or ((),))
    else:
        node.meta["call_hierarchy"] = (place,)
    if is_again:
        recomputed(node)


def _is_sum(node: Node, numbers: list[int]) -> bool:
    """Return whether a node is a sum that the engine makes between two operators' backwards. torch 2.11 leaves its mark
    on all nodes after the first; but a sum has the counter's current value, and an operator's backward that operator's
    number."""
    is_marked = node.target is torch.ops.aten.add.Tensor and "is_gradient_acc" in node.meta
    return is_marked and bool(numbers) and node.meta["seq_nr"] >= numbers[-1]


def _forward_of(seq_nr: int | None, forward: dict[int, Node], numbers: list[int]) -> Node | None:
    """Return the forward node of a backward node's number: the next higher one, if an operator incremented the counter
    further while it ran, as flex attention does."""
    place = bisect.bisect_left(numbers, seq_nr) if seq_nr is not None else len(numbers)
    return forward[numbers[place]] if place < len(numbers) else None


def _copy_stack_trace(node: Node, source: Node) -> None:
    if "stack_trace" in source.meta:
        node.meta["stack_trace"] = source.meta["stack_trace"]
    else:
        node.meta.pop("stack_trace", None)
