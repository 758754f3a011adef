"""Write a graph as a Python file: to read, to compare, to run, and to read back (formats/replay.py)."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.liveness import held_memory, size_of
from torchtitan_graph.analysis.traffic import group_of
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import shape_of
from torchtitan_graph.graph.hierarchy import call_hierarchy, shown
from torchtitan_graph.graph.signature import Slot, signature_of
from torchtitan_graph.torch_private.distributed import ranks_of_group
from torchtitan_graph.torch_private.tracing import FakeTensor

_HEAD = '''"""{title}

{size} Run it on random inputs: python THIS_FILE.
"""

import operator
from math import inf, nan

import torch
from torch import device

from torchtitan_graph.formats.replay import not_kept, python, run_file
'''
_FOOT = """

if __name__ == "__main__":
    run_file(__file__)
"""
_LARGEST_CONSTANT = 64


def readable(gm: GraphModule, title: str = "A graph.", foot: str = _FOOT) -> str:
    """Return the graph as a Python file, a line per node.

    A line ends with the value's dtype and shape, the node's phase, module and passes' metadata, its source line where
    the trace recorded it, and after | the bytes held while it runs, without the inputs.
    """
    names = [f"{slot.kind} {slot.name}{number}" for slot in signature_of(gm).outputs for number in _numbers(slot)]
    results = [f'        "{name}": {x},' for name, x in zip(names, gm.graph.output_node().args[0], strict=True)]  # type: ignore[arg-type]
    given = [f"    {node.name}: {_input(node, words)!r}," for node, words in _inputs(gm)]
    body = [f"    {line}" for line in _lines(gm)]
    function = ["def graph(", *given, "):", *body, "    return {", *results, "    }"]
    held = max(held_memory(gm, size_of).values()) / 2**20
    size = f"{len(gm.graph.nodes)} nodes, {held:.3f} MiB at its peak without the inputs."
    head = _HEAD.format(title=title, size=size) + "\n" + "\n".join(_names(gm))
    return f"{head}\n\n\n" + "\n".join(function) + f"\n{foot}"


def without_bytes(text: str) -> list[str]:
    """Return a readable graph's lines without held bytes and header, for `diff`."""
    lines = [line.rpartition(" | ")[0] if line.endswith(" MiB") else line for line in text.splitlines()]
    return lines[4:]


def dump(gm: GraphModule, folder: Path, number: int, name: str) -> None:
    """Write the readable graph as `NN_name.py`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{number:02d}_{name}.py").write_text(readable(gm, f"The graph after {name}."))


def line_of(node: Node) -> str:
    """Return a node's call, and after # its value and origin."""
    return f"{node.name} = {call_of(node)}  # {_words(node)}"


def call_of(node: Node) -> str:
    """Return a node's call: `aten.mm.default(x, t)`."""
    if node.target is operator.getitem:
        return "{}[{}]".format(*node.args)
    group = group_of(node)
    shown = {group: name_of_group(group)} if group is not None else {}
    arguments = [f"{key}{_argument(x, shown)}" for key, x in [*(("", a) for a in node.args), *_named(node)]]
    return f"{target_of(node)}({', '.join(arguments)})"


def _named(node: Node) -> Iterator[tuple[str, Any]]:
    return ((f"{key}=", x) for key, x in node.kwargs.items())


def _argument(x: Any, groups: Mapping[str, str]) -> str:
    return repr(groups.get(x, x) if isinstance(x, str) else x)


def name_of_group(name: str) -> str:
    """Return a group's name by its ranks, as `ranks 0 2`: the job's own name for it may be taken in another process."""
    if not dist.is_initialized() or name.startswith("ranks "):  # of a graph that was read from a file
        return name
    return f"ranks {' '.join(map(str, ranks_of_group(name)))}"


def _words(node: Node) -> str:
    words = [marks_of(node)]
    if places := call_hierarchy(node):
        words += [f"origin={meta.origin(node)!r}", f"in {' | '.join(map(shown, places))}"]
    source = meta.source_line(node)
    return " ".join([word for word in words if word] + ([f"at {source}"] if source else []))


