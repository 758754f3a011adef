"""Show a graph: as readable Python, and as counts."""

from __future__ import annotations

import collections
from pathlib import Path

from torch.fx import GraphModule

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.signature import signature_of


def readable(gm: GraphModule) -> str:
    """Give the graph as Python, with each node's shape, phase and module: two of these can be compared with `diff`."""
    lines = [f"# input  {s.kind:6} {s.name}" for s in signature_of(gm).inputs]
    lines += [f"# output {s.kind:6} {s.name}" for s in signature_of(gm).outputs]
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        shape = f"{str(val.dtype).removeprefix('torch.')}{list(val.shape)}" if hasattr(val, "shape") else ""
        words = [meta.phase(node), meta.module(node), meta.tag(node), meta.role(node)]
        lines.append(f"{node.format_node()}  # {shape} {' '.join(w for w in words if w)}".rstrip())
    return "\n".join(lines) + "\n"


def op_counts(gm: GraphModule) -> collections.Counter[str]:
    """Count the graph's calls by operator."""
    return collections.Counter(str(n.target) for n in gm.graph.nodes if n.op == "call_function")


def dump(gm: GraphModule, folder: Path, number: int, name: str) -> None:
    """Write the readable graph as `NN_name.py`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{number:02d}_{name}.txt").write_text(readable(gm))
