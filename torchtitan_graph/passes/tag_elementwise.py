"""Policy: which elementwise results backward computes again. It only writes tags; `rematerialize` acts on them."""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.blocks import block_of
from torchtitan_graph.graph.collectives import gathered_weights
from torchtitan_graph.graph.cut import Value, computed_again
from torchtitan_graph.graph.edit import is_view
from torchtitan_graph.graph.liveness import owners, size_of

aten = torch.ops.aten

# They move numbers as they are: as cheap as elementwise operators.
_MOVES = (
    *(aten._to_copy.default, aten.clone.default, aten._unsafe_view.default, aten.cat.default, aten.stack.default),
    *(aten.constant_pad_nd.default, aten.index_select.default),
)
_WORTH = 32  # a byte that is kept till backward is worth as many bytes read and written
_START = 2**16  # to start an operator costs as much as so many bytes read and written


def tag_elementwise(gm: GraphModule, blocks: Container[str]) -> GraphModule:
    """Tag RECOMPUTE what elementwise operators make, where backward then keeps less. Bitwise.

        a = mm(x, w); s = silu(a); y = mm(s, v)       s is tagged, a is kept: backward needs both

    What each block keeps is a minimum cut. No product is computed again, and nothing that `tag_recomputation` tagged
    changes. What stands outside the blocks is chosen last: what they compute again asks for it as well.
    """
    owner, weights = owners(gm), gathered_weights(gm)
    held = {owner[node] for node in gm.graph.nodes if _is_wanted(node)}
    groups: dict[str | None, list[Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and meta.phase(node) == "forward" and node not in weights:
            groups.setdefault(block_of(node, blocks), []).append(node)
    outside = groups.pop(None, [])
    for nodes in (*groups.values(), outside):
        chosen = _chosen(nodes, owner, held, weights)
        for node in chosen:
            if owner[node] in chosen:  # a view of what is kept may stay
                meta.write(node, tag=meta.RECOMPUTE)
    return gm


def _chosen(
    nodes: list[Node], owner: Mapping[Node, Node], held: Container[Node], weights: Container[Node]
) -> set[Node]:
    """Give those of a block's nodes that are cheaper computed again than kept."""
    values: dict[Node, Value] = {}
    place: dict[Node, int] = {}

    def add(node: Node, value: Value) -> int:
        values[node], place[node] = value, len(place)
        return place[node]

    def place_of(node: Node) -> int:
        if node in place:
            return place[node]
        node = owner[node]  # made before the block
        price = 0 if node in held else size_of(node) * _WORTH
        return place[node] if node in place else add(node, Value(price, None, (), False))

    for node in nodes:
        if meta.tag(node) is None and _is_cheap(node, owner):
            inputs = [place_of(n) for n in node.all_input_nodes if not _is_there(n, owner, weights)]
            is_own = owner[node] is node
            keep, again = size_of(node) * _WORTH if is_own else None, _moved(node) if is_own else 0
            add(node, Value(keep, again, tuple(inputs), _is_wanted(node)))
        elif meta.tag(node) != meta.RECOMPUTE:
            add(node, Value(size_of(node) * _WORTH, None, (), _is_wanted(node)))
    chosen = computed_again(tuple(values.values()))
    return {node for node, i in place.items() if i in chosen}


def _is_wanted(node: Node) -> bool:
    return any(meta.phase(user) == "backward" or meta.tag(user) == meta.RECOMPUTE for user in node.users)


def _is_there(node: Node, owner: Mapping[Node, Node], weights: Container[Node]) -> bool:
    """Tell whether a value costs backward nothing: an input, a weight, or what it computes again in any case."""
    return owner[node].op != "call_function" or node in weights or meta.tag(node) == meta.RECOMPUTE


def _is_cheap(node: Node, owner: Mapping[Node, Node]) -> bool:
    if node.target is operator.getitem:
        return owner[node] is not node  # a part of `split`, and not of an operator that makes several values
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return is_view(node) or node.target in _MOVES or torch.Tag.pointwise in node.target.tags or _is_constant(node)


def _is_constant(node: Node) -> bool:
    return not node.all_input_nodes and node.target.namespace == "aten"  # type: ignore[union-attr]


def _moved(node: Node) -> int:
    """Give the bytes that an operator reads and writes, and what it costs to start it."""
    tensors = [x.meta["val"] for x in (node, *node.all_input_nodes)]
    return _START + sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))
