"""The one owner of `node.meta`: what the project writes on a node, and how it is read.

phase    "forward" | "backward"
module   name of the innermost submodule whose call made the node ("" outside any)
tag      a memory policy's word: SAVE | RECOMPUTE (read by `rematerialize`) | OFFLOAD (by `offload_activations`)
role     what a layout pass made: GATHER | REDUCE, with the parameter it serves
region   the part of the graph that is compiled together, by name (read by `compile_regions`)
operations  of such a part, compiled: its FLOPs, attention's as causal
works    what the kernels of such a part, compiled, ask of a device: `cost.Work`
scratch  bytes that it needs beside its results while it runs
same_as  of a result of such a part, the number of the first result that lies in the same memory
origin   of what neither forward nor autograd made: RECOMPUTED, or the name of the pass that made it
call_hierarchy, fwd_call_hierarchy  where it was made, see graph/hierarchy.py; only where the trace recorded it
"""

import bisect
import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.graph.hierarchy import Place, below, call_hierarchy, fwd_call_hierarchy, meta_of

SAVE, RECOMPUTE, OFFLOAD = "save", "recompute", "offload"
GATHER, REDUCE = "gather", "reduce"
RECOMPUTED = "recomputed"

_TORCH = Path(torch.__file__).parent
KEYS = ("phase", "module", "tag", "role", "param", "region", "operations", "works", "scratch", "same_as", "origin")
HIERARCHIES = ("call_hierarchy", "fwd_call_hierarchy")


def phase(node: Node) -> str:
    return node.meta.get("phase", "forward")


def module(node: Node) -> str:
    return node.meta.get("module", "")


def tag(node: Node) -> str | None:
    return node.meta.get("tag")


def role(node: Node) -> str | None:
    return node.meta.get("role")


def param(node: Node) -> str | None:
    return node.meta.get("param")


def region(node: Node) -> str | None:
    return node.meta.get("region")


def operations(node: Node) -> float:
    return node.meta.get("operations", 0.0)


def works(node: Node) -> tuple[Any, ...]:
    return node.meta.get("works", ())


def scratch(node: Node) -> int:
    return node.meta.get("scratch", 0)


def same_as(node: Node) -> int | None:
    return node.meta.get("same_as")


def origin(node: Node) -> str:
    """Tell who made a node: "forward", autograd ("backward"), RECOMPUTED, or a pass, by its name."""
    return meta_of(node).get("origin", phase(node))


def source_line(node: Node) -> str | None:
    """Give the innermost line of source outside torch that made the node, as `layers/rope.py:31`, where the trace
    recorded it."""
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
    """Let a node that a pass made stand where `source` stands: same phase, module, stack trace; own tag and role."""
    for key in ("phase", "module", "stack_trace", "custom", "seq_nr", "origin", *HIERARCHIES):
        if key in source.meta:
            node.meta[key] = source.meta[key]
    own_annotations(node)
    if _pass:
        node.meta["origin"] = _pass


def own_annotations(node: Node) -> None:
    """Let a node that was copied have a dictionary of annotations of its own, which a user's pass may write to."""
    if node.meta.get("custom"):
        node.meta["custom"] = dict(node.meta["custom"])


def stand_for(node: Node, sources: Iterable[Node]) -> None:
    """Let a node that was made of several have the places of all."""
    each = list(sources)
    for key in HIERARCHIES:
        if places := dict.fromkeys(place for source in each for place in source.meta.get(key, ())):
            node.meta[key] = tuple(places)


def fill_places(gm: GraphModule) -> None:
    """Let nodes that say nothing, of a pass that makes them by FX's own means or of the graph's inputs, have the places
    of what they read, or else of what reads them."""
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
    """Let a node be what backward computes again: its forward origin is what it repeats."""
    node.meta["origin"] = RECOMPUTED
    if "call_hierarchy" in node.meta:
        node.meta["fwd_call_hierarchy"] = node.meta["call_hierarchy"]


