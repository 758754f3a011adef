"""Every private torch name that the project uses: why, and what would replace it. Releases differ only here."""

import contextlib
import copy
import dataclasses
import datetime
import difflib
import functools
import importlib
import json
import math
import os
import re
import reprlib
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.fx.traceback as fx_traceback
import torch.utils._pytree as pytree
from torch._C import DispatchKey
from torch._C._profiler import _RecordFunctionFast
from torch._functorch._aot_autograd import logging_utils
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.flex_attention import flex_attention as _flex_attention
from torch._higher_order_ops.flex_attention import flex_attention_backward as _flex_attention_backward
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._higher_order_ops.wrap import tag_activation_checkpoint, wrap
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group, _set_pg_timeout
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, disable_proxy_modes_tracing, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, constrain_range
from torch.fx.graph import _BoxedCodeGen
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, _apply_kernel_options, flex_attention
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import SAC_IGNORED_OPS, checkpoint

from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.flex_kernels import flex_kernel_options
from torchtitan_graph.graph.hierarchy import Recorder

__all__ = [
    "METADATA_GLOBALS",
    "DTensorSpec",
    "WRAPPERS",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "NotCaptured",
    "PipelineAction",
    "ScoreFunction",
    "StorageInfo",
    "StrictCapture",
    "SymbolicFakeTensorMode",
    "StridedShard",
    "accumulate",
    "add_runtime_checks",
    "annotated",
    "author_s_stack",
    "begin_range",
    "boxed",
    "capture_strictly",
    "close_rule",
    "compute",
    "compile_by_inductor",
    "current_words",
    "dense_flex_attention",
    "dense_flex_attention_backward",
    "dtensor_spec",
    "dynamic_marks",
    "export_dims",
    "flex_attention_op",
    "fake_mode_for_dynamo",
    "free_gradient_dtype",
    "has_gradient_hooks",
    "hint",
    "ignore_profiler_in_recomputation",
    "count_step",
    "inductor_options",
    "init_fake_process_group",
    "is_profiling",
    "is_symbolic",
    "is_traceable_wrapper_subclass",
    "keeps_its_own_way",
    "lazy_graph_module",
    "make_dtensor",
    "made_for",
    "mark_as_parameter",
    "mask_parts",
    "mask_whole",
    "multiply",
    "name_group",
    "new_symbol",
    "num_writes",
    "one_thread_per_gloo_group",
    "open_rule",
    "pipeline_order",
    "ranks_of_group",
    "record_memory_history",
    "reparametrize",
    "require",
    "run_flex_attention_with",
    "run_wrapped",
    "save_memory_snapshot",
    "scaled_mm",
    "set_arguments",
    "set_timeout",
    "trace_set_aside",
    "trace_to_graph",
    "with_messages",
]

# FSDP2's name for "sharded on dim 0 over data parallel, inside a shard of tensor parallel on the same dim".
# Replaced by a public placement when torch makes it public.
StridedShard = _StridedShard


def dtensor_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """Describe a DTensor, for `make_dtensor`."""
    return DTensorSpec(mesh, placements, TensorMeta(shape, torch.empty(shape, device="meta").stride(), dtype))


def make_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Wrap a local tensor. `DTensor.from_local` does the same through an autograd function, and describes it anew, at
    many times the cost, which is paid for every gradient of every step."""
    return DTensor(local, spec, requires_grad=False)


def reparametrize(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> contextlib.AbstractContextManager:
    """Swap `state` (by name) into the live module; tied names follow. `torch.func.functional_call` would replace it
    if it could run a function that closes over the module instead of the module's own forward."""
    # What a shared module has under two names is swapped twice: what was there first is put back last.
    return _reparametrize_module(module, state, tie_weights=True, stack_weights=True)


def ignore_profiler_in_recomputation() -> None:
    """Let selective checkpointing pass the profiler's marks by: FSDP2 makes some in a block's forward where experts in
    it are sharded apart, and others when the block is recomputed. torch takes its list for complete; it has no other
    way in."""
    marks = torch.ops.profiler
    SAC_IGNORED_OPS.update({marks._record_function_enter_new.default, marks._record_function_exit._RecordFunction})


@contextlib.contextmanager
def annotated(**words: Any) -> Iterator[None]:
    """Let nodes made inside carry these words. torch's own `annotate` writes into the dictionary that it finds: a trace
    inside the trace (flex attention's) shares it with the outer one, which would keep the words."""
    before = fx_traceback.current_meta.get("custom", {})
    fx_traceback.current_meta["custom"] = {**before, **words}
    try:
        yield
    finally:
        fx_traceback.current_meta["custom"] = before


@contextlib.contextmanager
def made_for(node: torch.fx.Node) -> Iterator[None]:
    """Let nodes made inside carry what this one does, and what nodes made now would carry. FX's Interpreter leaves out
    the second: what a region computes again in backward would then be of forward."""
    before = fx_traceback.current_meta
    words = {**(before.get("custom") or {}), **node.meta.get("custom", {})}
    fx_traceback.current_meta = {**before, **node.meta, "custom": words}
    try:
        yield
    finally:
        fx_traceback.current_meta = before


def current_words() -> dict[str, Any]:
    """Give the words that nodes made now would carry."""
    return dict(fx_traceback.current_meta.get("custom") or {})


@contextlib.contextmanager
def trace_set_aside(words: dict[str, Any]) -> Iterator[None]:
    """Set aside the trace that is being made, so that another can be made inside, whose nodes carry these words.

    What is kept for the node at hand (a stack, a sequence number of autograd) is of the outer trace. torch has no
    public way to trace inside a trace.
    """
    before, fx_traceback.current_meta = fx_traceback.current_meta, {"custom": words}
    try:
        with disable_proxy_modes_tracing():
            yield
    finally:
        fx_traceback.current_meta = before


