"""Remove what tracing leaves behind."""

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.graph.edit import infer

aten = torch.ops.aten


def cleanup(gm: GraphModule) -> GraphModule:
    """Drop detached aliases and unused nodes; turn in-place writes to the graph's own values into new values. Bitwise.

        y = detach(x); z = add_(y, 1); w = mul(y, 2)
        z = add(x, 1); w = mul(z, 2)

    After this pass a node's value never changes, so that other passes may recompute and move nodes.
    """
    current: dict[Node, Node] = {}  # a node whose value was overwritten -> the node that holds it now
    for node in gm.graph.nodes:
        node.args = torch.fx.node.map_arg(node.args, lambda n: current.get(n, n))
        node.kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: current.get(n, n))
        if node.target in (aten.detach.default, aten.alias.default):
            current[node] = node.args[0]
        elif isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            written = node.args[0]
            node.target = _functional(node.target)
            infer(node)
            current = {old: node if new is written else new for old, new in current.items()}
            current[written] = node
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def _functional(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """Give `aten::add` for `aten::add_`."""
    packet, name = op._schema.name.split("::")
    writes = [argument.name for argument in op._schema.arguments if argument.alias_info and argument.alias_info.is_write]
    assert name.endswith("_") and writes == ["self"], f"{op} writes to {writes}: cleanup knows no form of it without"
    return getattr(getattr(getattr(torch.ops, packet), name[:-1]), op._overloadname)
