"""Send a block's parameters, and its gradients, in one collective each."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import call, erase_dead, value
from torchtitan_graph.graph.signature import output_nodes, set_outputs

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
_REDUCTIONS = (c10d.reduce_scatter_tensor.default, c10d.all_reduce.default)


def bucket_collectives(gm: GraphModule, buckets: Sequence[Sequence[str]]) -> GraphModule:
    """Merge the gathers of each bucket's parameters, in forward and in backward, and the reductions of its gradients.

        a' = wait(all_gather(a)); b' = wait(all_gather(b))
        a', b' = split(wait(all_gather(cat(a, b))))

    Each bucket is packed as FSDP2 packs it, in the order given: with more than two ranks the order in which a
    gradient's terms are added depends on its place in the buffer. Bitwise, to FSDP2; to the graph before it, gathers
    are, and reductions only on two ranks.
    """
    bucket_of = {name: i for i, names in enumerate(buckets) for name in names}
    place = {name: i for names in buckets for i, name in enumerate(names)}
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    gathers: dict[tuple, list[Node]] = {}
    reductions: dict[tuple, dict[str, list[Node]]] = {}
    for node in gm.graph.nodes:
        if node.target is c10d.all_gather_into_tensor.default and meta.role(node) == meta.GATHER:
            name = meta.param(node) or ""
            gathers.setdefault((bucket_of[name], meta.phase(node), value(node).dtype, node.args[1:]), []).append(node)
    for name, output in output_nodes(gm, "grad").items():
        chain = [output]
        while meta.role(chain[0]) == meta.REDUCE:
            chain.insert(0, chain[0].args[0])  # type: ignore[arg-type]
        if any(node.target is c10d.wait_tensor.default for node in chain[1:]):  # chain[0] may wait for another axis
            sends = [n for n in chain if n.target in _REDUCTIONS]
            kinds = tuple((n.target, value(n).dtype, n.args[1:]) for n in sends)
            key = (bucket_of[name], value(output).dtype, str(kinds))
            reductions.setdefault(key, {})[name] = chain
    for starts in gathers.values():
        if len(starts) > 1:
            _merge_gathers(
                gm, sorted(starts, key=lambda n: place[meta.param(n) or ""]), min(starts, key=order.__getitem__)
            )
    outputs: dict[str, Node] = {}
    for chains in reductions.values():
        if len(chains) > 1:
            names = sorted(chains, key=place.__getitem__)
            last = max((chains[name][0] for name in names), key=order.__getitem__)
            outputs |= _merge_reductions(gm, {name: chains[name] for name in names}, last)
    set_outputs(gm, "grad", outputs)
    for chains in reductions.values():
        for name, chain in chains.items():
            if name in outputs:
                erase_dead(gm.graph, reversed(chain[1:]))
    gm.recompile()
    return gm


def _merge_gathers(gm: GraphModule, starts: list[Node], first: Node) -> None:
    degree, group = first.args[1:]
    shards = [start.all_input_nodes[0] for start in starts]
    with gm.graph.inserting_before(first):
        for shard in shards:
            if shard.op != "placeholder":
                first.prepend(shard)  # its cast; it reads a placeholder alone
        flat = [call(gm.graph, first, aten.view.default, shard, [-1]) for shard in shards]
        packed = call(gm.graph, first, aten.cat.default, flat)
        start = call(gm.graph, first, c10d.all_gather_into_tensor.default, packed, degree, group)
        wait = call(gm.graph, first, c10d.wait_tensor.default, start)
        rows = call(gm.graph, first, aten.view.default, wait, [degree, -1])
        sizes = [value(node).numel() for node in flat]
        parts = call(gm.graph, first, aten.split_with_sizes_copy.default, rows, sizes, 1)
        made, replaced = [*flat, packed, start, wait, rows, parts], []
        for i, old in enumerate(starts):
            part = call(gm.graph, first, operator.getitem, parts, i)
            full = call(gm.graph, first, aten.view.default, part, list(value(old).shape))
            made += [part, full]
            (old_wait,) = old.users
            old_wait.replace_all_uses_with(full)
            replaced += [old_wait, old]
    erase_dead(gm.graph, replaced)
    for node in made:
        meta.write(node, role=meta.GATHER, param=meta.param(first), phase=meta.phase(first))


def _merge_reductions(gm: GraphModule, chains: dict[str, list[Node]], last: Node) -> dict[str, Node]:
    """Merge chains gradient -> [cast] -> [pad] -> collectives -> [cast]; give each one's new last node by name."""
    some = next(iter(chains.values()))
    collectives = [node for node in some if node.target in _REDUCTIONS]
    degree = next((n.args[2] for n in collectives if n.target is c10d.reduce_scatter_tensor.default), 1)
    made: list[Node] = []

    def then(target: object, *args: object, **kwargs: object) -> None:
        made.append(call(gm.graph, last, target, made[-1], *args, **kwargs))

    ends: dict[str, Node] = {}
    gradients, dtype = [chain[0] for chain in chains.values()], value(collectives[0]).dtype
    with gm.graph.inserting_before(last.next):
        if len({value(gradient).dtype for gradient in gradients}) > 1:
            for i, gradient in enumerate(gradients):
                if value(gradient).dtype != dtype:
                    gradients[i] = call(gm.graph, last, aten._to_copy.default, gradient, dtype=dtype)
                    made.append(gradients[i])
        made.append(call(gm.graph, last, aten._chunk_cat.default, gradients, 0, degree))  # pads the rows as well
        if value(made[-1]).dtype != dtype:
            then(aten._to_copy.default, dtype=dtype)
        then(aten.view.default, [-1])
        for node in collectives:
            then(node.target, *node.args[1:])
            then(c10d.wait_tensor.default)
        if value(some[-1]).dtype != value(made[-1]).dtype:
            then(aten._to_copy.default, dtype=value(some[-1]).dtype)
        shapes = {name: value(chain[-1]).shape for name, chain in chains.items()}
        then(aten.split_with_sizes.default, [shape.numel() for shape in shapes.values()])
        parts = made[-1]
        for i, (name, shape) in enumerate(shapes.items()):
            part = call(gm.graph, last, operator.getitem, parts, i)
            ends[name] = call(gm.graph, last, aten.view.default, part, list(shape))
            made += [part, ends[name]]
    for node in made:
        meta.write(node, role=meta.REDUCE, param=next(iter(chains)), phase="backward")
    return ends