@contextlib.contextmanager
def _marked_backward() -> Iterator[types.CodeType]:
    """Let every node made by the autograd engine carry `phase: backward` and the sequence number of its forward op.
    Give the code that enters the engine.

    The engine is entered at one place, `torch.autograd._engine_run_backward`, by `grad` and `backward` alike. Public
    hooks on autograd nodes can't see the sequence number; the AOT helper that does is the same from 2.11 to 2.15.
    """
    inner = torch.autograd._engine_run_backward

    def run(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        # A leaf or a gradient edge has no grad_fn; the engine reports it better than we could.
        logging_utils.setup_stacktrace_preservation_hooks(
            [t.grad_fn for t in tensors if getattr(t, "grad_fn", None) is not None]
        )
        # No module: one that is called in there computes something again, for a checkpointed region.
        try:
            with annotated(phase="backward", module=""):
                return inner(tensors, *args, **kwargs)
        except BaseException:
            logging_utils.callback_set = False  # else no later backward would forget its last stack
            raise

    hooked = torch.Tensor.register_hook

    def register_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        # The engine calls it before it tells the helper's hooks which operator is next: the one that made the tensor.
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
def _marked_modules(module: torch.nn.Module | None) -> Iterator[None]:
    """Let every node carry the name of the innermost submodule whose call made it, forward hooks included.

    `make_fx(record_module_stack=True)` records nothing for modules that are called from a plain function.
    """
    if module is None:
        yield
        return
    names = {id(child): name for name, child in module.named_modules()}
    inner = torch.nn.Module.__call__

    @functools.wraps(inner)
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        name = names.get(id(self))
        if name is None:
            return inner(self, *args, **kwargs)
        with annotated(module=name):
            return inner(self, *args, **kwargs)

    torch.nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.__call__ = inner  # type: ignore[method-assign]


@contextlib.contextmanager
def _recorded(recorder: Recorder | None, base: types.CodeType, engine: types.CodeType) -> Iterator[None]:
    """Let every node carry the place that the recorder tells.

    A node is made at one place, `PythonKeyTracer.create_node`; torch has hooks for it only on a finished graph. A trace
    inside the trace has a recorder of its own, and must not move this one.
    """
    if recorder is None:
        yield
        return
    call, created = torch.nn.Module.__call__, PythonKeyTracer.create_node
    inner = getattr(created, "__wrapped__", created)

    @functools.wraps(inner)
    def create_node(self: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = inner(self, *args, **kwargs)
        node.meta["custom"] = {**(node.meta.get("custom") or {}), "place": recorder.place()}
        node.meta["is_grad"] = torch.is_grad_enabled()
        return node

    torch.nn.Module.__call__ = recorder.wrap(call)  # type: ignore[method-assign]
    PythonKeyTracer.create_node = create_node  # type: ignore[method-assign]
    try:
        with recorder.running(base, engine):
            yield
    finally:
        torch.nn.Module.__call__ = call  # type: ignore[method-assign]
        PythonKeyTracer.create_node = created  # type: ignore[method-assign]


_NOT_THE_AUTHOR_S = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def _author_s_frames(tracer: Any, stack: traceback.StackSummary) -> traceback.StackSummary:
    """Of the stack that made a node, keep the traced function's own frames. `make_fx` would keep those of functions
    that are named `forward`."""
    begin = max((i for i, frame in enumerate(stack) if frame.name == "marked"), default=-1) + 1
    own = [frame for frame in stack[begin:] if not frame.filename.startswith(_NOT_THE_AUTHOR_S)]
    return traceback.StackSummary.from_list(own)


def trace_to_graph(
    fn: Callable[..., Any],
    fake_inputs: list[torch.Tensor],
    fake_mode: FakeTensorMode,
    module: torch.nn.Module | None,
    stack_traces: bool,
    recorder: Recorder | None = None,
) -> torch.fx.GraphModule:
    """Run `fn` on fake plain tensors under `make_fx`, forward and backward marked.

    The tracing context lets higher-order ops give equal subgraphs one name. Multithreaded autograd would lose the
    thread-local marks. Nested traces happen inside flex attention, which traces its own subgraphs.
    """
    import torch._dynamo.config  # late, for it takes a second: a run on graphs that are read does without

    with (
        fake_mode,
        tracing(TracingContext(fake_mode)),
        fx_traceback.preserve_node_meta(),
        torch.autograd.set_multithreading_enabled(False),
        torch._dynamo.config.patch(error_on_nested_fx_trace=False),
        _marked_backward() as engine,
        # Code is generated when the graph first runs, not after every pass: a third of the time to build a large one.
        _use_lazy_graph_module(True),
        mock.patch.object(torch.fx.proxy.TracerBase, "_filter_traceback_frames", _author_s_frames),
        # Else a selective checkpoint computes nothing again, and leaves that to a pass of torch.compile's.
        mock.patch.object(torch.utils.checkpoint, "_is_compiling", lambda func, args, kwargs: False),
    ):

        def marked(*flat: torch.Tensor) -> Any:
            # Inside the trace: make_fx patches `Module.__call__` itself and would drop a patch made before.
            with _marked_modules(module), _recorded(recorder, marked.__code__, engine):
                return fn(*flat)

        return _without_made_up(make_fx(marked, record_stack_traces=stack_traces)(*fake_inputs))


def keeps_its_own_way() -> bool:
    """Tell whether what backward needs is now kept by functions of the caller's, as `torch.utils.checkpoint` does it:
    public API only sets them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def export_dims() -> tuple[type, type]:
    """Give the classes of what `torch.export.Dim` makes of `2 * dim`, and of Dim.DYNAMIC and Dim.AUTO: neither has a
    public name."""
    from torch.export.dynamic_shapes import _DerivedDim, _DimHint  # late: a third of a second that few runs need

    return _DerivedDim, _DimHint


class Mark(NamedTuple):
    """A dimension that `torch._dynamo`'s functions marked: whether its size may be used, must not be one number, and
    lies between what; what those are called that are equal; and whether code was asked for some of its sizes."""

    dim: int
    unbacked: bool
    required: bool
    low: int | None
    high: int | None
    name: str | None
    specialized: bool


def dynamic_marks(tensor: torch.Tensor) -> list[Mark]:
    """Give the marks on a tensor, of dimensions that it does not have too. `mark_dynamic` and its like keep them in
    attributes, which no function reads back."""
    bounds = {x.dim: (x.min, x.max) for x in getattr(tensor, "_dynamo_dynamic_range", ())}
    bounds |= getattr(tensor, "_dynamo_unbacked_bounds", {})
    names, specialized = getattr(tensor, "_dynamo_shape_ids", {}), getattr(tensor, "_specialize_on", {})
    kinds = (
        ("_dynamo_dynamic_indices", False, True),
        ("_dynamo_weak_dynamic_indices", False, False),
        ("_dynamo_unbacked_indices", True, False),
        ("_dynamo_strict_unbacked_indices", True, True),
    )
    found: dict[int, Mark] = {}
    for attribute, unbacked, required in kinds:
        for i in getattr(tensor, attribute, ()):
            dim = i + tensor.dim() if i < 0 else i
            low, high = bounds.get(i, (None, None))
            found[dim] = Mark(dim, unbacked, required, low, high, names.get(i), bool(specialized.get(i)))
    return [found[i] for i in sorted(found)]


class SymbolicFakeTensorMode(FakeTensorMode):
    """A mode for tensors without numbers whose sizes are symbols.

    The C++ that tells the shape of a padded tensor takes no symbols. torch has the same in Python, and calls it only
    under its Python dispatcher, which would also replace `matmul` by parts that may round in another way than eager's.

    What is computed of small tensors with numbers, such as `torch.tensor(2.0)`, torch computes while it traces. It
    would do so with floats and booleans that only a run knows too (with integers it does not), and take nan for them.
    """

    supports_higher_order_operators = True  # torch finds flex attention's rule for its own class alone

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if any(isinstance(x, torch.SymFloat | torch.SymBool) for x in pytree.tree_leaves((args, kwargs))):
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._without_numbers, (args, kwargs))
        if func is not torch.ops.aten.constant_pad_nd.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        from torch._refs import constant_pad_nd  # late, for few runs need it

        with self:
            return constant_pad_nd(*args, **(kwargs or {}))

    def _without_numbers(self, tensor: torch.Tensor) -> FakeTensor:
        fake = tensor if isinstance(tensor, FakeTensor) else self.from_tensor(tensor)
        if fake.constant is not None:
            self.fake_tensor_converter.invalidate_constant_aliases(fake.constant)
        return fake


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Let `isinstance(tensor, torch.nn.Parameter)` hold of a tensor that is no leaf, as a real parameter must be. torch
    has the mark for subclasses of tensors, and no public name for it."""
    tensor._is_param = True  # type: ignore[attr-defined]


# Promise that a relation of symbols holds: documented, but with an underscore.
require = torch._check


def new_symbol(env: ShapeEnv, name: str, size: int, unbacked: bool) -> Any:
    """Make a symbol for a size; `torch.export` does it by way of a source that its own front end has."""
    from torch._dynamo.source import ConstantSource  # late, for it takes a second

    source = ConstantSource(name)
    if unbacked:
        with env.ignore_fresh_unbacked_symbols():  # else the first operator is taken for what made it
            symbol = env.create_unbacked_symint(source)
        constrain_range(symbol, min=0)
        return symbol
    return env.create_symintnode(
        env.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC), hint=size, source=source
    )


def is_symbolic(x: Any) -> bool:
    """Tell a number that a trace has a symbol for. torch names the three classes together in a module of its own."""
    return isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool)


