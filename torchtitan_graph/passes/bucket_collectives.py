"""Bucketing: one collective for a block's parameters, and one for its gradients."""

from __future__ import annotations

import collections
import operator
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.collectives import Reduction, made_from_inputs, reductions
from torchtitan_graph.graph.edit import call, erase_dead, value
from torchtitan_graph.graph.signature import set_outputs
from torchtitan_graph.ops.copies import arrived, landed, offload

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
_REDUCTIONS = (c10d.reduce_scatter_tensor.default, c10d.all_reduce.default)


def bucket_collectives(gm: GraphModule, buckets: Sequence[Sequence[str]], *, packs_all: bool = False) -> GraphModule:
    """Merge the gathers of each bucket's parameters, in forward and in backward, and the reductions of its gradients.

        a' = wait(all_gather(a)); b' = wait(all_gather(b))
        a', b' = split(wait(all_gather(cat(a, b))))

    Each bucket is packed as FSDP2 packs it, in the order given: with more than two ranks the order in which a
    gradient's terms are added depends on its place in the buffer. Bitwise, to FSDP2; to the graph before it, gathers
    are, and reductions only on two ranks. With `packs_all`, gradients that nothing reduces here are packed alike: their
    sums over replica groups, after this graph, are then taken in the reductions' order.
    """
    bucket_of = {name: i for i, names in enumerate(buckets) for name in names}
    place = {name: i for names in buckets for i, name in enumerate(names)}
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    gathers: dict[tuple, list[Node]] = {}
    number = collections.Counter[tuple]()  # of a bucket's calls: a parameter that is gathered again begins another
    seen: dict[tuple, set[str]] = {}
    merged: dict[tuple, dict[str, Reduction]] = {}
    for node in gm.graph.nodes:
        if node.target is c10d.all_gather_into_tensor.default and meta.role(node) == meta.GATHER:
            name, phase = meta.param(node) or "", meta.phase(node)
            bucket = bucket_of[name], phase
            if name in seen.setdefault(bucket, set()):
                number[bucket] += 1
                seen[bucket].clear()
            seen[bucket].add(name)
            together = (*bucket, number[bucket], value(node).dtype, node.args[1:])
            gathers.setdefault(together, []).append(node)
    for name, reduction in reductions(gm).items():
        sends = [node for node in reduction.nodes if node.target in _REDUCTIONS]
        if sends or packs_all:
            kinds = tuple((n.target, value(n).dtype, n.args[1:]) for n in sends)
            key = (bucket_of[name], value(reduction.result).dtype, str(kinds))
            merged.setdefault(key, {})[name] = reduction
    for starts in gathers.values():
        if len(starts) > 1:
            _merge_gathers(
                gm, sorted(starts, key=lambda n: place[meta.param(n) or ""]), min(starts, key=order.__getitem__)
            )
    outputs: dict[str, Node] = {}
    for members in merged.values():
        if len(members) > 1:
            names = sorted(members, key=place.__getitem__)
            last = max((members[name].gradient for name in names), key=order.__getitem__)
            outputs |= _merge_reductions(gm, {name: members[name] for name in names}, last)
    set_outputs(gm, "grad", outputs)
    for members in merged.values():
        for name, reduction in members.items():
            if name in outputs:
                erase_dead(gm.graph, reversed(reduction.nodes))
    gm.recompile()
    return gm


def _merge_gathers(gm: GraphModule, starts: list[Node], first: Node) -> None:
    degree, group = first.args[1:]
    shards = [start.all_input_nodes[0] for start in starts]
    with gm.graph.inserting_before(first):
        for shard in shards:
            for node in made_from_inputs(shard):  # its copy from the host, its cast
                first.prepend(node)
        flat = [call(gm.graph, first, aten.view.default, shard, [-1]) for shard in shards]
        packed = call(gm.graph, first, aten.cat.default, flat)
        start = call(gm.graph, first, c10d.all_gather_into_tensor.default, packed, degree, group)
        wait = call(gm.graph, first, c10d.wait_tensor.default, start)
        rows = call(gm.graph, first, aten.view.default, wait, [degree, -1])
        sizes = [value(node).numel() for node in flat]
        parts = call(gm.graph, first, aten.split_with_sizes_copy.default, rows, sizes, 1)
        made, replaced = [*flat, packed, start, wait, rows, parts], []
        for node in made[len(flat) :]:
            meta.stand_for(node, starts)
        for i, old in enumerate(starts):
            part = call(gm.graph, first, operator.getitem, parts, i)
            full = call(gm.graph, first, aten.view.default, part, list(value(old).shape))
            made += [part, full]
            for node in (flat[i], part, full):
                meta.stand_for(node, [old])
            (old_wait,) = old.users
            old_wait.replace_all_uses_with(full)
            replaced += [old_wait, old]
    erase_dead(gm.graph, replaced)
    for node in made:
        meta.write(node, role=meta.GATHER, param=meta.param(first), phase=meta.phase(first))


def _merge_reductions(gm: GraphModule, members: dict[str, Reduction], last: Node) -> dict[str, Node]:
    """Merge reductions gradient -> [cast] -> [pad] -> [collectives] -> [cast] -> [copy to the host]; return the new
    last nodes by name."""
    some = next(iter(members.values()))
    collectives = [node for node in some.nodes if node.target in _REDUCTIONS]
    is_away = any(node.target is offload for node in some.nodes)
    degree = next((n.args[2] for n in collectives if n.target is c10d.reduce_scatter_tensor.default), 1)
    made: list[Node] = []

    def then(target: object, *args: object, **kwargs: object) -> None:
        made.append(call(gm.graph, last, target, made[-1], *args, **kwargs))

    ends: dict[str, Node] = {}
    gradients = [member.gradient for member in members.values()]
    # Without a collective the first cast stays, too: where a step's graph is cut, sums that come here are of its dtype.
    dtype = value((collectives or some.nodes or [some.gradient])[0]).dtype
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
        if value(some.result).dtype != value(made[-1]).dtype:
            then(aten._to_copy.default, dtype=value(some.result).dtype)
        if is_away:
            source = made[-1]
            then(offload)
            then(arrived, source)
    with gm.graph.inserting_before(gm.graph.output_node() if is_away else made[-1].next):
        if is_away:
            then(landed)
        shapes = {name: value(member.result).shape for name, member in members.items()}
        then(aten.split_with_sizes.default, [shape.numel() for shape in shapes.values()])
        parts = made[-1]
        for node in made:
            meta.stand_for(node, [member.gradient for member in members.values()])
        for i, (name, shape) in enumerate(shapes.items()):
            part = call(gm.graph, last, operator.getitem, parts, i)
            ends[name] = call(gm.graph, last, aten.view.default, part, list(shape))
            made += [part, ends[name]]
            for node in (part, ends[name]):
                meta.stand_for(node, [members[name].gradient])
    for node in made:
        meta.write(node, role=meta.REDUCE, param=next(iter(members)), phase="backward")
    return ends