def marks_of(node: Node) -> str:
    """Return a node's value, phase, module and passes' metadata, as text."""
    marks = {"tag": meta.tag(node), "role": meta.role(node), "param": meta.param(node), "region": meta.region(node)}
    words = [shape_of(node.meta.get("val")), meta.phase(node), meta.module(node)]
    return " ".join(filter(None, [*words, *(f"{key}={value!r}" for key, value in marks.items() if value)]))


def _lines(gm: GraphModule) -> Iterator[str]:
    held = held_memory(gm, size_of)
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_module"):
            yield f"{line_of(node)} | {held[node] / 2**20:.3f} MiB"


def _inputs(gm: GraphModule) -> Iterator[tuple[Node, str]]:
    nodes = iter(gm.graph.find_nodes(op="placeholder"))
    for slot in signature_of(gm).inputs:
        for number in _numbers(slot):
            yield next(nodes), f"{slot.kind} {{}} {slot.name}{number}"


def _input(node: Node, words: str) -> str:
    return words.format(shape_of(node.meta["val"]))


def _numbers(slot: Slot) -> list[str]:
    """Return suffixes of the plain tensors of one input or output."""
    return [""] if slot.layout.num_tensors == 1 else [f" {i}" for i in range(slot.layout.num_tensors)]


def _names(gm: GraphModule) -> Iterator[str]:
    """Yield definitions of the names in the lines: operators, groups of ranks, constants, nested functions."""
    targets = {node.target for each in _all_graphs(gm) for node in each.graph.nodes if node.op == "call_function"}
    for name in sorted({target.namespace for target in targets if isinstance(target, OpOverload)}):
        yield f"{name} = torch.ops.{name}"
    if any(isinstance(target, HigherOrderOperator) for target in targets):
        yield "higher_order = torch.ops.higher_order"
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    groups = filter(None, map(group_of, gm.graph.nodes)) if dist.is_initialized() else ()
    ranks = {name_of_group(name): ranks_of_group(name) for name in groups}
    yield f"RANK, NUM_RANKS = {rank}, {size}"
    yield f"GROUPS = {dict(sorted(ranks.items()))}"
    for node in gm.graph.find_nodes(op="get_attr"):
        constant = getattr(gm, str(node.target))
        if isinstance(constant, GraphModule):
            yield from ("", "", *_nested(node.name, constant))
        else:
            yield f"{node.name} = {_constant(constant)}"


def _all_graphs(gm: GraphModule) -> Iterator[GraphModule]:
    yield gm
    for node in gm.graph.find_nodes(op="get_attr"):
        if isinstance(nested := getattr(gm, str(node.target)), GraphModule):
            yield from _all_graphs(nested)


def _constant(x: object) -> str:
    if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor) and x.numel() <= _LARGEST_CONSTANT:
        return f"torch.tensor({x.tolist()!r}, dtype={x.dtype})"
    return f'not_kept("a constant, {shape_of(x)}")'


def _nested(name: str, gm: GraphModule) -> Iterator[str]:
    yield f"def {name}({', '.join(node.name for node in gm.graph.find_nodes(op='placeholder'))}):"
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            yield f"    {node.name} = {_constant(getattr(gm, str(node.target)))}"
        elif node.op == "call_function":
            yield f"    {line_of(node)}"
    yield f"    return {gm.graph.output_node().args[0]!r}"
    yield ""


def target_of(node: Node) -> str:
    """Return the name of a node's target; for a Python function (Inductor's) without its address."""
    if isinstance(node.target, OpOverload):
        return str(node.target)
    if getattr(operator, getattr(node.target, "__name__", ""), None) is node.target:  # of sizes
        return f"operator.{node.target.__name__}"  # type: ignore[union-attr]
    space = "higher_order" if isinstance(node.target, HigherOrderOperator) else "python"
    return f"{space}.{getattr(node.target, '__name__', node.target)}"