def hint(x: Any, unbacked: Mapping[Any, int]) -> Any:
    """Give a number as it was when it was traced; `int` of a symbol would fix it. There is no public name for that, and
    of unbacked symbols torch does not know it."""
    if not is_symbolic(x):
        return x
    return x.node.hint if x.node.has_hint() else int(x.node.expr.xreplace(unbacked))


def compute(graph: torch.fx.Graph, expression: Any, of: Mapping[Any, torch.fx.Node]) -> torch.fx.Node:
    """Insert the arithmetic of an expression of symbols, and give its last node, as torch does for its own checks."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    tracer, known = torch.fx.proxy.GraphAppendingTracer(graph), set(graph.nodes)
    proxies = {symbol: torch.fx.Proxy(node, tracer) for symbol, node in of.items()}
    made = sympy_interp(PythonReferenceAnalysis, proxies, expression)
    for node in graph.nodes:
        if node not in known:
            args = torch.fx.node.map_arg(node.args, lambda x: x.meta["val"])
            node.meta["val"] = node.target(*args)  # type: ignore[operator]
    return made.node


def add_runtime_checks(gm: torch.fx.GraphModule, env: ShapeEnv) -> None:
    """Let a graph check what `torch._check` promised of sizes that only a run knows, as `torch.export`'s graphs do."""
    from torch.fx.passes.runtime_assert import insert_deferred_runtime_asserts

    insert_deferred_runtime_asserts(gm, env, "trace")


