"""Tracing FX graphs: annotations and origins of nodes, and graphs as functions."""

import contextlib
import copy
import functools
import os
import re
import traceback
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
import torch.fx.traceback as fx_traceback
from torch._functorch._aot_autograd import logging_utils
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensor as FakeTensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, disable_proxy_modes_tracing, make_fx
from torch.fx.graph import _BoxedCodeGen
from torch.fx.node import has_side_effect
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import SAC_IGNORED_OPS

from torchtitan_graph.errors import UserError

_WRAPPERS = (FSDPModule, FullyShardedDataParallel, torch.nn.parallel.DistributedDataParallel)
_PACKAGE = Path(__file__).parents[1]
# Folders whose code is not the traced function's author's: torch, and the tracer.
TRACERS = tuple(
    os.path.join(folder, "")
    for folder in (
        Path(torch.__file__).parent,
        *(_PACKAGE / room for room in ("graph", "torch_private", "analysis", "runtime", "capture", "formats")),
    )
)

# torch keeps an unused `_assert_async` that has a message, and erases one that has none.
has_side_effect(torch.ops.aten._assert_async.default)


class CallRecorder(Protocol):
    """Records the scopes of a trace, as `graph.hierarchy.ScopeRecorder`."""

    module: torch.nn.Module | None

    def wrap(self, inner: Callable[..., Any]) -> Callable[..., Any]: ...

    def running(self, base: types.CodeType, engine: types.CodeType) -> contextlib.AbstractContextManager[None]: ...

    def place(self) -> Any: ...


