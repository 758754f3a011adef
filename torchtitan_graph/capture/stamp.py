"""Trace blocks that are alike once.

Note [Stamping]
While a function is traced each block is one opaque operator, and another in backward. A block's own graph, forward and
backward in one, is traced by the same tracer at the first call of its kind; afterwards each opaque operator is replaced
by copies of the nodes of its phase. Code between the blocks is traced as usual. The result equals, node for node, a
trace of every block.

Two blocks of a kind have equal descriptions (capture/alike.py), and tensors of equal layouts. Since no description is
complete, the second of a kind is traced as well, and must have the same graph. Any other case (a block with state for
the next one, tensors that are neither its own nor arguments, an error) raises `TraceInFull`, and every block is traced;
errors are then those of a trace without stamps.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchtitan_graph.capture.alike import description
from torchtitan_graph.capture.state import new_leaves, swapped_state, unassigned_data
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import copy_node
from torchtitan_graph.graph.hierarchy import Entry, Place, ScopeRecorder
from torchtitan_graph.graph.signature import TensorLayout, layout_of
from torchtitan_graph.log import logger
from torchtitan_graph.torch_private.fake import FakeTensorMode
from torchtitan_graph.torch_private.tensors import is_traceable_wrapper_subclass
from torchtitan_graph.torch_private.tracing import (
    FakeTensor,
    current_annotations,
    has_saved_tensor_hooks,
    suspended_trace,
    trace_to_graph,
)

_library = torch.library.Library("torchtitan_graph_blocks", "DEF")
_library.define("forward(Tensor[] tensors, int call) -> Tensor[]")
_library.define("backward(Tensor[] gradients, int call) -> Tensor[]")
_library.define("gradient(Tensor result, int[] stride) -> Tensor")  # in a block's own graph: backward's inputs
_ops = torch.ops.torchtitan_graph_blocks
FORWARD, BACKWARD, GRADIENT = _ops.forward.default, _ops.backward.default, _ops.gradient.default

Given = tuple[tuple[int, ...] | None, ...]  # the strides of the gradients of a block's results, None for no gradient


class TraceInFull(Exception):
    """The reason why blocks can't be stamped."""


@dataclasses.dataclass(frozen=True)
class BlockGraph:
    """A block's graph. Backward's incoming gradients are results of GRADIENT in it.

    block      the name of the traced block
    place      the place of its call, where places are recorded
    spec, constants  the pytree of the block's result, and its leaves that are no tensors, by position
    results, gradients  nodes: of the result's tensors, and of the gradients of the block's input tensors
    given      the results that have gradients
    layouts    of the gradients of the block's input tensors, None where there is none
    """

    gm: GraphModule
    block: str
    place: Place
    spec: pytree.TreeSpec
    constants: dict[int, Any]
    results: list[Node]
    gradients: list[Node]
    differentiable: list[bool]
    given: Given
    layouts: list[TensorLayout | None]

    @functools.cached_property
    def nodes(self) -> dict[Any, list[Node]]:
        """The nodes by their use in a stamp: placeholders and GRADIENT are replaced by inputs, those of a phase are
        copied."""
        found: dict[Any, list[Node]] = {"placeholder": [], GRADIENT: [], "forward": [], "backward": [], "output": []}
        for node in self.gm.graph.nodes:
            kind = node.op if node.op in found else node.target if node.target is GRADIENT else meta.phase(node)
            found[kind].append(node)
        return found


