"""Liveness of a graph's values: their memory at each node, with the aliases that operators' schemas declare."""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.utils._pytree as pytree
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from torchtitan_graph.analysis.traffic import group_of
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import aliased, fact, is_view, shared_arguments
from torchtitan_graph.graph.signature import output_nodes, signature_of
from torchtitan_graph.ops.operator import ALL_GATHER, operator_of

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_SILENT_VIEWS = (torch.ops.aten._unsafe_view.default, _WAIT)  # views whose schemas declare no alias
_CAT = torch.ops.aten.cat.default


class Peak(NamedTuple):
    """The most bytes that a graph's values hold at once, without its inputs, and the node that runs then."""

    num_bytes: int
    node: Node


def peak_memory(gm: GraphModule) -> Peak:
    """Return a graph's peak memory, with each value freed after its last use, and outputs kept to the end.

    An operator's temporaries are not counted except those in `scratch_of`, nor an allocator's rounding.
    """
    held = held_memory(gm, size_of)
    node = max(held, key=held.__getitem__)
    return Peak(held[node], node)


# The purposes of memory.
GATHERED, COMMUNICATION, NEW_GRADIENTS = "gathered weights", "communication buffers", "new gradients"
GATHERED_INPUTS = "gathered inputs kept for backward"
ACTIVATIONS, BACKWARD, WORKSPACE = "activations", "backward's own values", "workspace"


def at_node(gm: GraphModule, running: Node) -> dict[str, int]:
    """Return the bytes held while a node runs, by purpose (see `Lifetime`), and the node's own temporaries."""
    number = list(gm.graph.nodes).index(running)
    found: dict[str, int] = collections.Counter()
    for each in lifetimes(gm):
        if each.begin <= number <= each.end:
            found[each.purpose] += each.num_bytes
    found[WORKSPACE] += scratch_of(running)
    return {purpose: size for purpose, size in found.items() if size}


def _purpose(memories: Memories, owner: Node, grads: Container[Node]) -> str:
    if owner in grads:
        return NEW_GRADIENTS
    if meta.role(owner) == meta.GATHER:
        return GATHERED
    if meta.phase(owner) == "backward":
        return COMMUNICATION if meta.role(owner) == meta.REDUCE or group_of(owner) is not None else BACKWARD
    last = memories.last_use[owner]
    if meta.phase(last) == "backward" or last.op == "output":  # a stage's part returns its values saved for backward
        return GATHERED_INPUTS if _is_gathered(memories, owner) else ACTIVATIONS
    return ACTIVATIONS if group_of(owner) is None else COMMUNICATION


def _is_gathered(memories: Memories, owner: Node) -> bool:
    """Return whether a node is an all-gather's result, or the copy of it that concatenates the ranks' parts in another
    dimension."""
    made_of = {memories.owner[x] for x in owner.all_input_nodes} if owner.target is _CAT else {owner}
    return all(operator_of(each.target).collective is ALL_GATHER for each in made_of)


def host_memory(gm: GraphModule) -> int:
    """Return the most bytes of the host's memory that offloaded activations take at once."""

    def size(node: Node) -> int:
        return _num_bytes(node) if _is_on_host(node) and meta.role(node) is None else 0

    if not any(map(size, gm.graph.nodes)):
        return 0
    return max(held_memory(gm, size, scratch=lambda _: 0).values())


def _is_on_host(node: Node) -> bool:
    return operator_of(node.target).copies == "to the host"


def in_one_part(node: Node) -> str:
    """Default partition function: all nodes are in one part."""
    return ""


def scratch_of(node: Node) -> int:
    """Return the bytes of a node's temporaries, as its operator declares, or of a compiled region's values; those of
    others are small."""
    scratch = operator_of(node.target).scratch
    return meta.scratch(node) if scratch is None else fact(scratch, node)