def reparametrize(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> contextlib.AbstractContextManager:
    """Swap `state` (by name) into the live module; tied names follow. `torch.func.functional_call` would replace it if
    it could run a function that closes over the module instead of the module's own forward."""
    # A shared module's tensors are swapped twice, under both names: the originals are restored last.
    return _reparametrize_module(module, state, tie_weights=True, stack_weights=True)


def ignore_profiler_in_recomputation() -> None:
    """Make selective checkpointing ignore the profiler's marks: FSDP2 makes some in a block's forward where experts in
    it are sharded apart, and others when the block is recomputed. torch has no public way to extend its list."""
    marks = torch.ops.profiler
    SAC_IGNORED_OPS.update({marks._record_function_enter_new.default, marks._record_function_exit._RecordFunction})


@contextlib.contextmanager
def annotated(**words: Any) -> Iterator[None]:
    """Annotate nodes made inside with these words. torch's own `annotate` writes into the current dictionary: a trace
    inside the trace (flex attention's) shares it with the outer one, which would keep the words."""
    before = fx_traceback.current_meta.get("custom", {})
    fx_traceback.current_meta["custom"] = {**before, **words}
    try:
        yield
    finally:
        fx_traceback.current_meta["custom"] = before


@contextlib.contextmanager
def annotated_as(node: torch.fx.Node) -> Iterator[None]:
    """Annotate nodes made inside as this one, on top of the current annotations. FX's Interpreter leaves out the
    latter: a region's recomputation in backward would then count as forward."""
    before = fx_traceback.current_meta
    words = {**(before.get("custom") or {}), **node.meta.get("custom", {})}
    fx_traceback.current_meta = {**before, **node.meta, "custom": words}
    try:
        yield
    finally:
        fx_traceback.current_meta = before


def current_annotations() -> dict[str, Any]:
    """Return the annotations of nodes made now."""
    return dict(fx_traceback.current_meta.get("custom") or {})


@contextlib.contextmanager
def suspended_trace(words: dict[str, Any]) -> Iterator[None]:
    """Suspend the current trace, so that another can run inside, whose nodes are annotated with these words.

    The current node's metadata (a stack, a sequence number of autograd) is the outer trace's. torch has no public way
    to trace inside a trace.
    """
    before, fx_traceback.current_meta = fx_traceback.current_meta, {"custom": words}
    try:
        with disable_proxy_modes_tracing():
            yield
    finally:
        fx_traceback.current_meta = before


@contextlib.contextmanager
def _marked_backward(module: torch.nn.Module | None) -> Iterator[types.CodeType]:
    """Annotate every node made by the autograd engine with `phase: backward` and the sequence number of its forward op.

    Yield the code that enters the engine. Raise a UserError for gradients of the module's live parameters: in the trace
    others replace them.

    The engine is entered at one place, `torch.autograd._engine_run_backward`, by `grad` and `backward` alike. Public
    hooks on autograd nodes can't see the sequence number; the AOT helper that does is the same from 2.11 to 2.15.
    """
    inner = torch.autograd._engine_run_backward
    live = {id(p): name for name, p in module.named_parameters()} if module is not None else {}

    def run(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if outside := [live[id(x)] for x in args[3] if id(x) in live]:
            raise UserError(
                f"the traced function differentiates by {', '.join(outside)} as listed outside of it, where a graph has"
                " inputs instead: list parameters inside, as list(model.parameters())"
            )
        # A leaf or a gradient edge has no grad_fn; the engine's own error is better.
        logging_utils.setup_stacktrace_preservation_hooks(
            [t.grad_fn for t in tensors if getattr(t, "grad_fn", None) is not None]
        )
        # No module: a module call in there is a checkpointed region's recomputation.
        try:
            with annotated(phase="backward", module=""):
                return inner(tensors, *args, **kwargs)
        except BaseException:
            logging_utils.callback_set = False  # else no later backward would clear its last stack
            raise

    hooked = torch.Tensor.register_hook

    def register_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        # The engine calls it before the helper's hooks learn the next operator: the one that made the tensor.
        @functools.wraps(hook)
        def call(grad: torch.Tensor) -> Any:
            fx_traceback.set_grad_fn_seq_nr(torch._C._current_autograd_node()._sequence_nr())
            try:
                return hook(grad)
            finally:
                fx_traceback.reset_grad_fn_seq_nr()

        return hooked(tensor, call)

    torch.autograd._engine_run_backward = run  # type: ignore[assignment]
    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
    try:
        yield run.__code__
    finally:
        torch.autograd._engine_run_backward = inner
        torch.Tensor.register_hook = hooked  # type: ignore[method-assign]


@contextlib.contextmanager
def _marked_modules(module: torch.nn.Module | None, recorder: CallRecorder | None) -> Iterator[None]:
    """Annotate every node with the name of the innermost submodule whose call made it, forward hooks included, and
    record each call in the recorder.

    `make_fx(record_module_stack=True)` records nothing for modules that are called from a plain function. A class may
    have a `__call__` of its own, and call that of its base; and `forward` may be called without it.
    """
    if module is None and recorder is None:
        yield
        return
    names = {id(child): name for name, child in module.named_modules()} if module is not None else {}
    running = [recorder.module] if recorder is not None else []

    def run(child: torch.nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = names.get(id(child))
        refuse_wrapper(name, child)
        running.append(child)
        try:
            with annotated(module=name) if name is not None else contextlib.nullcontext():
                return inner(child, *args, **kwargs)
        finally:
            running.pop()

    enter = recorder.wrap(run) if recorder is not None else run

    def called(inner: Callable[..., Any], begins: Callable[[torch.nn.Module], bool]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Dynamo, which reads the branches of `torch.cond`, refuses state outside the code that it reads.
            if torch.compiler.is_dynamo_compiling() or not begins(self):
                return inner(self, *args, **kwargs)
            return enter(self, inner, *args, **kwargs)

        return call

    def begins_forward(child: torch.nn.Module) -> bool:
        return id(child) in names and not any(each is child for each in running[-1:])

    found = [(torch.nn.Module, "__call__")] + list(_own_functions(module))
    before = [(cls, name, vars(cls)[name]) for cls, name in found]
    for cls, name, inner in before:
        begins = begins_forward if name == "forward" else functools.partial(_has_first, cls)
        # In a trace inside the trace, the outer trace's wrapper is removed.
        setattr(cls, name, called(getattr(inner, "__wrapped__", inner) if _is_ours(inner) else inner, begins))
    try:
        yield
    finally:
        for cls, name, inner in before:
            setattr(cls, name, inner)


def refuse_wrapper(name: str | None, module: torch.nn.Module) -> None:
    """Raise a UserError for a module whose data parallelism is in hooks, which no graph has."""
    if not isinstance(module, _WRAPPERS):
        return
    by, instead = "fully_shard", "trace the module without it"
    if not isinstance(module, FSDPModule):
        by, instead = type(module).__name__, "trace its .module"
    raise UserError(
        f"{name or 'the module'} is wrapped by {by}, whose hooks gather parameters or reduce gradients outside of any "
        f"graph: {instead}. With DTensors as parameters and batch the collectives are in the graph; the trainer puts "
        "them into it by itself, also for a step of your own (training.step)"
    )


def _is_ours(function: Any) -> bool:
    return getattr(function, "__code__", None) is not None and function.__code__.co_filename == __file__


def _own_functions(module: torch.nn.Module | None) -> Iterator[tuple[type, str]]:
    """Yield the classes of a module and its submodules that define `__call__` or `forward`, and which of the two."""
    kinds = {type(child): None for child in module.modules()} if module is not None else {}
    for cls in dict.fromkeys(each for kind in kinds for each in kind.__mro__ if issubclass(each, torch.nn.Module)):
        for name in ("__call__", "forward"):
            if cls is not torch.nn.Module and isinstance(vars(cls).get(name), types.FunctionType):
                yield cls, name


def _has_first(cls: type, child: torch.nn.Module) -> bool:
    """Return whether this class' `__call__` is the first in a module's MRO, not one that a subclass' calls."""
    return next(each for each in type(child).__mro__ if "__call__" in vars(each)) is cls


@contextlib.contextmanager
def _recorded(recorder: CallRecorder | None, base: types.CodeType, engine: types.CodeType) -> Iterator[None]:
    """Annotate every node with the recorder's current place.

    A node is made at one place, `PythonKeyTracer.create_node`; torch has hooks for it only on a finished graph. A trace
    inside the trace has a recorder of its own, and must not change this one.
    """
    if recorder is None:
        yield
        return
    created = PythonKeyTracer.create_node
    inner = getattr(created, "__wrapped__", created)

    @functools.wraps(inner)
    def create_node(self: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = inner(self, *args, **kwargs)
        node.meta["custom"] = {**(node.meta.get("custom") or {}), "place": recorder.place()}
        node.meta["is_grad"] = torch.is_grad_enabled()
        return node

    PythonKeyTracer.create_node = create_node  # type: ignore[method-assign]
    try:
        with recorder.running(base, engine):
            yield
    finally:
        PythonKeyTracer.create_node = created  # type: ignore[method-assign]


def _author_frames(tracer: Any, stack: traceback.StackSummary) -> traceback.StackSummary:
    """Return the traced function's own frames of a node's stack. `make_fx` would keep those of functions that are named
    `forward`."""
    begin = max((i for i, frame in enumerate(stack) if frame.name == "marked"), default=-1) + 1
    own = [frame for frame in stack[begin:] if not frame.filename.startswith(TRACERS)]
    return traceback.StackSummary.from_list(own)


def trace_to_graph(
    fn: Callable[..., Any],
    fake_inputs: list[torch.Tensor],
    fake_mode: FakeTensorMode,
    module: torch.nn.Module | None,
    stack_traces: bool,
    recorder: CallRecorder | None = None,
) -> torch.fx.GraphModule:
    """Trace `fn` on fake plain tensors by `make_fx`, with forward and backward marked.

    In a tracing context, higher-order ops name equal subgraphs once. Multithreaded autograd would lose the thread-local
    marks. Nested traces happen inside flex attention, which traces its own subgraphs.
    """
    import torch._dynamo.config  # late, for it takes a second: a run on graphs from files does without

    with (
        fake_mode,
        tracing(TracingContext(fake_mode)),
        fx_traceback.preserve_node_meta(),
        torch.autograd.set_multithreading_enabled(False),
        torch._dynamo.config.patch(error_on_nested_fx_trace=False),
        _marked_backward(module) as engine,
        # Code is generated when the graph first runs, not after every pass: a third of the time to build a large one.
        _use_lazy_graph_module(True),
        mock.patch.object(torch.fx.proxy.TracerBase, "_filter_traceback_frames", _author_frames),
        # torch refuses a fake tensor's address in this method alone, and gives 0 in the other.
        mock.patch.object(FakeTensor, "const_data_ptr", FakeTensor.data_ptr),
        # Else a selective checkpoint recomputes nothing, and leaves that to a pass of torch.compile's.
        mock.patch.object(torch.utils.checkpoint, "_is_compiling", lambda func, args, kwargs: False),
    ):

        def marked(*flat: torch.Tensor) -> Any:
            # Inside the trace: make_fx patches `Module.__call__` itself and would drop a patch made before.
            with _marked_modules(module, recorder), _recorded(recorder, marked.__code__, engine):
                return fn(*flat)

        gm = make_fx(marked, record_stack_traces=stack_traces)(*fake_inputs)
        return _without_made_up(lazy_graph_module(gm, gm.graph))


def has_saved_tensor_hooks() -> bool:
    """Return whether saved-tensor hooks of the caller's are active, as `torch.utils.checkpoint` sets them: public API
    only sets them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _without_made_up(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Erase unused operators on tensors that were never written to, and failed ones after which the function went on.

    To learn a result's shape, torch 2.11's DTensor runs operators on empty tensors of the whole shape, and the trace
    records that: unused products, and labels that are no classes. That of 2.13 and 2.15 does not.
    """
    made_up: dict[torch.fx.Node, None] = {}
    for node in gm.graph.nodes:
        sources = node.all_input_nodes
        is_empty = node.target == torch.ops.aten.empty_strided.default
        has_failed = node.op == "call_function" and "val" not in node.meta
        if is_empty or has_failed or (sources and all(n in made_up for n in sources)):
            made_up[node] = None
    for node in reversed(made_up):
        if not node.users and not node.is_impure():
            gm.graph.erase_node(node)
    return gm


def inputs_of(node: torch.fx.Node) -> Collection[torch.fx.Node]:
    """Return a node's inputs, as `all_input_nodes` does, without a copy."""
    return node._input_nodes


def set_arguments(node: torch.fx.Node, args: tuple, kwargs: dict[str, Any]) -> None:
    """Set a new node's arguments. FX's public setters remove a node from its graph's table of operators and insert it
    again, which takes as long as creating the node. Replaced when they don't."""
    node._update_args_kwargs(args, kwargs)


def author_stack() -> traceback.StackSummary:
    """Return the current stack in the traced function: while Dynamo reads a function, Dynamo's; while a node is run
    again, the node's; else Python's. torch keeps the first two for its own messages."""
    if read := TracingContext.extract_stack():
        return read
    return _parsed_stack(fx_traceback.current_meta.get("stack_trace") or "") or traceback.extract_stack()


def _parsed_stack(text: str) -> traceback.StackSummary:
    """Return the stack that a text has as Python prints it."""
    found = re.findall(r'File "(.*)", line (\d+), in (.*)\n +(.*)', text)
    frames = [traceback.FrameSummary(path, int(number), name, line=line) for path, number, name, line in found]
    return traceback.StackSummary.from_list(frames)


def refused_region(error: Exception) -> tuple[str, str, traceback.StackSummary] | None:
    """Return the operator, the reason in a line, and the stack of torch's error that a function passed to `torch.cond`
    or its like can't be a graph; None for another error. Its class is in Dynamo, whose import takes a second."""
    if type(error).__name__ != "UncapturedHigherOrderOpError":
        return None
    text = str(error)
    operator = re.search(r"Higher Order Operator: (\S+)", text)
    reason = re.search(r"Explanation: (.*?)\.? *\n", text)
    says = reason[1] if reason else text.partition("\n")[0]
    if "input mutation" in text:
        says = "it writes in place to its arguments, or to tensors outside of it"
    return operator[1] if operator else "a region", says, _parsed_stack(text)


class _Forward:
    """`forward` of a graph whose code is not generated yet: it is generated when `forward` is read."""

    def __get__(self, gm: torch.fx.GraphModule | None, kind: type) -> Any:
        if gm is None:
            return self
        for each in gm.modules():
            _LazyGraphModule.force_recompile(each)  # type: ignore[arg-type]  # without effect on other modules
        return gm.forward


class _GraphModule(_LazyGraphModule):
    """torch's, except that the code is generated when `forward` is read, not when it is called: `torch.compile` reads
    it, and can't compile torch's own."""

    forward = _lazy_forward = _Forward()  # type: ignore[assignment]


def lazy_graph_module(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """Return a graph module whose code is generated when it first runs, as a traced one's is."""
    return _GraphModule(root, graph)


def boxed(
    gm: torch.fx.GraphModule, edits: Iterable[Callable[[torch.fx.Graph], None]] = ()
) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Return the graph, or an edited copy, as a function of one list, which it empties: an input without other
    references is then freed after its last use. Call arguments live until the call returns; FX has no public form
    without them."""
    graph = copy.deepcopy(gm.graph) if (edits := list(edits)) else gm.graph
    for edit in edits:
        edit(graph)
    plain = graph._codegen
    graph.set_codegen(_BoxedCodeGen())
    made = torch.fx.GraphModule(gm, graph)  # its code is generated now
    graph.set_codegen(plain)
    return made
