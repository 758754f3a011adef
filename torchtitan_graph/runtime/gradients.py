"""Insert calls into a graph that pass on each gradient once it is computed, while the graph still runs. Of several
microbatches that run one after another, the last one's graph passes on the sums over all."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor
from torch.fx import Graph, Node

from torchtitan_graph.graph.edit import aliased, is_view

_SPLIT = torch.ops.aten.split_with_sizes.default
_OWN_STRIDES = torch.ops.aten.as_strided.default


class _Taking:
    """The runs of a graph in one step, whose gradients are added up.

    earlier  what the first run made, in order: the later ones but the last are added to it where it is
    summed   the addresses of the last run's memory that has all of it
    """

    def __init__(self, take: Callable[[Tensor], None], num_runs: int) -> None:
        self._take, self._num_runs, self.num_begun = take, num_runs, 0
        self._earlier: list[Tensor] = []
        self._next: Iterator[Tensor] = iter(())
        self.summed: set[int] = set()

    def begin_run(self) -> None:
        self.num_begun += 1
        self._next = iter(self._earlier)

    def give(self, made: Tensor) -> None:
        made = memory_of(made)
        if self.num_begun == 1 and self._num_runs > 1:
            self._earlier.append(made)
        if self.num_begun < self._num_runs:
            return
        if self._earlier:
            made += next(self._next)
            self.summed.add(made.data_ptr())
        self._take(made)


_taking: _Taking | None = None


@contextlib.contextmanager
def taking(take: Callable[[Tensor], None], num_runs: int = 1) -> Iterator[None]:
    """Have the last of `num_runs` runs of a graph inside call `take` with each block of memory that gradients have to
    themselves, once nothing in the graph reads or writes it any more, and the earlier runs' are added to it. The order
    is the same in each run.

    Gradients of parameters are None before the first run. After each but the last they are accumulated as usual, into
    the first run's memory; of the last run's gradients `has_sum` says which are the sum already.
    """
    global _taking
    _taking = ours = _Taking(take, num_runs)
    try:
        yield
        assert ours.num_begun in (0, num_runs), "all runs of the step are inside"
    finally:
        _taking = None


def begin_run() -> bool:
    """Begin a run of the graph of a step; return whether it passes on its gradients."""
    if _taking is not None:
        _taking.begin_run()
    return _taking is not None


def has_sum(gradient: Tensor) -> bool:
    """Return whether a gradient of the last run is already the sum over all runs."""
    return _taking is not None and gradient.untyped_storage().data_ptr() in _taking.summed


def memory_of(tensor: Tensor) -> Tensor:
    """Return the whole block of memory that a tensor is in, as one flat tensor."""
    return tensor.new_empty(0).set_(tensor.untyped_storage())


def _give(made: Tensor) -> None:
    assert _taking is not None, "the graph runs inside `taking`"
    _taking.give(made)


def add_gives(graph: Graph, places: Collection[int]) -> None:
    """Insert the calls into a graph; `places` are those of its gradients among the outputs."""
    for last, memory in find_made(graph, places):
        with graph.inserting_after(last):
            graph.call_function(_give, (memory,))


def find_made(graph: Graph, places: Collection[int]) -> list[tuple[Node, Node]]:
    """Return the memories that hold nothing but gradients, each with the last node that uses it, in the graph's order:
    (the node, that which makes the memory). Memory of an input is left out, and that of gradients that overlap."""
    outputs = graph.output_node().args[0]
    order = {node: number for number, node in enumerate(graph.nodes)}
    found: dict[Node, list[Node]] = {}
    for place in places:
        if isinstance(node := outputs[place], Node):  # type: ignore[index]
            found.setdefault(_memory(node), []).append(node)
    made = []
    for memory, gradients in found.items():
        views, users = _uses(memory)
        others = [x for place, x in enumerate(outputs) if x in views and place not in places]  # type: ignore[arg-type]
        if memory.op != "placeholder" and not others and _are_apart(gradients):
            made.append((max(users, key=order.__getitem__, default=memory), memory))
    return sorted(made, key=lambda each: (order[each[0]], order[each[1]]))


def _memory(node: Node) -> Node:
    """Return the node that makes the memory of a node's value: of a view and of a write in place an earlier one."""
    while True:
        if node.target is operator.getitem and not is_view(_source(node)):
            return node
        if not (is_view(node) or aliased(node)):
            return node
        node = _source(node) if is_view(node) else aliased(node)[0][0]


def _source(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def _uses(memory: Node) -> tuple[set[Node], list[Node]]:
    """Return the views of a memory, itself among them, and the nodes that read or write it."""
    views, users, left = {memory}, [], [memory]
    while left:
        for user in left.pop().users:
            if user.op == "output" or user in views:
                continue
            is_only_view = is_view(user) and _source(user) in views
            if not is_only_view:
                users.append(user)
            if is_only_view or any(source in views for source, _ in aliased(user)):  # its value is this memory
                views.add(user)
                left.append(user)
    return views, users


def _are_apart(gradients: list[Node]) -> bool:
    """Return whether no two gradients of one memory overlap, nor one with itself: they are parts of one split."""
    if any(
        x.stride(i) == 0 and x.shape[i] > 1 for x in (node.meta["val"] for node in gradients) for i in range(x.ndim)
    ):
        return False
    if any(_is_strided(node) for node in gradients):
        return False
    parts = {*map(_part, gradients)} - {None}
    return len(gradients) == 1 or (len(parts) == len(gradients) and len({split for split, _ in parts}) == 1)  # type: ignore[misc]


def _is_strided(node: Node) -> bool:
    while is_view(node):
        if node.target is _OWN_STRIDES:
            return True
        node = _source(node)
    return False


def _part(node: Node) -> tuple[Node, int] | None:
    """Return the split that a value is a view of a part of, and the part's number."""
    while is_view(node):
        if node.target is operator.getitem and _source(node).target is _SPLIT:
            return _source(node), int(node.args[1])  # type: ignore[arg-type]
        node = _source(node)
    return None
