"""Overlap of tensor parallelism's communication with its products, by parts of the sequence."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from torchtitan_graph.analysis.cost import WAIT, Clock, Costs
from torchtitan_graph.analysis.liveness import held_memory, size_of
from torchtitan_graph.analysis.traffic import group_of
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import call, erase_dead, is_view, value

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
_GATHER, _SUM = c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default
_ROWS = {aten.mm.default: 0, aten.addmm.default: 1}  # a product -> the index of the argument with the rows
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.slice.Tensor)


class Ring(NamedTuple):
    """The group of tensor parallelism: its name, its size, and this rank's index."""

    group: str
    degree: int
    rank: int


def overlap_products(gm: GraphModule, ring: Ring | None, costs: Costs) -> GraphModule:
    """Split tensor parallelism's gathers and sums by ranks' parts of the sequence, and multiply meanwhile. Not bitwise.

        y = mm(wait(gather(x)), w)
        s = send(x); y0 = mm(x, w); y1 = mm(wait(s), w); y = cat(y0, y1)

        z = wait(reduce_scatter(mm(h, w)))
        s = send(mm(h1, w)); z = add(mm(h0, w), wait(s))

    Done where it is estimated to take less time (see Note [Estimate]), and does not raise the step's peak. Rows keep
    their bits. A sum over two ranks does; one over more adds their terms in another order than the collective.
    """
    if ring is None:
        return gm
    held = held_memory(gm, size_of)
    bound = max(held.values())
    for wait in gm.graph.find_nodes(op="call_function", target=WAIT):
        start: Node = wait.args[0]
        if group_of(start) != ring.group or meta.role(wait) is not None:
            continue
        if start.target is _GATHER and (gathered := _gathered(wait, ring)):
            room = bound - held[gathered.products[0]]
            _cut_gather(gm.graph, gathered, ring, costs, room)
        elif start.target is _SUM and (summed := _summed(wait, ring)):
            _cut_sum(gm.graph, summed, ring, costs)
    gm.recompile()
    return gm