def _without_made_up(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Drop unused operators on tensors that nothing was written to, and those that failed where the function went on.

    To learn a result's shape, torch 2.11's DTensor runs operators on empty tensors of the whole shape, and the trace
    records that: products that nobody needs, and labels that are no classes. That of 2.13 and 2.15 does not.
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


def set_arguments(node: torch.fx.Node, args: tuple, kwargs: dict[str, Any]) -> None:
    """Give a new node its arguments. FX's public setters take a node out of its graph's table of operators and put it
    back, which takes as long as to make the node. Replaced when they don't."""
    node._update_args_kwargs(args, kwargs)


def fake_mode_for_dynamo(env: ShapeEnv) -> FakeTensorMode:
    """Give a mode whose fake tensors Dynamo takes as a function's arguments and state; `env` has their sizes that are
    symbols. Dynamo makes others of its own for these."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)


def author_s_stack() -> traceback.StackSummary:
    """Give the stack in the traced function's author's words: while Dynamo reads a function, what it reads; while a
    node is run again, what made that node; else Python's. torch keeps the first two for its own messages."""
    if read := TracingContext.extract_stack():
        return read
    made = re.findall(r'File "(.*)", line (\d+), in (.*)\n +(.*)', fx_traceback.current_meta.get("stack_trace") or "")
    frames = [traceback.FrameSummary(path, int(number), name, line=line) for path, number, name, line in made]
    return traceback.StackSummary.from_list(frames) if frames else traceback.extract_stack()


# Guards on tensors: a graph's signature says more of them. On sizes: see `StrictCapture.holds`. The last is what is
# set around a call, see below.
_NOT_GUARDED = {"TENSOR_MATCH", "DIMENSION_DYNAMIC_MARKING_GUARD", "NO_TENSOR_ALIASING", "DUPLICATE_INPUT"}
_NOT_GUARDED |= {"DTENSOR_SPEC_MATCH", "SHAPE_ENV", "GLOBAL_STATE"}
# Of that state: the graph is run under `no_grad` and without autocast, which the tracer checks; threads change nothing.
_MAY_CHANGE = {"grad_mode", "autocast_state", "num_threads"}


class NotCaptured(Exception):
    """Say why Dynamo can't take a function as one graph, and the line where."""


class StrictCapture(NamedTuple):
    """What Dynamo took of a function.

    gm        the graph
    sources   where each of its inputs is found, as an expression of the function's names in L and globals in G
    changed   the same of what the function changes that is no result, and the line where
    guards    what has to be so, each an expression of these names and the line that reads them
    inputs    (*arguments) -> the graph's inputs
    result    (the graph's outputs, arguments) -> the function's result
    holds     (arguments) -> what it supposes of sizes, of those of these arguments, and where the function needs it
    violated  (arguments) -> one of the guards that is not so; empty if all are
    """

    gm: torch.fx.GraphModule
    sources: list[str]
    changed: dict[str, str]
    guards: list[str]
    inputs: Callable[..., tuple[Any, ...]]
    result: Callable[[Any, tuple[Any, ...]], Any]
    holds: Callable[[tuple[Any, ...]], list[tuple[Any, str]]]
    violated: Callable[[tuple[Any, ...]], str]


def capture_strictly(
    fn: Callable[..., Any], arguments: tuple[Any, ...], new_guards: Callable[[], list[Any]]
) -> StrictCapture:
    """Let Dynamo take a function as one graph, from torch 2.13 on. `torch.export` would replace it if it kept guards
    and took a function that closes over its module; `torch.compile(fullgraph=True)` if it gave its graph.

    Args:
        new_guards: makes the list to which Dynamo appends what it compares sizes to; `where` lists the places.

    Raises:
        NotCaptured: why Dynamo can't.
    """
    import torch._dynamo.config  # late, for it takes a second
    import torch._dynamo.output_graph as dynamo_output
    import torch._dynamo.variables.builder as dynamo_builder
    from torch._dynamo.convert_frame import _get_frame, fullgraph_capture
    from torch._dynamo.exc import TorchDynamoException
    from torch._dynamo.functional_export import create_fx_graph_from_captured_output
    from torch._dynamo.hooks import Hooks
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    def new_env(**options: Any) -> ShapeEnv:
        env = ShapeEnv(**options)
        env.guards = new_guards()
        return env

    regions = importlib.import_module("torch._higher_order_ops.invoke_subgraph")  # an operator has the module's name
    strict: dict[str, Any] = dict(specialize_int=True, specialize_float=True, automatic_dynamic_shapes=False)
    strict |= dict(skip_nnmodule_hook_guards=False)  # a hook that is added later is to be noticed
    strict |= dict(replay_side_effects=False, side_effect_replay_policy="warn")  # told of, see `_seen_changes`
    strict |= dict(skip_fwd_side_effects_in_bwd_under_checkpoint=True)  # else a region may not append to a list
    with (
        torch._dynamo.config.patch(strict),
        mock.patch.object(regions, "invoke_subgraph_placeholder", _call),
        mock.patch.object(dynamo_builder, "is_invoke_subgraph", lambda value: False),
        mock.patch.object(dynamo_output, "ShapeEnv", new_env),
        warnings.catch_warnings(),
        _seen_changes() as changed,
        get_metrics_context(),
        dynamo_timed("fullgraph_capture"),
    ):
        warnings.simplefilter("ignore")
        try:
            out = fullgraph_capture(fn, arguments, {})
        except TorchDynamoException as error:
            raise NotCaptured(_why(error)) from error
        if out.backend_input is None:
            raise NotCaptured("the function computes nothing of tensors")
        found = out.graph_capture_output
        gm: Any = create_fx_graph_from_captured_output(out, fn, arguments, {})
        hooks = Hooks(guard_filter_fn=lambda guards: [_is_of_python(each) for each in guards])
        manager = found.build_guards(fn.__code__, hooks=hooks).guard_manager
    state, env = found.output_graph.global_state_guard, found.output_graph.shape_env
    guards: Any = env.guards  # as `new_guards` made it
    # A size that is 0 or 1 Dynamo takes for that number, and compares it to nothing.
    sizes_of = {source.name: x["size"] for source, x in found.output_graph.input_source_to_sizes_strides.items()}
    fixed = [(name, i, n) for name, size in sizes_of.items() for i, n in enumerate(size) if type(n) is int and n < 2]

    def holds(arguments: tuple[Any, ...]) -> list[tuple[Any, str]]:
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        scope = {"L": _get_frame(fn, arguments).locals, "G": found.f_globals}
        symbols = {symbol for guard in guards for symbol in guard.expr.free_symbols}
        sizes = {symbol: eval(env.var_to_sources[symbol][0].name, scope) for symbol in symbols}  # of Dynamo's making
        compared = [sympy_interp(PythonReferenceAnalysis, sizes, guard.expr) for guard in guards]
        equal = [(eval(name, scope).shape[i] == n, "") for name, i, n in fixed]
        return [*zip(compared, guards.where, strict=True), *equal]

    def violated(arguments: tuple[Any, ...]) -> str:
        if changed := set(() if state.check() else state.reason().split()) - _MAY_CHANGE:
            return f"another {', '.join(sorted(changed))} of torch"
        names = _get_frame(fn, arguments).locals
        checked = manager.check_verbose(names)
        scope = {"L": names, "G": found.f_globals}
        return "" if checked.result else _with_value(checked.verbose_code_parts[0], scope)

    return StrictCapture(
        gm,
        [node._dynamo_source.name for node in gm.graph.find_nodes(op="placeholder")],
        changed,
        ["".join(_with_line(each)) for each in _said(manager.root)],
        gm._dynamo_bytecode_flatten,
        gm._dynamo_bytecode_unflatten,
        holds,
        violated,
    )


def _call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stand for a `nested_compile_region`, as it does without Dynamo: it may then return and change what it likes.
    Dynamo's operator would give all layers the first one's names, and compute forward again in backward."""
    return fn(*args, **kwargs)


WRAPPERS = (tag_activation_checkpoint, wrap)  # Dynamo's operators that take a graph, and give what it gives


def run_wrapped(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
    """Run in place of one of these `run(graph, *inputs)`, a checkpointed region's by `torch.utils.checkpoint` as
    without Dynamo. torch's own kernel of that region, made for `torch.compile`, computes more again than backward
    needs, and fails where the region writes to a value of its own.
    """
    body, *inputs = args
    run = functools.partial(run, body)
    if target is wrap:
        return run(*inputs)
    chosen = {"context_fn": found} if (found := body.meta.get("_checkpoint_context_fn")) else {}
    return checkpoint(run, *inputs, **kwargs, **chosen)


def _why(error: Any) -> str:
    """Give a sentence or two of Dynamo's page of an error, and the author's line."""
    first, *more = str(error).strip().splitlines()
    explained = [line.strip().removeprefix("Explanation: ") for line in more if "Explanation: " in line]
    where = _line(getattr(error, "real_stack", None) or ())
    return f"{' '.join([f'{first}:', *explained[:1]]).rstrip(':.')} (Dynamo{where and ', '}{where})"


def _line(frames: Iterable[Any]) -> str:
    """Give the author's line that a stack of Dynamo's leads to, nothing if it has none."""
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(Path(torch.__file__).parent)]
    return "".join(f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in own[-1:])


@contextlib.contextmanager
def _seen_changes() -> Iterator[dict[str, str]]:
    """Give what the functions that Dynamo takes meanwhile change: attributes, or a list or dict itself; and where.

    Dynamo warns of the objects alone, and forgets the rest when it is done."""
    from torch._dynamo.output_graph import OutputGraph

    found: dict[str, str] = {}
    of_torch = OutputGraph.get_replayed_side_effect_source_refs

    def seen(graph: Any, **options: bool) -> list[str]:
        sources, effects = of_torch(graph, **options), graph.side_effects
        for x in effects._get_modified_vars():
            with contextlib.suppress(NotImplementedError):  # what the function made itself has no name
                if x.source is not None and x.source.name in sources:
                    names = [f"{x.source.name}.{name}" for name in effects.store_attr_mutations.get(x, ())]
                    line = _line(next(reversed(effects.mutation_user_stacks.get(x, [])), ()))
                    found.update(dict.fromkeys(names or [x.source.name], line))
        return sources

    OutputGraph.get_replayed_side_effect_source_refs = seen  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        OutputGraph.get_replayed_side_effect_source_refs = of_torch  # type: ignore[method-assign]


def _said(manager: Any) -> list[str]:
    """List what a tree of guards checks."""
    own = [each for guard in manager.get_leaf_guards() for each in guard.verbose_code_parts()]
    pairs = manager.get_key_value_managers().values() if hasattr(manager, "get_key_value_managers") else ()
    below = [*manager.get_child_managers(), *(each for pair in pairs for each in pair if each is not None)]
    return [*own, *(each for child in below for each in _said(child))]


def _is_of_python(guard: Any) -> bool:
    """Tell a guard of Dynamo that is none on a tensor, nor on what parameters have (they are stored in another layout
    than they are captured in), nor on what `_call` stood for."""
    left_out = r"\._(parameters|buffers)\['[^']+'\]|invoke_subgraph_placeholder"
    is_tensor = isinstance(guard.value, torch.Tensor)
    return guard.guard_type not in _NOT_GUARDED and not is_tensor and not re.search(left_out, guard.orig_guard.name)


def _with_line(guard: str) -> tuple[str, str]:
    """Give a guard's expression, and in brackets the author's line if it has one."""
    code, *comments = re.split(r"\s+# ", re.sub(r"\s*\(HINT: .*\)$", "", guard.strip()))
    comments = [re.sub(r"[^ ]*/([^ /]+/[^ /]+:)", r"\1", each) for each in comments]  # no more of a path than it takes
    return code, f" ({', '.join(comments)})" if comments else ""


def _with_value(guard: str, scope: dict[str, Any]) -> str:
    """Say a guard that is not so in words: the expression, the author's line, what the value is now."""
    code, where = _with_line(guard)
    if identity := re.match(r"___check_(type|obj)_id\((.+), \d+\)(?:, type=(.+))?", code):
        what, subject, kind = identity.groups()
        return f"{subject} being {f'a {kind}' if what == 'type' else 'the same object'}{where}"
    if own := re.match(r"not ___dict_contains\('(\w+)', (.+)\.__dict__\)", code):
        return f"{own[2]}.{own[1]} being that of its class{where}"
    if gone := re.match(r"(?:KeyError|AttributeError|IndexError) on (.+)", code):
        return f"{gone[1]}{where}, which is gone"
    code = re.sub(r"^(len\(.+\)) != ", r"\1 == ", code)  # of a dict Dynamo gives the reason, not the guard
    try:
        value = eval(re.split(r" (?:==|is) ", code.removeprefix("not "))[0], scope)  # of Dynamo's making
    except Exception:  # it uses names of Dynamo's own
        return f"{code}{where}"
    return f"{code}{where}, and it is {reprlib.repr(value)} now"


def lazy_graph_module(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """Give a graph whose code is generated when it first runs, as a traced one's is."""
    return _LazyGraphModule(root, graph)


def compile_by_inductor(
    gm: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], options: Mapping[str, Any]
) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """Compile a graph that returns a tuple of tensors, for inputs of these layouts; nothing is allocated.

    What it gives takes the inputs as a list, which it empties: one that nobody else holds is freed after its last use
    inside. `standalone_compile`, which is public, holds them all till it returns.

    `torch.fx.passes.regional_inductor` would find and compile regions, but sorts the whole graph anew (undoing where
    collectives were put), gives regions that touch one set of options, and compiles equal ones again. `torch.compile`
    would trace, and guard, what is a graph already.
    """
    import torch._inductor.config  # with Dynamo it is a third of the time that the trainer's imports take

    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    with fake_mode:
        fakes: list[Any] = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs]
    for node, fake in zip(gm.graph.find_nodes(op="placeholder"), fakes, strict=True):
        node.meta["val"] = fake
    from torch._dynamo.utils import GmWrapper  # both take long to import, and few runs need them
    from torch._inductor.compile_fx import compile_fx

    with tracing(TracingContext(fake_mode)), torch._inductor.config.patch(dict(options)):
        run: Any = compile_fx(GmWrapper(gm, list), fakes)  # type: ignore[arg-type]

    def compiled(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:  # FX calls torch's own functions by their names
        return run(inputs)

    return compiled


def inductor_options(settings: Iterable[str]) -> dict[str, Any]:
    """Read settings `name=value` of `torch._inductor.config`.

    Raises:
        UserError: a name that is no option of Inductor, or a value of another type than the option's.
    """
    import torch._inductor.config

    known, options = torch._inductor.config.get_config_copy(), {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; they are in torch._inductor.config"
            raise UserError(f"compile.region_options = {setting!r}: is no option of Inductor{hint}")
        try:
            options[name] = json.loads(text)
        except json.JSONDecodeError:
            options[name] = text
        if known[name] is not None and type(options[name]) is not type(known[name]):
            kind = type(known[name]).__name__
            raise UserError(f"compile.region_options = {setting!r}: must be a {kind}, such as {known[name]!r}")
    return options


def boxed(
    gm: torch.fx.GraphModule, edits: Iterable[Callable[[torch.fx.Graph], None]] = ()
) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Give the graph, or an edited copy, as a function of one list, which it empties: an input that nobody else holds
    is then freed after its last use. Call arguments live until the call returns; FX knows no public form without them.
    """
    graph, edits = gm.graph, list(edits)
    if edits:
        graph = copy.deepcopy(graph)
    for edit in edits:
        edit(graph)
    plain = graph._codegen
    graph.set_codegen(_BoxedCodeGen())
    made = torch.fx.GraphModule(gm, graph)  # its code is made now
    graph.set_codegen(plain)
    return made


def is_profiling() -> bool:
    """Tell whether a torch profiler records now, whoever started it: public API knows only its own profiler's state."""
    return torch.autograd._profiler_enabled()


def begin_range(name: str, words: Mapping[str, str]) -> Any:
    """Begin a range that a profiler shows, with words beside its name if it records shapes; its `__exit__` ends it.

    `torch.profiler.record_function`, which is public, takes one word, does not show it, and is several times as slow.
    """
    span = _RecordFunctionFast(name, (), dict(words))
    span.__enter__()
    return span


def record_memory_history(on: bool) -> None:
    """Record what CUDA's allocator does from now on, or stop; there is no public form yet."""
    torch.cuda.memory._record_memory_history("all" if on else None, max_entries=100_000)


def save_memory_snapshot(path: Path) -> None:
    """Write what was recorded, and what is allocated now. A pickle of plain lists and numbers."""
    torch.cuda.memory._dump_snapshot(str(path))


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Tell whether somebody registered a hook on a parameter's gradient; public API only adds and removes them."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def num_writes(tensor: torch.Tensor) -> int:
    """Count how often a tensor was written to in place. Autograd's own counter; there is no public one."""
    return tensor._version


def scaled_mm(
    a_MK: torch.Tensor, scale_a: torch.Tensor, b_NK: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply float8 numbers on a GPU, b transposed; scales are scalars, or (M, 1) and (N, 1). The kernel wants the
    first by rows, the second by columns. `F.scaled_mm` would replace it, once its words for scales settle."""
    return torch._scaled_mm(
        a_MK.contiguous(), b_NK.contiguous().t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=dtype
    )


def multiply(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors by a scalar in place, many in one kernel. `clip_grads_with_norm_` does it on DTensors, which on
    2.11 leave operators on made-up tensors of the whole shape in a trace."""
    torch._foreach_mul_(tensors, factor)


def accumulate(sums: list[torch.Tensor], terms: list[torch.Tensor]) -> None:
    """Add to each tensor, in place, the other one at its place, many in one kernel. There is no public form."""
    torch._foreach_add_(sums, terms)


def count_step(optimizer: torch.optim.Optimizer) -> None:
    """Let a schedule know that the optimizer's step was taken, though by a graph: it warns of a step of its own that
    comes first. torch sets this where `step` is called; there is no public form."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def free_gradient_dtype(parameters: Iterable[torch.Tensor], replicated: torch.dtype | None) -> None:
    """Let the leaves' gradients keep the dtype that autograd gives them, where the installed FSDP2 does so (2.15 on):
    with bf16 parameters a norm's weight then has an fp32 gradient, which is reduced unrounded. There what is replicated
    over tensor parallelism has gradients of the dtype `replicated`, in which their parts are added."""
    if hasattr(FSDPParamGroup, "_set_unsharded_grad_dtypes"):
        for parameter in parameters:
            is_replicated = isinstance(parameter, DTensor) and any(p.is_replicate() for p in parameter.placements)
            parameter.grad_dtype = replicated if is_replicated else None


@dataclasses.dataclass(frozen=True)
class _Rule:
    """A function without the tensors it closes over: two of a kind are equal, whatever their tensors."""

    code: types.CodeType
    cells: tuple
    defaults: tuple | None
    scope: dict = dataclasses.field(compare=False)


class _Hole:
    """Stands where a tensor was taken out."""


def open_rule(rule: Any) -> tuple[list[torch.Tensor], Any]:
    """Split a mask rule into the tensors it closes over, through nested functions, partials and sequences, and a
    comparable remainder. torch's own `BlockMask` does so from 2.13 on; 2.11 leaves the tensors where they are, where
    a trace would take one batch's documents for all batches'.
    """
    tensors: list[torch.Tensor] = []

    def take(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            tensors.append(x)
            return _Hole
        if isinstance(x, types.FunctionType):
            cells = tuple(take(cell.cell_contents) for cell in x.__closure__ or ())
            return _Rule(x.__code__, cells, take(x.__defaults__), x.__globals__)
        if isinstance(x, functools.partial):
            return functools.partial, take(x.func), take(x.args), tuple((k, take(v)) for k, v in x.keywords.items())
        return type(x)(map(take, x)) if type(x) in (tuple, list) else x

    return tensors, take(rule)


def close_rule(tensors: Iterable[torch.Tensor], remainder: Any) -> Any:
    """Put tensors back into what `open_rule` left."""
    given = iter(tensors)

    def put(x: Any) -> Any:
        if x is _Hole:
            return next(given)
        if isinstance(x, _Rule):
            cells = tuple(types.CellType(put(cell)) for cell in x.cells)
            return types.FunctionType(x.code, x.scope, argdefs=put(x.defaults), closure=cells)
        if type(x) is tuple and x and x[0] is functools.partial:
            function, args, keywords = map(put, x[1:])
            return functools.partial(function, *args, **dict(keywords))
        return type(x)(map(put, x)) if type(x) in (tuple, list) else x

    return put(remainder)


_OF_QUERIES_AND_KEYS = ("seq_lengths", "BLOCK_SIZE")  # of a block mask: two numbers each


def mask_parts(mask: BlockMask) -> tuple[dict[str, Any], tuple]:
    """Split a block mask into its tensors by name, those of its rule included, its lengths and blocks, which are
    numbers, and a comparable remainder."""
    of_rule, rule = open_rule(mask.mask_mod)
    tensors = {name: x for name in BlockMask._TENSOR_ATTRS if (x := getattr(mask, name)) is not None}
    numbers = {f"{name}[{i}]": getattr(mask, name)[i] for name in _OF_QUERIES_AND_KEYS for i in range(2)}
    left = [name for name in BlockMask._CONTEXT_ATTRS if name not in (*_OF_QUERIES_AND_KEYS, "mask_mod")]
    remainder = (tuple(tensors), tuple((name, getattr(mask, name)) for name in left), rule)
    return tensors | numbers | {f"mask_mod_{i}": x for i, x in enumerate(of_rule)}, remainder


def mask_whole(given: Iterable[Any], remainder: tuple) -> BlockMask:
    """Put a block mask together again."""
    names, constants, rule = remainder
    given = iter(given)
    parts = dict.fromkeys(BlockMask._TENSOR_ATTRS) | {name: next(given) for name in names} | dict(constants)
    parts |= {name: (next(given), next(given)) for name in _OF_QUERIES_AND_KEYS}
    return BlockMask(**parts, mask_mod=close_rule(given, rule))


_flex_attention_fake = registered_hop_fake_fns[_flex_attention]  # type: ignore[index]


def _truthful_flex_attention_fake(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Give what the uncompiled operator gives. torch's own rule says fp32 for the log-sum-exp even where it is fp64: a
    trace would then round its gradient to fp32. Replaced by torch's, once that follows the queries' dtype."""
    out, *statistics = _flex_attention_fake(*args, **kwargs)
    if out.dtype == torch.float64:
        statistics = [x.double() for x in statistics]
    return out, *statistics


registered_hop_fake_fns[_flex_attention] = _truthful_flex_attention_fake  # type: ignore[index]

# What runs the operator and its backward where they are not compiled: functions of the same arguments, exchangeable. A
# public flex attention for CPUs with gradients would replace them.
_UNCOMPILED = DispatchKey.CompositeExplicitAutograd
dense_flex_attention = _flex_attention.py_kernels[_UNCOMPILED]
dense_flex_attention_backward = _flex_attention_backward.py_kernels[_UNCOMPILED]


def run_flex_attention_with(forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """Let the uncompiled operator and its backward run these."""
    _flex_attention.py_kernels[_UNCOMPILED] = forward
    _flex_attention_backward.py_kernels[_UNCOMPILED] = backward
    _flex_attention._dispatch_cache.clear()
    _flex_attention_backward._dispatch_cache.clear()


ScoreFunction = Callable[..., torch.Tensor]  # (score, b, h, q, kv) -> score


def flex_attention_op(
    q_BNLH: torch.Tensor,
    k_BNLH: torch.Tensor,
    v_BNLH: torch.Tensor,
    mask: BlockMask,
    scale: float,
    score: ScoreFunction | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run flex attention's own higher-order operator, without the public function around it; give the result and the
    logarithm of each softmax's denominator, (B, N, L), both with gradients.

    The public function refuses gradients on a CPU, although the uncompiled operator has them, and compiles its own
    call, which can't happen inside a trace. On CUDA the eager step calls it all the same, compiled: the operator alone
    would hold every score. A graph leaves the operator to the pass `compile_regions`, which makes the same kernels of
    it: so it gets the same kernel options, those of a GPU when it is compiled. Rule and score function may close over
    tensors (a batch's document ids): they are handed to the operator by name, so that a graph takes them from its
    inputs.
    """
    if q_BNLH.is_cuda and not isinstance(q_BNLH, FakeTensor):
        wanted = AuxRequest(lse=True)
        out_BNLH, aux = _compiled_flex_attention()(
            q_BNLH,
            k_BNLH,
            v_BNLH,
            score_mod=score,
            block_mask=mask,
            scale=scale,
            enable_gqa=q_BNLH.shape[1] != k_BNLH.shape[1],
            kernel_options=flex_kernel_options(q_BNLH),  # type: ignore[arg-type]
            return_aux=wanted,
        )
        return out_BNLH, aux.lse
    options = dict(_apply_kernel_options(q_BNLH, k_BNLH, v_BNLH, True, None))
    if torch.compiler.is_dynamo_compiling():  # lifts itself what rule and score function close over
        out_BNLH, lse_BNL, *_ = _flex_attention(
            q_BNLH, k_BNLH, v_BNLH, score or _no_score_change, mask.as_tuple(), scale, options
        )
        return out_BNLH, lse_BNL * math.log(2)
    of_mask, mask_remainder = open_rule(mask.mask_mod)
    of_score, score_remainder = open_rule(score or _no_score_change)

    def rule(b: Any, h: Any, q: Any, kv: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return close_rule(tensors, mask_remainder)(b, h, q, kv)

    def change(value: Any, b: Any, h: Any, q: Any, kv: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return close_rule(tensors, score_remainder)(value, b, h, q, kv)

    out_BNLH, lse_BNL, *_ = _flex_attention(
        q_BNLH,
        k_BNLH,
        v_BNLH,
        change,
        (*mask.as_tuple()[:-1], rule),
        scale,
        options,
        tuple(of_score),
        tuple(of_mask),
    )
    return out_BNLH, lse_BNL * math.log(2)  # the operator counts in powers of two


@functools.cache
def _compiled_flex_attention() -> Callable[..., torch.Tensor]:
    """Compile the public function for each shape it is called with, as a graph is, never for unknown shapes."""
    return torch.compile(flex_attention, dynamic=False)


def _no_score_change(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
    return score


_fake_stands_for = ""


def init_fake_process_group(world_size: int, rank: int = 0, stands_for: str = "nccl") -> None:
    """Start a process group of any size in which this process is one rank and nothing is sent. Tests' own, so far.

    One may follow another in a process, so what DTensor remembers is cleared: it takes meshes of the same ranks for
    one, and would go on with the groups of the world before. `stands_for`: the backend whose copies a forecast counts.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    global _fake_stands_for
    _fake_stands_for = stands_for
    _clear_sharding_prop_cache()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def ranks_of_group(name: str) -> list[int]:
    """Give the ranks of a group by its name, which is all that a graph's collectives know of it. Replaced when
    functional collectives take groups."""
    return torch.distributed.get_process_group_ranks(_resolve_process_group(name))  # type: ignore[arg-type, unused-ignore]


def is_gloo(group: str) -> bool:
    """Tell whether gloo carries a group's collectives, or a fake group stands for gloo, by the group's name; of an
    unknown one it does not. Replaced as `ranks_of_group`."""
    try:
        backend = torch.distributed.get_backend(_resolve_process_group(group))  # type: ignore[arg-type, unused-ignore]
        return (_fake_stands_for if backend == "fake" else backend) == "gloo"
    except RuntimeError:  # a graph of another process
        return False


def name_group(name: str, group: torch.distributed.ProcessGroup) -> None:
    """Let collectives find a group by that name too. Replaced as `ranks_of_group`."""
    torch._C._distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type, unused-ignore]


@functools.cache
def one_thread_per_gloo_group() -> None:
    """Let each gloo group that is made from now on run its collectives in one thread, one after the other.

    torch starts two for each network interface, and both write the name of what they finished into one string of the
    group, without a lock (`ProcessGroupGloo::runLoop`; 2.11 to 2.15): if two collectives of a group end at the same
    moment, the heap is corrupt. No argument of `init_process_group` or `new_group` sets the number. A lock in torch
    would replace this.
    """
    if not torch.distributed.is_gloo_available():
        return
    gloo: Any = torch.distributed.ProcessGroupGloo
    start = gloo.__init__

    def start_one_thread(self: Any, store: Any, rank: int, size: int, *options_given: Any, **settings: Any) -> None:
        if options_given:
            start(self, store, rank, size, *options_given, **settings)
            return
        options = gloo._Options()
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        options._devices = [gloo.create_device(interface=name) for name in interfaces] or [gloo.create_default_device()]
        options._threads = 1
        for name, value in settings.items():
            setattr(options, "_timeout" if name == "timeout" else name, value)
        start(self, store, rank, size, options)

    gloo.__init__ = start_one_thread


def set_timeout(group: torch.distributed.ProcessGroup, seconds: int) -> None:
    """Change how long a collective of a live group may take: before 2.15 public API sets it only at the start."""
    public = getattr(torch.distributed, "set_timeout", None)
    (public or _set_pg_timeout)(datetime.timedelta(seconds=seconds), group)


# Where in which file a tensor is, as the pickled `.metadata` has it. An index in JSON would replace it.
StorageInfo = _StorageInfo

# Every global that torch's writer puts into the pickled `.metadata`, besides dtypes (`torch.float32`). All of them
# build plain records. The mark of a pickled object is among them so that it can be refused by its name. An index in
# JSON would replace the pickle and this list.
METADATA_GLOBALS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
}


class PipelineAction(NamedTuple):
    """What a rank of a pipeline does next: `kind`, as torch writes it, of a stage and a microbatch. F is forward, B
    backward, I and W its halves (for the input, for the weights); the others are messages."""

    kind: str
    stage: int
    microbatch: int


_KINDS = ("F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B")  # of torch's; a rank gathers when it likes


def pipeline_order(
    schedule: str, num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> list[list[PipelineAction]]:
    """Give what each rank of a pipeline computes, in order, by torch's schedule of that name.

    Only the lists are torch's: no process group and no stage is there. `PipelineStage` itself, public, runs modules
    under autograd, and can't run a graph's parts.

    Raises:
        ValueError: the schedule can't be made of these numbers.
    """
    from torch.distributed.pipelining import schedules  # imports Dynamo, which takes a second

    stubs = _stub_stages(num_ranks, stages_per_rank * num_ranks)
    make = schedules.get_schedule_class(schedule)
    made: Any = make(stubs if stages_per_rank > 1 else stubs[0], num_microbatches)  # type: ignore[arg-type]
    return [_flat(made.pipeline_order[rank]) for rank in range(num_ranks)]


def with_messages(
    orders: Sequence[Sequence[PipelineAction]], num_stages: int, num_microbatches: int
) -> tuple[list[list[PipelineAction]], list[int]]:
    """Put sends and receives into what ranks compute, in an order in which none waits for ever; give the rank of each
    stage too.

    Raises:
        AssertionError: a rank would wait for ever, or something is missing, twice or in two places.
    """
    from torch.distributed.pipelining import schedules

    compute = {
        rank: [schedules._Action(a.stage, schedules._ComputationType(a.kind), a.microbatch) for a in order]
        for rank, order in enumerate(orders)
    }
    runtime: Any = schedules._PipelineScheduleRuntime(_stub_stages(len(orders), num_stages), num_microbatches)
    runtime._prepare_schedule_with_comms(compute)
    order = [_flat(runtime.pipeline_order_with_comms[rank]) for rank in range(len(orders))]
    return order, [runtime.stage_index_to_group_rank[stage] for stage in range(num_stages)]


def _stub_stages(num_ranks: int, num_stages: int) -> list[Any]:
    return [
        types.SimpleNamespace(stage_index=i, num_stages=num_stages, group_size=num_ranks, group_rank=0, submod=None)
        for i in range(max(1, num_stages // num_ranks))
    ]


def _flat(actions: Iterable[Any]) -> list[PipelineAction]:
    """Give torch's actions as ours; of those that it runs side by side, one after the other."""
    parts = [part for action in actions if action is not None for part in action.sub_actions or [action]]
    return [
        PipelineAction(part.computation_type.value, part.stage_index, part.microbatch_index)
        for part in parts
        if part.computation_type.value in _KINDS
    ]
