"""The one owner of `node.meta`: what the project writes on a node, and how it is read.

phase    "forward" | "backward"
module   name of the innermost submodule whose call made the node ("" outside any)
tag      a memory policy's word: SAVE | RECOMPUTE (read by `rematerialize`)
role     what a layout pass made: GATHER | REDUCE, with the parameter it serves
"""

import torch
from torch.fx import GraphModule, Node

SAVE, RECOMPUTE = "save", "recompute"
GATHER, REDUCE = "gather", "reduce"

_KEYS = ("phase", "module", "tag", "role", "param")


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


def write(node: Node, **values: str | None) -> None:
    """Set some of the keys above; None removes one."""
    for key, value in values.items():
        assert key in _KEYS, key
        if value is None:
            node.meta.pop(key, None)
        else:
            node.meta[key] = value


def inherit(node: Node, source: Node) -> None:
    """Let a node that a pass made stand where `source` stands: same phase, module, stack trace; own tag and role."""
    for key in ("phase", "module", "stack_trace", "custom", "seq_nr"):
        if key in source.meta:
            node.meta[key] = source.meta[key]


def settle(gm: GraphModule) -> None:
    """Read what the tracer left on the nodes into the keys above, once, right after tracing.

    A backward node gets the module, the annotations and the stack trace of the forward node with its autograd
    sequence number, in nested subgraphs as well. The phase itself comes from the tracer's mark on the engine.
    """
    forward: dict[int, Node] = {}
    _settle(gm, forward, inherited=None)


def _settle(gm: GraphModule, forward: dict[int, Node], inherited: Node | None) -> None:
    # Between two autograd nodes the engine sums gradients; such a sum carries the counter's last value.
    stale = max((node.meta.get("seq_nr", -1) for node in gm.graph.nodes), default=-1)
    for node in gm.graph.nodes:
        custom = dict(node.meta.get("custom") or {})
        is_backward = custom.pop("phase", None) == "backward"
        seq_nr = node.meta.get("seq_nr")
        if is_backward:
            is_sum = seq_nr == stale and node.target is torch.ops.aten.add.Tensor
            source = node.args[1] if is_sum else forward.get(seq_nr)
            if isinstance(source, Node):
                custom = dict(source.meta["custom"])
                _copy_stack_trace(node, source)
        elif seq_nr is not None:
            # One autograd node may come from several operators: the last one before it is recorded made it.
            forward[seq_nr] = node
        if inherited is not None and not custom:
            custom = dict(inherited.meta["custom"])
            is_backward = is_backward or phase(inherited) == "backward"
            _copy_stack_trace(node, inherited)
        node.meta["custom"] = custom
        write(node, phase="backward" if is_backward else "forward", module=custom.get("module", ""))
        for argument in node.all_input_nodes:
            if argument.op == "get_attr" and isinstance(nested := getattr(gm, str(argument.target), None), GraphModule):
                _settle(nested, {}, inherited=node)


def _copy_stack_trace(node: Node, source: Node) -> None:
    if "stack_trace" in source.meta:
        node.meta["stack_trace"] = source.meta["stack_trace"]
    else:
        node.meta.pop("stack_trace", None)