def held_memory(
    gm: GraphModule,
    size: Callable[[Node], int],
    part_of: Callable[[Node], str] = in_one_part,
    scratch: Callable[[Node], int] = scratch_of,
    memories: Memories | None = None,
) -> dict[Node, int]:
    """Return the bytes held while each node runs, where `size` returns those of a memory by its owner, and `scratch`
    those of a node's temporaries.

    Args:
        part_of: the part that a node runs in, of a graph that is partitioned later. Each part is counted alone: values
            that later parts use are held to its end, and its inputs are not counted.
        memories: the graph's, if they are there already.
    """
    memories = Memories(gm) if memories is None else memories
    sizes = {owner: size(owner) for owner in memories.last_use}
    freed_at: dict[Node, int] = collections.Counter()
    for owner, node in memories.last_use.items():
        if sizes[owner] and part_of(owner) == part_of(node):
            freed_at[node] += sizes[owner]
    now, held = collections.Counter[str](), {}
    for node in gm.graph.nodes:
        part = part_of(node)
        now[part] += sum(map(sizes.__getitem__, memories.taken(node)))
        held[node] = now[part] + scratch(node)
        now[part] -= freed_at[node]
    return held


class Lifetime(NamedTuple):
    """When a memory is held: from the node of index `begin` to that of `end`, both included; and its purpose: gathered
    weights, gathered inputs saved for backward, other collectives' results, gradients that leave the graph, or other
    values of forward and backward."""

    owner: Node
    begin: int
    end: int
    num_bytes: int
    purpose: str


def lifetimes(gm: GraphModule) -> list[Lifetime]:
    """Return when each of a graph's memories is held, in the order of allocation. A node's held bytes are the sum over
    those that include it, plus its temporaries (`scratch_of`)."""
    memories, number = Memories(gm), {node: i for i, node in enumerate(gm.graph.nodes)}
    grads = {memories.owner[node] for node in output_nodes(gm, "grad").values()}
    return [
        Lifetime(owner, begin, number[memories.last_use[owner]], size, _purpose(memories, owner, grads))
        for node, begin in number.items()
        for owner in memories.taken(node)
        if (size := size_of(owner))
    ]


def most_within(nodes: Iterable[Node], memories: Memories) -> int:
    """Return the peak of some of a graph's nodes while they run, over their results and the values with their last use
    among them."""
    inside = dict.fromkeys(nodes)
    made = {owner for node in inside for owner in memories.taken(node)}
    seen = {owner for node in inside for owner in memories.used(node)}
    now = most = sum(size_of(owner) for owner in seen - made if memories.last_use[owner] in inside)
    for node in inside:
        now += sum(map(size_of, memories.taken(node)))
        most = max(most, now + scratch_of(node))
        now -= sum(size_of(owner) for owner in memories.used(node) if memories.last_use[owner] is node)
    return most


def peaks(held: Mapping[Node, int], part_of: Callable[[Node], str]) -> dict[str, int]:
    """Return each part's peak, from the bytes held while each node runs."""
    found: dict[str, int] = {}
    for node, size in held.items():
        found[part_of(node)] = max(found.get(part_of(node), 0), size)
    return found


def output_memory(gm: GraphModule) -> int:
    """Return the bytes of a graph's outputs, without its inputs' memory."""
    owner, output = owners(gm), gm.graph.output_node()
    return sum(size_of(node) for node in {owner[x] for x in output.all_input_nodes})


def input_memory(gm: GraphModule) -> int:
    """Return the bytes of a graph's inputs other than parameters and buffers: of a step, batch and masks; of a
    pipeline's stage, without other stages' activations."""
    placeholders, found = iter(gm.graph.find_nodes(op="placeholder")), 0
    for slot in signature_of(gm).inputs:
        for node in itertools.islice(placeholders, slot.layout.num_tensors):
            is_given = slot.kind == "input" and slot.name not in ("x", "dy")
            found += node.meta["val"].untyped_storage().nbytes() if is_given else 0
    return found


