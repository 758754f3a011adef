"""Removal of aliases, profiler marks and unused nodes in the graph of the optimizer's step."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from torchtitan_graph.graph.edit import erase_unused

aten = torch.ops.aten


def cleanup_update(gm: GraphModule) -> GraphModule:
    """Drop detached aliases, profiler marks and unused nodes; writes to inputs are the step's effect and stay. Bitwise.

    w = detach(p); m = mark(); adamw_([w], [g]); end(m)
    adamw_([p], [g])
    """
    for node in reversed(gm.graph.nodes):
        if node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
        if node.target in (aten.detach.default, aten.alias.default) or _is_mark(node.target):
            gm.graph.erase_node(node)
        elif node.op == "call_function":
            node.meta.setdefault("val", None)  # the tracer sets no value on operators that only write
    erase_unused(gm)
    gm.recompile()
    return gm


def _is_mark(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "profiler"
