"""Run a graph in pieces that a device records once and replays; calls that can't be recorded run eagerly between them.

A replay runs the recorded work in the same memory: inputs are copied to their recorded addresses, and results stay in
place. On a GPU it is one launch for hundreds of kernels (a CUDA graph).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from torchtitan_graph.analysis.keeping import written_memories
from torchtitan_graph.analysis.liveness import owners
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.collectives import with_dynamic_rows
from torchtitan_graph.graph.edit import fact, value
from torchtitan_graph.graph.signature import signature_of
from torchtitan_graph.log import logger
from torchtitan_graph.ops.operator import operator_of
from torchtitan_graph.runtime.observe import WAIT, Watchable, mark
from torchtitan_graph.torch_private.tracing import boxed


class Recorder(Protocol):
    """A device's recording of some work."""

    def record(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Run the work once, and return its results; each replay overwrites them."""
        ...

    def replay(self) -> None: ...

    def reset(self) -> None:
        """Delete the recording, and free its memory."""
        ...


class Replayed:
    """A graph as a function of one list, which it empties: eager in its first call, in which libraries warm up,
    recorded in the second, and replayed from then on.

    Parameters, buffers, the optimizer's state and tensors that the graph writes to are used in place: if the address of
    one has changed, the graph is recorded again. Other inputs are copied. Gradients are returned in the memory that
    every replay overwrites; other results are copies.
    """

    def __init__(self, gm: GraphModule, new_recorder: Callable[[], Recorder]) -> None:
        self._gm, self._new_recorder, self._first = gm, new_recorder, Watchable(gm)
        self._recording: _Recording | None = None
        signature, self._inputs = signature_of(gm), gm.graph.find_nodes(op="placeholder")
        kinds = [slot.kind for slot in signature.inputs for _ in range(slot.layout.num_tensors)]
        written = written_memories(gm, owners(gm))
        self._copied = [n for kind, n in zip(kinds, self._inputs, strict=True) if kind == "input" and n not in written]
        self._is_lent = [slot.kind == "grad" for slot in signature.outputs for _ in range(slot.layout.num_tensors)]
        self._num_calls = 0

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        self._num_calls += 1
        if self._num_calls == 1:
            return self._first(inputs)
        given = dict(zip(self._inputs, inputs, strict=True))
        inputs.clear()
        copied = [given.pop(node) for node in self._copied]
        places = [x.data_ptr() for x in given.values()]
        mark()
        if self._recording is None or self._recording.places != places:
            if self._recording is not None:
                self._recording.reset()
                self._recording = None  # its memory is free for the next
            statics = [x.clone() for x in copied]
            given.update(zip(self._copied, statics, strict=True))
            self._recording = _Recording(self._gm, self._new_recorder, given, statics, places)
            outputs = self._recording.first_outputs
        else:
            for static, x in zip(self._recording.statics, copied, strict=True):
                static.copy_(x)
            outputs = self._recording.replay()
        mark()
        return [x if is_lent else x.clone() for x, is_lent in zip(outputs, self._is_lent, strict=True)]


class _Recording:
    """A graph's pieces, recorded for inputs at fixed addresses."""

    def __init__(
        self,
        gm: GraphModule,
        new_recorder: Callable[[], Recorder],
        values: dict[Node, Tensor],
        statics: list[Tensor],
        places: list[int],
    ) -> None:
        self.statics, self.places = statics, places
        self._steps: list[Callable[[dict[Node, Tensor]], None]] = []
        self._recorders: list[Recorder] = []
        pieces = cut_into_pieces(gm)
        outputs: Any = gm.graph.output_node().args[0]
        last = {node: i for i, piece in enumerate(pieces) for node in piece.reads}
        last |= dict.fromkeys(outputs, len(pieces))
        recorded = {node for piece in pieces if piece.is_recorded for node in piece.reads}
        loose: set[Node] = set()  # results of unrecorded pieces for others, new in each run
        for i, piece in enumerate(pieces):
            given = [values[node] for node in piece.reads]
            if piece.is_recorded:
                self._recorders.append(new_recorder())
                made = self._recorders[-1].record(partial(_run_on, piece, given))
                self._steps.append(partial(_replay, self._recorders[-1]))
            else:
                made = piece.run(list(given))
                held = {node: x for node, x in zip(piece.reads, given, strict=True) if node not in loose}
                fixed = {node: x for node, x in zip(piece.gives, made, strict=True) if node in recorded}
                loose.update(node for node in piece.gives if node not in recorded)
                self._steps.append(partial(_run_loose, piece, held, fixed))
            del given
            values.update(zip(piece.gives, made, strict=True))
            for node in [node for node in (*piece.reads, *piece.gives) if last.get(node, i) <= i]:
                values.pop(node, None)  # a later piece is recorded in its memory
        self.first_outputs = [values[node] for node in outputs]
        self._outputs = [(node, None if node in loose else values[node]) for node in outputs]
        num_others = len(pieces) - len(self._recorders)
        logger.info(f"recorded a graph in {len(self._recorders)} pieces; {num_others} others run between them")

    def reset(self) -> None:
        for recorder in self._recorders:
            recorder.reset()

    def replay(self) -> list[Tensor]:
        self.first_outputs = []
        loose: dict[Node, Tensor] = {}
        for step in self._steps:
            step(loose)
        return [loose[node] if fixed is None else fixed for node, fixed in self._outputs]


class Piece(NamedTuple):
    """Nodes that run one after the other, whether they can be recorded, and their inputs and outputs."""

    run: Callable[[list[Tensor]], list[Tensor]]
    reads: list[Node]
    gives: list[Node]
    is_recorded: bool


def _run_on(piece: Piece, given: list[Tensor]) -> list[Tensor]:
    return piece.run(list(given))


def _replay(recorder: Recorder, loose: dict[Node, Tensor]) -> None:
    recorder.replay()


def _run_loose(piece: Piece, held: dict[Node, Tensor], fixed: dict[Node, Tensor], loose: dict[Node, Tensor]) -> None:
    """Run an unrecorded piece; results that recorded ones read are copied to the recorded addresses."""
    made = piece.run([held[node] if node in held else loose[node] for node in piece.reads])
    for node, x in zip(piece.gives, made, strict=True):
        if node in fixed:
            overwrite(fixed[node], x)
        else:
            loose[node] = x


def overwrite(old: Tensor, new: Tensor) -> None:
    """Copy to the memory of another tensor of this layout; an expanded dimension once."""
    for dim, stride in enumerate(old.stride()):
        if stride == 0 and old.shape[dim] > 1:
            old, new = old.narrow(dim, 0, 1), new.narrow(dim, 0, 1)
    old.copy_(new)


# --- which nodes can be recorded ------------------------------------------------------------------------------------


def cut_into_pieces(gm: GraphModule) -> list[Piece]:
    """Split a graph into pieces, in order, at nodes that can't be recorded.

    These are nodes that read a tensor on the host, have a data-dependent number of rows (on the ranks that hold
    experts), copy between devices, or call operators and functions that are not ours or torch's. A collective that is
    in flight at a split is not recorded either.
    """
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    unrecorded = _unrecorded(calls)
    runs: list[list[Node]] = []
    home: dict[Node, list[Node]] = {}
    for node in calls:
        if node.target is operator.getitem:  # a tuple does not leave a piece
            home[node] = home[node.all_input_nodes[0]]
        elif not runs or (runs[-1][0] in unrecorded) != (node in unrecorded):
            runs.append([])
            home[node] = runs[-1]
        else:
            home[node] = runs[-1]
        home[node].append(node)
    return [_piece(gm, run, run[0] not in unrecorded) for run in runs]


def _unrecorded(calls: Sequence[Node]) -> set[Node]:
    dynamic = with_dynamic_rows(calls)
    found = {node for node in calls if not dynamic.isdisjoint(node.all_input_nodes) or not _is_recordable(node)}
    return found | _under_way(calls, found)


def _under_way(calls: Sequence[Node], unrecorded: set[Node]) -> set[Node]:
    """Return the collectives, with their waits, that are in flight at a split, or don't begin in a piece."""
    place = {node: i for i, node in enumerate(calls)}
    spans = []
    for wait in (node for node in calls if node.target is WAIT):
        start = wait.args[0]
        parts = [start] if start.target is not operator.getitem else [start, start.args[0]]  # type: ignore[union-attr]
        spans.append((place[parts[-1]], place[wait], {wait, *parts}))  # type: ignore[index]
    found, is_cut = set(unrecorded), [node in unrecorded for node in calls]
    pending, num_before = spans, -1
    while num_before != len(pending):
        num_before = len(pending)
        across = [span for span in pending if any(is_cut[span[0] : span[1] + 1])]
        for begin, end, nodes in across:
            found |= nodes
            is_cut[begin] = is_cut[end] = True
        pending = [span for span in pending if span not in across]
    return found


def _is_recordable(node: Node) -> bool:
    if node.target is operator.getitem or isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return meta.region(node) is not None  # Inductor's; a user's function may do anything
    if not (records := operator_of(node.target).records):
        return False
    if node.target is torch.ops.aten.index_put.default and (fills := _fills(node)) is not None:
        return fills
    tensors = [x for x in torch.utils._pytree.tree_leaves([value(n) for n in (node, *node.all_input_nodes)])]
    if len({x.device.type for x in tensors if isinstance(x, Tensor)}) > 1:
        return False
    return records is True or fact(records, node)


def _fills(node: Node) -> bool | None:
    """Return whether `x[mask] = number` fills in a constant, as an embedding that ranks share does; None without a
    mask. The host reads a mask, except for one number in its own memory: with that torch fills."""
    args: Any = node.args
    _, indices, number, *_ = args
    dtypes = [value(x).dtype for x in indices if x is not None]
    if torch.bool not in dtypes:
        return None
    is_constant = number.target is torch.ops.aten.lift_fresh_copy.default and number.args[0].op == "get_attr"
    return dtypes == [torch.bool] and is_constant and value(number).numel() == 1 and value(number).device.type == "cpu"


def _piece(gm: GraphModule, nodes: list[Node], is_recorded: bool) -> Piece:
    inside, graph = set(nodes), Graph()
    sources = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    reads = [source for source in sources if source.op != "get_attr"]
    new: dict[Any, Node] = {source: graph.placeholder(source.name) for source in reads}
    for source in sources:
        if source.op == "get_attr":  # a constant, or a subgraph
            new[source] = graph.node_copy(source)
    for node in nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    gives = [node for node in nodes if not inside.issuperset(node.users) and isinstance(value(node), Tensor)]
    graph.output([new[node] for node in gives])
    return Piece(boxed(GraphModule(gm, graph)), reads, gives, is_recorded)