class Memories:
    """When the memories of a graph's values are allocated and used; each is named by its `owner`, and freed after its
    `last_use`.

    All results of an operator with several exist while it runs, and until the last of them is picked. A collective's
    input is kept until its wait.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.owner = owners(gm)
        self._results: dict[Node, list[Node]] = {}
        self._taken: dict[Node, list[Node]] = {}
        for node, owner in self.owner.items():
            if owner is node and node.target is operator.getitem:
                source = node.all_input_nodes[0]
                self._results.setdefault(source, []).append(node)
                self._taken.setdefault(source, []).append(node)
            elif owner is node:
                self._taken[node] = [node]
        self.last_use = {owner: node for node in gm.graph.nodes for owner in self.used(node)}

    def results(self, node: Node) -> list[Node]:
        """Return the memories of those results of an operator with several that the graph picks."""
        return self._results.get(node, [])

    def taken(self, node: Node) -> Sequence[Node]:
        """Return the memories that a node allocates."""
        return self._taken.get(node, ())

    def used(self, node: Node) -> set[Node]:
        """Return the memories that must exist while a node runs."""
        at = [*node.all_input_nodes, node]
        if node.target is _WAIT and operator_of((start := node.all_input_nodes[0]).target).holds_input:
            at += start.all_input_nodes
        found = set(map(self.owner.__getitem__, at))
        if not self._results.keys().isdisjoint(at):
            for x in at:
                found.update(self.results(x))
        return found


def owners(gm: GraphModule) -> dict[Node, Node]:
    """Return for each node the owner of its value's memory: itself, unless it is a view or written in place."""
    owner: dict[Node, Node] = {}
    picked: dict[tuple[Node, object], Node] = {}
    takes: dict[int, bool] = {}  # by the target's identity: Python computes an operator's hash
    for node in gm.graph.nodes:
        owner[node], target = node, node.target
        if (own := takes.get(id(target))) is None:
            own = takes[id(target)] = takes_memory(target)
        if own:
            continue
        if target is operator.getitem:
            (source,) = node.all_input_nodes
            # A part of `split`; of other tuples each element has memory of its own, except a region's views.
            number = node.args[1] if (first := meta.same_as(node)) is None else first
            owner[node] = owner[source] if is_view(source) else picked.setdefault((source, number), node)
        elif target in _SILENT_VIEWS:
            owner[node] = owner[node.all_input_nodes[0]]
        elif sources := aliased(node):
            owner[node] = owner[sources[0][0]]
    return owner


def takes_memory(target: object) -> bool:
    """Return whether a call's result has memory of its own: it is not a view, `getitem` included, and writes to none of
    its arguments in place."""
    if target is operator.getitem or target in _SILENT_VIEWS:
        return False
    return not isinstance(target, OpOverload) or not shared_arguments(target)


def readers_of_memory(gm: GraphModule) -> dict[Node, set[Node]]:
    """Return the nodes that read each memory, by its owner; of a view, the nodes that read the view."""
    owner, found = owners(gm), collections.defaultdict[Node, set[Node]](set)
    for node in gm.graph.nodes:
        for source in node.all_input_nodes:
            if owner[source] is not owner[node]:
                found[owner[source]].add(node)
    return found


def size_of(node: Node) -> int:
    """Return the bytes of device memory of a node's value; for several results, of those that no `getitem` picks; 0 for
    inputs."""
    return 0 if _is_on_host(node) else _num_bytes(node)


def _num_bytes(node: Node) -> int:
    value = node.meta.get("val") if node.op in ("call_function", "call_module") else None
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    if not isinstance(value, (tuple, list)):
        return 0
    if node.target is not operator.getitem:
        # Views have no memory of their own, and a region's function returns a list of picked results.
        if is_view(node) or not isinstance(node.target, (OpOverload, HigherOrderOperator)):
            return 0
        picked = {user.args[1] for user in node.users if user.target is operator.getitem}
        value = [x for i, x in enumerate(value) if i not in picked]
    return sum(x.untyped_storage().nbytes() for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor))