_pass = ""  # that runs


@contextlib.contextmanager
def made_by(name: str) -> Iterator[None]:
    """Let nodes that inherit from others say that a pass made them."""
    global _pass
    before, _pass = _pass, name
    try:
        yield
    finally:
        _pass = before


def move(node: Node, old: str, new: str, places: Callable[[Place], Place]) -> None:
    """Let a node, copied from one block's graph, stand in another: `old` and `new` are the blocks' names; `places`
    gives of each place the new one."""
    name = module(node)
    if name == old or name.startswith(f"{old}."):
        write(node, module=new + name[len(old) :])
        node.meta["custom"] = node.meta["custom"] | {"module": module(node)}
    for key in HIERARCHIES:
        if key in node.meta:
            node.meta[key] = tuple(map(places, node.meta[key]))


def unsettle(node: Node) -> None:
    """Let the next `settle` say where a copied sum of gradients comes from."""
    node.meta.pop("phase")
    node.meta |= {"custom": {"phase": "backward"}, "seq_nr": sys.maxsize}  # of a sum, the counter as it is: see _is_sum
    if "call_hierarchy" in node.meta:
        node.meta["custom"]["place"], node.meta["is_grad"] = (), False


def settle(gm: GraphModule) -> None:
    """Read what the tracer left on the nodes into the keys above, once, right after tracing.

    A backward node gets the module, the annotations and the stack trace of the forward node with its autograd
    sequence number, in nested subgraphs as well; one of a module that backward calls, to compute again what a
    checkpointed region did not keep, has its own. The phase itself comes from the tracer's mark on the engine.
    """
    _settle(gm, inherited=None)


def _settle(gm: GraphModule, inherited: Node | None) -> None:
    forward: dict[int, Node] = {}  # autograd's sequence number -> the node that it was counted up for
    numbers: list[int] = []  # its keys; they only grow
    for node in gm.graph.nodes:
        if inherited is None and "phase" in node.meta:
            continue  # a copy from a block's graph, see capture/stamp.py: it was settled there
        custom = dict(node.meta.get("custom") or {})
        is_backward = custom.pop("phase", None) == "backward"
        place, source = custom.pop("place", None), None
        if not custom.get("module"):
            custom.pop("module", None)
        seq_nr = node.meta.get("seq_nr")
        if is_backward:
            # The second of two gradients that the engine sums itself, or the forward node.
            source = node.args[1] if _is_sum(node, numbers) else _forward_of(seq_nr, forward, numbers)
            if isinstance(source, Node) and "module" not in custom:
                custom = dict(source.meta["custom"])
                _copy_stack_trace(node, source)
        elif seq_nr is not None and (not numbers or seq_nr > numbers[-1]):
            # The number is counted up just before the operator runs; what autograd does not record after it shows the
            # same number.
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
    """Write down where a node was made; of a backward node also of which forward node it is, if of any."""
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
    """Tell a sum that the engine makes between two operators' backwards. torch 2.11 lets its mark stand on all that
    follows the first; but a sum shows the counter as it is, and an operator's backward that operator's number."""
    is_marked = node.target is torch.ops.aten.add.Tensor and "is_gradient_acc" in node.meta
    return is_marked and bool(numbers) and node.meta["seq_nr"] >= numbers[-1]


def _forward_of(seq_nr: int | None, forward: dict[int, Node], numbers: list[int]) -> Node | None:
    """Find the forward node of a backward node's number: the next higher one, if an operator counted further up while
    it ran, as flex attention does."""
    place = bisect.bisect_left(numbers, seq_nr) if seq_nr is not None else len(numbers)
    return forward[numbers[place]] if place < len(numbers) else None


def _copy_stack_trace(node: Node, source: Node) -> None:
    if "stack_trace" in source.meta:
        node.meta["stack_trace"] = source.meta["stack_trace"]
    else:
        node.meta.pop("stack_trace", None)
