"""Show a graph as readable Python."""

from __future__ import annotations

import types
from pathlib import Path

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.signature import signature_of


def readable(gm: GraphModule) -> str:
    """Give the graph as Python, with each node's shape, phase and module, and its line of source where the trace
    recorded it: two of these can be compared with `diff`."""
    lines = [f"# input  {s.kind:6} {s.name}" for s in signature_of(gm).inputs]
    lines += [f"# output {s.kind:6} {s.name}" for s in signature_of(gm).outputs]
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        words = [_shape(val), meta.phase(node), meta.module(node), meta.tag(node), meta.role(node), meta.region(node)]
        words.append(meta.source_line(node))
        arguments = [repr(a) for a in node.args] + [f"{k}={v!r}" for k, v in node.kwargs.items()]
        target = (
            f"{_target(node)}({', '.join(arguments)})" if node.op.startswith("call") else f"{node.op} {node.target}"
        )
        text = f"return {node.args[0]}" if node.op == "output" else f"{node.name} = {target}"
        lines.append(f"{text}  # {' '.join(word for word in words if word)}")
    return "\n".join(lines) + "\n"


def dump(gm: GraphModule, folder: Path, number: int, name: str) -> None:
    """Write the readable graph as `NN_name.txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{number:02d}_{name}.txt").write_text(readable(gm))


def _target(node: Node) -> str:
    """Name what a node calls; a Python function (what Inductor compiled) without its address."""
    return node.target.__name__ if isinstance(node.target, types.FunctionType) else str(node.target)


def _shape(val: object) -> str:
    if isinstance(val, torch.Tensor):
        return f"{str(val.dtype).removeprefix('torch.')}{list(val.shape)}"
    return f"({', '.join(map(_shape, val))})" if isinstance(val, (tuple, list)) else ""