class _New:
    """Candidate nodes to replace others; erased if they take no less time."""

    def __init__(self, graph: Graph, ring: Ring) -> None:
        self._graph, self._ring, self.nodes = graph, ring, list[Node]()

    def __call__(self, source: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        self.nodes.append(call(self._graph, source, target, *args, **kwargs))
        return self.nodes[-1]

    def send(self, source: Node, rows: Node, number: int) -> Node:
        """Start to send rows to the rank `number` places after this one, and to receive from the rank as far before."""
        sizes_sent, sizes_received = [0] * self._ring.degree, [0] * self._ring.degree
        sizes_sent[(self._ring.rank + number) % self._ring.degree] = value(rows).shape[0]
        sizes_received[(self._ring.rank - number) % self._ring.degree] = value(rows).shape[0]
        return self(source, c10d.all_to_all_single.default, rows, sizes_received, sizes_sent, self._ring.group)

    def flat(self, source: Node, x: Node) -> Node:
        """Insert a view of (B, L, D) as a matrix of rows."""
        if not value(x).is_contiguous():
            x = self(source, aten.clone.default, x, memory_format=torch.contiguous_format)
        return self(source, aten.view.default, x, [-1, value(x).shape[-1]])

    def join(self, source: Node, parts: Mapping[int, Node], B: int) -> Node:
        """Concatenate parts of the sequence, each a matrix (B * l, D), to (B, L, D)."""
        each = [parts[rank] for rank in range(self._ring.degree)]
        if B > 1:
            each = [self(source, aten.view.default, x, [B, -1, value(x).shape[-1]]) for x in each]
        whole = self(source, aten.cat.default, each, B > 1)
        return self(source, aten.view.default, whole, [B, -1, value(whole).shape[-1]])

    def take_less_time(self, others: Iterable[Node], costs: Costs) -> bool:
        found = []
        for nodes in (self.nodes, others):
            clock = Clock(costs)
            for node in nodes:
                clock.advance(node)
            found.append(clock.now)
        if found[0] >= found[1]:
            erase_dead(self._graph, reversed(self.nodes))
        return found[0] < found[1]


# --- a gather, and the products of what it gathers --------------------------------------------------------------------


class _Gathered(NamedTuple):
    """A gather over the sequence.

    path      the collective, and all nodes that concatenate the parts, in order: the last is all rows, (B, L, D)
    same      that one and its views
    place     the first node that reads any of them
    products  of the rows
    """

    path: list[Node]
    same: dict[Node, None]
    place: Node
    products: list[Node]


def _gathered(wait: Node, ring: Ring) -> _Gathered | None:
    start: Node = wait.args[0]  # type: ignore[assignment]
    part = value(start.args[0])  # type: ignore[arg-type]
    if part.dim() != 3:
        return None
    path, shape = [start, wait], (part.shape[0], part.shape[1] * ring.degree, part.shape[2])
    while value(path[-1]).shape != shape:
        following = _next_reordering(path[-1])
        if not following:
            return None
        path += following
    same = _same_rows(path[-1])
    readers = sorted({user for node in same for user in node.users if user not in same})
    products = [
        node
        for node in readers
        if node.target in _ROWS
        and _rows_of(node) in same
        and sum(x in same for x in node.all_input_nodes) == 1
        and _can_stand_before(readers[0], node, same)
    ]
    return _Gathered(path, same, readers[0], products) if products else None


def _next_reordering(node: Node) -> list[Node]:
    """Return the nodes of the next step that brings parts into the sequence's order: a view, or a cat of a split."""
    users = list(node.users)
    if len(users) != 1:
        return []
    if users[0].target in _VIEWS:
        return users
    parts = list(users[0].users) if users[0].target is aten.split.Tensor else []
    cats = {cat for each in parts for cat in each.users}
    is_whole = [each.args[1] for each in parts] == [*range(len(value(users[0])))] if parts else False
    if is_whole and len(cats) == 1 and (cat := cats.pop()).target is aten.cat.default and cat.args == (parts, 1):
        return [users[0], *parts, cat]
    return []


def _same_rows(whole: Node) -> dict[Node, None]:
    """Return a node, (B, L, D), and its views that have the same rows in the same order."""
    found, width = {whole: None}, value(whole).shape[-1]
    pending = [whole]
    while pending:
        for user in pending.pop().users:
            is_all = value(user).shape.numel() == value(whole).shape.numel() if user.target in _VIEWS else False
            if is_all and value(user).shape[-1] == width:
                found[user] = None
                pending.append(user)
    return found


def _can_stand_before(place: Node, node: Node, without: Iterable[Node] = ()) -> bool:
    """Return whether a node's inputs, except some, stand before a place, or are views that can be moved there."""
    return all(
        x < place or is_view(x) and _can_stand_before(place, x) for x in node.all_input_nodes if x not in without
    )


def _move_before(place: Node, node: Node, without: Iterable[Node] = ()) -> None:
    for x in node.all_input_nodes:
        if x not in without and not x < place:
            _move_before(place, x)
            place.prepend(x)


def _cut_gather(graph: Graph, found: _Gathered, ring: Ring, costs: Costs, room: int) -> None:
    (start, *_, whole), new = found.path, _New(graph, ring)
    B, products = value(whole).shape[0], found.products
    is_read = any(user not in found.same and user not in products for node in found.same for user in node.users)
    if size_of(whole) * is_read + max(map(size_of, products)) > room:  # the parts, during concatenation
        return
    with graph.inserting_before(start):
        parts = {ring.rank: new.flat(start, start.args[0])}  # type: ignore[arg-type]
        sent = [new.send(start, parts[ring.rank], number) for number in range(1, ring.degree)]
    results: list[dict[int, Node]] = [{} for _ in products]
    with graph.inserting_before(found.place):
        for number in range(ring.degree):
            rank = (ring.rank - number) % ring.degree
            if number:
                parts[rank] = new(start, WAIT, sent[number - 1])
            for product, of_ranks in zip(products, results, strict=True):
                args = [parts[rank] if x is _rows_of(product) else x for x in product.args]
                of_ranks[rank] = new(product, product.target, *args)
        joined = []
        for product, of_ranks in zip(products, results, strict=True):
            in_order = new.join(product, of_ranks, B)
            joined.append(new(product, aten.view.default, in_order, list(value(product).shape)))
        if is_read:
            again = new.join(start, parts, B)
    if not new.take_less_time([*found.path, *products], costs):
        return
    for product, result in zip(products, joined, strict=True):
        _move_before(results[0][ring.rank], product, found.same)
        product.replace_all_uses_with(result)
        graph.erase_node(product)
    if is_read:
        whole.replace_all_uses_with(again)
        for view in list(found.same)[:0:-1]:  # views of a value that now exists only here
            if view < again:
                again.append(view)
    erase_dead(graph, [*list(found.same)[:0:-1], *reversed(found.path)])


# --- a sum, and the products that it sums -----------------------------------------------------------------------------


class _Summed(NamedTuple):
    """A reduce-scatter along the sequence over the ranks.

    terms  products of all rows, what adds them, and views: the last one is this rank's term
    path   all nodes that reorder its rows by ranks, in order; the collective; its wait
    """

    terms: list[Node]
    path: list[Node]


def _summed(wait: Node, ring: Ring) -> _Summed | None:
    path: list[Node] = [wait.args[0], wait]  # type: ignore[list-item]
    if value(wait).dim() != 3 or path[0].args[1] != "sum":
        return None
    B, rows_of_part, _ = value(wait).shape
    is_in_order = B == 1
    while not (terms := _terms(path[0].args[0])) or not is_in_order:  # type: ignore[arg-type]
        before = _last_reordering(path[0].args[0])  # type: ignore[arg-type]
        if not before:
            return None
        is_in_order = is_in_order or len(before) > 1
        path = [*before, *path]
    products = [node for node in terms if node.target in _ROWS]
    is_cut = all(value(node).shape[0] == B * rows_of_part * ring.degree for node in products)
    can_be_viewed = B == 1 or all(value(_rows_of(node)).is_contiguous() for node in products)
    return _Summed(terms, path) if is_cut and can_be_viewed else None


def _rows_of(product: Node) -> Node:
    return product.args[_ROWS[product.target]]  # type: ignore[index, return-value]


def _terms(node: Node) -> list[Node]:
    """Return the products that a node is the sum of, with the nodes that add them, inputs first, or []."""
    if len(node.users) != 1 or node.kwargs:
        return []
    if node.target in _ROWS:
        return [node]
    sources = node.all_input_nodes
    is_sum = node.target is aten.add.Tensor and len(sources) == 2 and value(sources[0]).shape == value(sources[1]).shape
    found = [_terms(x) for x in sources] if is_sum or node.target in _VIEWS[:2] else []
    return [*itertools.chain(*found), node] if found and all(found) else []


def _last_reordering(node: Node) -> list[Node]:
    """Return the nodes of the last step from the sequence's order to the ranks': a view, or a cat of a split."""
    if len(node.users) != 1:
        return []
    if node.target in _VIEWS:
        return [node]
    parts = node.all_input_nodes if node.target is aten.cat.default else []
    splits = {each.all_input_nodes[0] for each in parts}
    if len(splits) == 1 and (split := splits.pop()).target is aten.split.Tensor and split.args[2:] == (1,):
        is_whole = list(split.users) == parts and [each.args[1] for each in parts] == [*range(len(value(split)))]
        if is_whole and node.args == (parts,) and all(len(each.users) == 1 for each in parts):
            return [split, *parts, node]
    return []


def _cut_sum(graph: Graph, found: _Summed, ring: Ring, costs: Costs) -> None:
    (start, wait), new = found.path[-2:], _New(graph, ring)
    B, rows_of_part, _ = value(wait).shape

    def part_of(node: Node, rank: int) -> Node:
        """Insert a rank's rows of a term, and return them."""
        if node.target is aten.add.Tensor:
            return new(node, aten.add.Tensor, *(part_of(x, rank) for x in node.all_input_nodes))
        if node.target not in _ROWS:
            return part_of(node.all_input_nodes[0], rank)
        x, begin = _rows_of(node), rank * rows_of_part
        if B > 1:
            x = new(node, aten.view.default, x, [B, -1, value(x).shape[-1]])
        x = new(node, aten.slice.Tensor, x, int(B > 1), begin, begin + rows_of_part)
        x = new.flat(node, x) if B > 1 else x
        return new(node, node.target, *(x if each is _rows_of(node) else each for each in node.args))

    with graph.inserting_before(found.terms[-1]):
        sent = []
        for number in range(1, ring.degree):
            rows = part_of(found.terms[-1], (ring.rank + number) % ring.degree)
            sent.append(new.send(start, rows, number))
        total = part_of(found.terms[-1], ring.rank)
    with graph.inserting_before(wait):
        for each in sent:
            total = new(wait, aten.add.Tensor, total, new(wait, WAIT, each))
        total = new(wait, aten.view.default, total, list(value(wait).shape))
    if new.take_less_time([*found.terms, *found.path], costs):
        wait.replace_all_uses_with(total)
        erase_dead(graph, reversed([*found.terms, *found.path]))