class _Kind:
    """A kind of block: its number of calls, and its graphs, one for each set of results with gradients."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.first: BlockGraph
        self.graphs: dict[Given, BlockGraph] = {}


class _Call:
    """A call of a block in the traced function."""

    def __init__(self, stamps: Stamps, name: str, block: nn.Module, forward: Callable, args: tuple, kwargs: dict):
        self.stamps, self.name, self.block, self.forward = stamps, name, block, forward
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        state = {("param", n): p for n, p in block.named_parameters()}
        self.state: dict[tuple[str, str], Tensor] = state | {("buffer", n): b for n, b in block.named_buffers()}
        self.tensors = [*self.state.values(), *(x for x in self.leaves if isinstance(x, Tensor))]
        self.layouts = [layout_of(x) for x in self.tensors]
        self.is_grad, self.words = torch.is_grad_enabled(), current_annotations()
        self.place = stamps.recorder.place() if stamps.recorder is not None else ()
        self.copies: dict[Node, Node] = {}
        self.places: dict[Place, Place] = {}  # from the traced block's places to this call's
        self.has_backward = False
        self.kind: _Kind
        self.graph: BlockGraph

    def key(self) -> Hashable:
        """Return a key that is equal for calls with the same graph."""
        constants = {i: x for i, x in enumerate(self.leaves) if not isinstance(x, Tensor)}
        words = {k: x for k, x in self.words.items() if (k, x) != ("module", self.name)}
        tensors = tuple(
            (layout, x.stride(), x.storage_offset(), x.device, x.requires_grad, _grad_dtype(x))
            for layout, x in zip(self.layouts, self.tensors, strict=True)
        )
        made = description(self.block, self.forward, (constants, words))
        return _hashable((made, self.spec, self.is_grad, tensors, tuple(self.state)))

    def trace(self, given: Given | None = None) -> BlockGraph:
        """Trace the block alone; `given` are the results with gradients, all at first."""
        found: dict[str, Any] = {}
        try:
            before = self.key()
            with suspended_trace(dict(self.words)):
                flat = [t.detach() for x, lay in zip(self.tensors, self.layouts, strict=True) for t in lay.flatten(x)]
                run = functools.partial(self._run, found, given)
                stamps = self.stamps
                recorder = stamps.recorder and stamps.recorder.of(self.block, self.place)
                gm = trace_to_graph(run, flat, stamps.fake_mode, stamps.module, stamps.stack_traces, recorder)
            meta.settle(gm)
            if self.key() != before:
                raise TraceInFull(f"{self.name} changes what it holds")
        except TraceInFull:
            raise
        except Exception as error:  # in the block's own code: tracing in full raises it again
            raise TraceInFull(f"{self.name} raises {type(error).__name__}") from error
        for node in gm.graph.find_nodes(op="get_attr"):
            if isinstance(getattr(gm, str(node.target)), FakeTensor):
                raise TraceInFull(f"{self.name} takes a tensor that is neither its own nor an argument")
        outputs: list[Node] = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
        n = len(found["differentiable"])
        return BlockGraph(gm, self.name, self.place, results=outputs[:n], gradients=outputs[n:], **found)

    def _run(self, found: dict[str, Any], given: Given | None, *flat: Tensor) -> list[Tensor]:
        """Return the tensors of the block's result, and then the gradients of its inputs; fill `found`."""
        tensors = new_leaves(self.tensors, self.layouts, flat)
        state = dict(zip(self.state, tensors, strict=False))
        arguments = iter(tensors[len(state) :])
        full = [next(arguments) if isinstance(x, Tensor) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(full, self.spec)
        with torch.set_grad_enabled(self.is_grad), swapped_state(self.block, None, state), unassigned_data(state):
            leaves, found["spec"] = pytree.tree_flatten(self.forward(*args, **kwargs))
        held, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.spec or any(x is not y for x, y in zip(held, full, strict=True)):
            raise TraceInFull(f"{self.name} changes its arguments")
        found["constants"] = {i: x for i, x in enumerate(leaves) if not isinstance(x, Tensor)}
        results = [x for x in leaves if isinstance(x, Tensor)]
        if any(is_traceable_wrapper_subclass(x) for x in results):
            raise TraceInFull(f"{self.name} gives a tensor of a subclass")
        found["differentiable"] = [x.requires_grad for x in results]
        roots = [x for x in results if x.requires_grad]
        if len({id(x) for x in roots}) < len(roots):
            raise TraceInFull(f"{self.name} gives a tensor twice")
        found["given"] = tuple(x.stride() for x in roots) if given is None else given
        pairs = [(x, stride) for x, stride in zip(roots, found["given"], strict=True) if stride is not None]
        with torch.no_grad():
            arriving = [_ops.gradient(x, stride) for x, stride in pairs]
        wanted = [x for x in tensors if x.requires_grad]
        made = torch.autograd.grad([x for x, _ in pairs], wanted, arriving, allow_unused=True) if pairs else ()
        by_tensor = {id(x): g for x, g in zip(wanted, made, strict=bool(pairs))}
        gradients = [by_tensor.get(id(x)) for x in tensors]
        found["layouts"] = [g if g is None else layout_of(g) for g in gradients]
        plain = [t for g in gradients if g is not None for t in layout_of(g).flatten(g)]
        return [*(x.detach() for x in results), *plain]


def _grad_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that gradients of a tensor are cast to; None: they are not cast."""
    return x.grad_dtype if x.requires_grad and x.is_leaf else x.dtype


@torch.library.register_fake("torchtitan_graph_blocks::forward", lib=_library)
def _(tensors: list[Tensor], call: int) -> list[Tensor]:
    return _like(_calls[call].graph.results)


@torch.library.register_fake("torchtitan_graph_blocks::backward", lib=_library)
def _(gradients: list[Tensor], call: int) -> list[Tensor]:
    return _like(_calls[call].graph.gradients)


@torch.library.register_fake("torchtitan_graph_blocks::gradient", lib=_library)
def _(result: Tensor, stride: list[int]) -> Tensor:
    return torch.empty_strided(result.shape, stride, dtype=result.dtype, device=result.device)


def _like(nodes: Sequence[Node]) -> list[Tensor]:
    values = [node.meta["val"] for node in nodes]
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in values]


class _Stamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        call = _calls[number]
        flat = [t for x, layout in zip(tensors, call.layouts, strict=True) for t in layout.flatten(x)]
        results = _ops.forward(flat, number)
        ctx.number = number
        ctx.set_materialize_grads(False)
        marks = zip(results, call.graph.differentiable, strict=True)
        ctx.mark_non_differentiable(*(x for x, is_differentiable in marks if not is_differentiable))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call = _calls[ctx.number]
        if call.has_backward or torch.is_grad_enabled():
            raise TraceInFull(f"{call.name} is differentiated twice")
        call.has_backward = True
        marks = zip(gradients, call.graph.differentiable, strict=True)
        arrived = [g for g, is_differentiable in marks if is_differentiable]
        given = tuple(g if g is None else g.stride() for g in arrived)
        graphs = call.kind.graphs
        if given not in graphs:
            graphs[given] = call.trace(given)
        call.graph = graphs[given]
        made = iter(_ops.backward([g for g in arrived if g is not None], ctx.number))
        layouts = call.graph.layouts
        return None, *(x and x.unflatten([next(made) for _ in range(x.num_tensors)]) for x in layouts)


_calls: list[_Call] = []  # of the current trace


class Stamps:
    """The blocks of a trace: traces them, and inserts their nodes at their calls."""

    def __init__(
        self, module: nn.Module | None, fake_mode: FakeTensorMode, stack_traces: bool, recorder: ScopeRecorder | None
    ) -> None:
        self.module, self.fake_mode, self.stack_traces, self.recorder = module, fake_mode, stack_traces, recorder
        self.kinds: dict[Hashable, _Kind] = {}
        self.num_alone = 0

    def call(self, name: str, block: nn.Module, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """Replace a block's forward by one opaque operator."""
        if has_saved_tensor_hooks():  # a stamp saves no values that could be recomputed
            raise TraceInFull(f"{name} is called in a checkpointed region")
        call = _Call(self, name, block, forward, args, kwargs)
        differentiable = [id(x) for x in call.tensors if x.requires_grad]
        if len(set(differentiable)) < len(differentiable):
            raise TraceInFull(f"{name} is given a tensor twice")
        kind = call.kind = self.kinds.setdefault(call.key(), _Kind())
        if not kind.num_calls:
            kind.first = call.trace()
            kind.graphs[kind.first.given] = kind.first
        elif kind.num_calls == 1 and described(call.trace().gm, name) != described(kind.first.gm, kind.first.block):
            raise TraceInFull(f"{name} is described as {kind.first.block} is, and traced otherwise")
        kind.num_calls += 1
        call.graph = kind.first
        _calls.append(call)
        tensors = iter(_Stamp.apply(len(_calls) - 1, *call.tensors))
        constants, num_leaves = call.graph.constants, call.graph.spec.num_leaves
        leaves = [constants[i] if i in constants else next(tensors) for i in range(num_leaves)]
        return pytree.tree_unflatten(leaves, call.graph.spec)

    def call_alone(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a block without a second of its kind: it is traced in place."""
        self.num_alone += 1
        return forward(*args, **kwargs)

    def put_in(self, gm: GraphModule) -> None:
        """Replace each opaque operator by the nodes of its block and phase."""
        for node in list(gm.graph.nodes):
            if node.target is FORWARD or node.target is BACKWARD:
                _replace(gm, node, _calls[node.args[1]], "forward" if node.target is FORWARD else "backward")
        if self.kinds or self.num_alone:
            kinds, blocks = len(self.kinds) + self.num_alone, len(_calls) + self.num_alone
            logger.info(f"traced {kinds} kind{'s' * (kinds != 1)} of block for {blocks} blocks")


@contextlib.contextmanager
def opaque(
    blocks: Mapping[str, nn.Module],
    module: nn.Module | None,
    fake_mode: FakeTensorMode,
    stack_traces: bool,
    recorder: ScopeRecorder | None = None,
) -> Iterator[Stamps]:
    """Make each call of a block, by name in `module`, one opaque operator in traces made inside, where its kind has
    several.

    Raises:
        TraceInFull: here or inside; then this trace has no graph.
    """
    stamps = Stamps(module, fake_mode, stack_traces, recorder)
    if blocks and any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise TraceInFull("torch.autocast is on")
    # Only blocks that look alike need descriptions, which take longer.
    looks = {name: _look(block) for name, block in blocks.items()}
    number = collections.Counter(looks.values())
    before = {block: vars(block).get("forward") for block in blocks.values()}
    try:
        for name, block in blocks.items():
            stands = functools.partial(stamps.call, name, block) if number[looks[name]] > 1 else stamps.call_alone
            block.forward = functools.partial(stands, block.forward)
        yield stamps
    finally:
        _calls.clear()  # they reference the model
        for block, forward in before.items():
            if forward is None:
                vars(block).pop("forward", None)
            else:
                block.forward = forward


def _look(block: nn.Module) -> Hashable:
    state = (*block.named_parameters(), *block.named_buffers())
    return _hashable((type(block), *((name, layout_of(x), x.requires_grad) for name, x in state)))


def _hashable(x: Any) -> Hashable:
    """Return `x`, or a unique object if it has no hash."""
    try:
        hash(x)
    except TypeError:
        return object()
    return x


def _replace(gm: GraphModule, node: Node, call: _Call, phase: str) -> None:
    """Replace an opaque operator by the nodes of its block."""
    graph = call.graph
    given, results = ("placeholder", graph.results) if phase == "forward" else (GRADIENT, graph.gradients)
    call.copies.update(zip(graph.nodes[given], node.args[0], strict=True))  # type: ignore[arg-type]
    _copy(gm, node, call, graph.nodes[phase])
    for part in list(node.users):
        result = results[part.args[1]]  # type: ignore[index]
        if phase == "backward":
            _check_sums(part, result, call.name)
        part.replace_all_uses_with(call.copies[result])
        gm.graph.erase_node(part)
    gm.graph.erase_node(node)


def _copy(gm: GraphModule, before: Node, call: _Call, nodes: Sequence[Node]) -> None:
    graph, copies = call.graph, call.copies
    places = functools.partial(_moved, graph, call)
    with gm.graph.inserting_before(before):
        for node in nodes:
            copies[node] = copy = copy_node(gm.graph, node, copies.__getitem__)
            meta.move(copy, graph.block, call.name, places)
            if _is_sum(node) and node.args[1] in graph.nodes[GRADIENT]:
                meta.unsettle(copy)  # its place is that gradient's
            if node.op == "get_attr":
                copy.target = f"{str(node.target)}_of_{graph.block.replace('.', '_')}"
                setattr(gm, copy.target, getattr(graph.gm, str(node.target)))


def _moved(graph: BlockGraph, call: _Call, place: Place) -> Place:
    """Return the place in a block's call that corresponds to a place in the traced block. Nodes share their places."""
    if place not in call.places:
        n = len(graph.place)
        call.places[place] = (*call.place, *(_renamed(e, graph.block, call.name) for e in place[n:]))
    return call.places[place]


def _renamed(entry: Entry, old: str, new: str) -> Entry:
    """Return a scope with its module's path in another block. Modules that the block created itself, or got as
    arguments, have no path there."""
    is_inside = entry.type == "module" and entry.path.startswith(f"{old}.")
    return entry._replace(path=new + entry.path[len(old) :]) if is_inside else entry


def _is_sum(node: Node) -> bool:
    """Return whether a node is a sum by autograd's engine."""
    return node.target is torch.ops.aten.add.Tensor and "is_gradient_acc" in node.meta


def _check_sums(gradient: Node, made: Node, name: str) -> None:
    """Raise TraceInFull for a tensor that a block reads more than once, and others after it: autograd adds the
    gradients one by one as they arrive, where a stamp returns its own sum."""
    for user in gradient.users:
        if _is_sum(user) and user.args[1] is gradient and made.target is torch.ops.aten.add.Tensor:
            raise TraceInFull(f"{name} reads a tensor more than once that others read too")


def described(gm: GraphModule, block: str | None = "") -> list[tuple]:
    """Return each node without its name: operator, arguments by index, values, and origin, with `block` anonymized; for
    a subgraph, which several nodes may share, without the origin."""
    place = {node: f"%{i}" for i, node in enumerate(gm.graph.nodes)}
    lines = []
    for node in gm.graph.nodes:
        what = node.target if node.op == "call_function" else node.op
        if node.op == "get_attr":
            held = getattr(gm, str(node.target))
            what = tuple(described(held, None)) if isinstance(held, GraphModule) else _constant(held)
        values = [x for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
        layouts = tuple((tuple(x.shape), x.stride(), x.dtype, x.device) for x in values)
        arguments = repr(map_arg((node.args, node.kwargs), place.__getitem__))  # type: ignore[arg-type]
        name = meta.module(node)
        if block is not None and (name == block or name.startswith(f"{block}.")):
            name = "*" + name[len(block) :]
        origin = (meta.phase(node), name, meta.role(node), meta.tag(node)) if block is not None else ()
        lines.append((what, arguments, layouts, *origin))
    return lines


def _constant(x: Tensor) -> tuple:
    """Return a small constant's bytes, a large one's identity; without an operator, which would be traced."""
    is_small, memory = x.device.type == "cpu" and x.numel() <= 64, x.untyped_storage()
    held = ctypes.string_at(memory.data_ptr(), memory.nbytes()) if is_small else id(x)
    return x.shape, x.stride(), x.storage_offset(), x.dtype, held
