"""Trace a Python function, with the state it closes over, into one FX graph; run that graph on live state.

traced = minimal_fx_tracer(step, module=model)(batch, num_tokens)
step = run_traced(traced, module=model)
loss, grads = step(batch, num_tokens)
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import traceback
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import sympy
import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.nn.attention.flex_attention import BlockMask

from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.dynamic import DynamicShapes, Sizes, keep_traced_sizes, place
from torchtitan_graph.graph.edit import aliased
from torchtitan_graph.graph.hierarchy import Recorder
from torchtitan_graph.graph.observe import Watchable
from torchtitan_graph.graph.signature import Signature, Slot, is_dynamic, layout_of, signature_of
from torchtitan_graph.graph.stamp import TraceInFull, opaque
from torchtitan_graph.graph.state import (
    BoundState,
    flatten,
    live_state,
    modes_of,
    optimizer_options,
    swapped_state,
    unassigned_data,
    unchanged_attributes,
)
from torchtitan_graph.graph.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    SymbolicFakeTensorMode,
    dynamic_marks,
    has_gradient_hooks,
    mask_parts,
    mask_whole,
    trace_to_graph,
)
from torchtitan_graph.graph.uncollected import uncollected
from torchtitan_graph.log import logger

_CONSTANT_TYPES = (int, float, bool, str, type(None))


def _mask_with_keys(mask: BlockMask) -> tuple[list[tuple[pytree.KeyEntry, torch.Tensor]], tuple]:
    tensors, remainder = mask_parts(mask)
    return [(pytree.GetAttrKey(name), x) for name, x in tensors.items()], remainder


def _mask_leaves(mask: BlockMask) -> tuple[list[torch.Tensor], tuple]:
    tensors, remainder = mask_parts(mask)
    return list(tensors.values()), remainder


if BlockMask not in pytree.SUPPORTED_NODES:
    # A mask is an input like any other: another batch's documents then run through the same graph.
    pytree.register_pytree_node(BlockMask, _mask_leaves, mask_whole, flatten_with_keys_fn=_mask_with_keys)


@dataclasses.dataclass(frozen=True)
class TracedResult:
    """A traced function: its graph and the user's calling convention.

    gm          plain tensors in, a list of plain tensors out; `signature_of(gm)` describes both
    in_spec     pytree of (args, kwargs)
    arguments   the pytree of each argument by its name, in the order of in_spec
    parameters  the function's positional parameters
    names       the leaves of (args, kwargs), named as the function's author does
    constants   the leaves of (args, kwargs) that are no tensors, by position; a call with other values is refused
    out_spec    pytree of the result
    out_constants  the leaves of the result that are no tensors, by position; a size that differs as an expression
    options     what the optimizer's groups hold beside tensors, by name: constants of the trace as well
    modes       what modules are in training mode, and what parameters take gradients, by name: constants as well
    autocast    the device types that compute in a lower precision around the call, and in which
    sizes       the dimensions that may differ from call to call, and what the graph reads; None without any
    guards      refuses a call, before the first run and whenever state is bound again, if other Python values that the
                graph rests on are not as they were; None where the capture does not know them
    """

    gm: GraphModule
    in_spec: pytree.TreeSpec
    arguments: dict[str, pytree.TreeSpec]
    parameters: tuple[str, ...]
    names: tuple[str, ...]
    constants: dict[int, Any]
    out_spec: pytree.TreeSpec
    out_constants: dict[int, Any]
    options: dict[str, Any]
    modes: dict[str, bool]
    autocast: dict[str, torch.dtype]
    sizes: Sizes | None = None
    guards: Callable[..., None] | None = None


class InParts(functools.partial):
    """`whole(forward, *arguments)`: a function to trace, of which a capture may take `forward` in a way of its own.

    `forward` takes the first of the arguments, or all of them. What stands around it, such as backward, does not.
    """

    @property
    def forward(self) -> Callable[..., Any]:
        return self.args[0]

    def with_forward(self, forward: Callable[..., Any]) -> InParts:
        return InParts(self.func, forward)


class Capture(Protocol):
    """A way to turn a function into a graph: of `fn(*arguments)`, which closes over `module`. Of `blocks`, submodules
    by name, those that are alike need to be traced once only. `fn` may be `InParts`."""

    def __call__(
        self,
        fn: Callable[..., Any],
        module: torch.nn.Module,
        arguments: tuple[Any, ...],
        *,
        device: Any,
        blocks: Mapping[str, torch.nn.Module] = ...,
        stack_traces: bool = ...,
        dynamic_shapes: DynamicShapes | None = ...,
        call_hierarchy: bool = ...,
    ) -> TracedResult: ...


def make_fx_capture(
    fn: Callable[..., Any],
    module: torch.nn.Module,
    arguments: tuple[Any, ...],
    *,
    device: Any,
    blocks: Mapping[str, torch.nn.Module] = types.MappingProxyType({}),
    stack_traces: bool = False,
    dynamic_shapes: DynamicShapes | None = None,
    call_hierarchy: bool = False,
) -> TracedResult:
    """Run the function on fake tensors and record every operator: `minimal_fx_tracer` in the form of a `Capture`."""
    trace = minimal_fx_tracer(
        fn,
        module,
        device=device,
        blocks=blocks,
        stack_traces=stack_traces,
        dynamic_shapes=dynamic_shapes,
        call_hierarchy=call_hierarchy,
    )
    traced = trace(*arguments)
    if traced.sizes is not None:
        if unknown := traced.sizes.what_is_unknown(traced.gm):
            raise UserError(f"{unknown}: a training step's passes need sizes to reckon with, and numbers in tensors")
        keep_traced_sizes(traced.gm)
    return traced


def minimal_fx_tracer(
    fn: Callable[..., Any],
    module: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device: torch.device | str | None = None,
    blocks: Mapping[str, torch.nn.Module] = types.MappingProxyType({}),
    stack_traces: bool = False,
    donated: Collection[str] = (),
    dynamic_shapes: DynamicShapes | None = None,
    call_hierarchy: bool = False,
) -> Callable[..., TracedResult]:
    """Give a callable that traces `fn(*args, **kwargs)` for the arguments it is called with.

    `fn` closes over `module` and `optimizer`. Their tensors become inputs of the graph, by name: parameters and
    buffers (a tied one once), and optimizer state, which the graph updates in place. What else `fn` closes over is a
    constant of the trace. The loss function too: changing it means tracing again.

    Args:
        device: what meta tensors are traced as (a model built on meta is traced before it is allocated).
        blocks: submodules of `module`, by name: those that are alike are traced once. See Note [Stamping].
        stack_traces: record the Python stack on each node; tracing then takes about 1.6 times as long.
        donated: the arguments, by name, that the function may write to in place.
        dynamic_shapes: the dimensions that may differ from call to call, by the tensor's name and the dimension: a name
            (those of one name are equal), a `torch.export.Dim`, or None. Marks on tensors (`mark_dynamic`) do the same.
            See Note [Dynamic dimensions].
        call_hierarchy: record on each node the calls of modules and functions that it was made in. See Note [Call
            hierarchy].

    Raises:
        UserError: an argument or a use of state that a graph can't hold, naming it and what to do instead.
    """
    if optimizer is not None and module is None:
        raise UserError("minimal_fx_tracer got an optimizer without its module: pass module=, the one it optimizes")

    @uncollected()
    def trace(*args: Any, **kwargs: Any) -> TracedResult:
        given = take_call(_positional_parameters(fn), args, kwargs)
        _check_state(module, optimizer)
        values = [(kind, name, tensor) for (kind, name), tensor in live_state(module, optimizer).items()]
        values += [("input", given.names[i], x) for i, x in enumerate(given.leaves) if i not in given.constants]
        sizes = Sizes({name: x for kind, name, x in values if kind == "input"}, dynamic_shapes)
        slots = tuple(
            Slot(name, kind, sizes.layout(name, tensor) if kind == "input" else layout_of(tensor))
            for kind, name, tensor in values
        )
        plain = [
            (t, sizes.strided(slot.name, t) if slot.kind == "input" else (t.shape, t.stride()))
            for slot, (_, _, tensor) in zip(slots, values, strict=True)
            for t in slot.layout.flatten(tensor)
        ]
        out = _Result()
        run = _on_flat_tensors(fn, module, optimizer, given, slots, values, out)

        def graph(blocks: Mapping[str, torch.nn.Module], env: ShapeEnv | None = None) -> GraphModule:
            kind = FakeTensorMode if env is None else SymbolicFakeTensorMode
            fake_mode = kind(allow_non_fake_inputs=True, shape_env=env)
            names = {id(child): name for name, child in module.named_modules()} if module is not None else {}
            recorder = Recorder(names) if call_hierarchy else None
            with opaque(blocks, module, fake_mode, stack_traces, recorder) as stamps:
                gm = trace_to_graph(run, fakes_of(plain, fake_mode, device), fake_mode, module, stack_traces, recorder)
            stamps.put_in(gm)
            return gm

        with _refusing_reads(optimizer):
            gm = None if sizes.dimensions else _unless_read(graph, blocks)
            symbolic = gm is None
            gm = gm or graph({}, sizes.env)
            gm.meta["signature"] = Signature(slots, out.slots)
            if symbolic:
                sizes.settle(gm)
                out.constants = {i: sizes.returned(x) for i, x in out.constants.items()}
        _name_placeholders(gm)
        meta.settle(gm)
        may_write = {
            (slot.kind, slot.name) for slot in slots if slot.kind in ("param", "optim") and optimizer is not None
        }
        of_argument = zip(given.names, given.owners, strict=True)
        may_write |= {("input", leaf) for leaf, argument in of_argument if argument in donated}
        try:
            _refuse_unsupported(gm, may_write)
        except UserError:
            if not stack_traces:  # once more, to name the line
                minimal_fx_tracer(
                    fn,
                    module,
                    optimizer,
                    device=device,
                    stack_traces=True,
                    donated=donated,
                    dynamic_shapes=dynamic_shapes,
                )(*args, **kwargs)
            raise
        return TracedResult(
            gm,
            given.in_spec,
            given.arguments,
            given.parameters,
            given.names,
            given.constants,
            out.spec,
            out.constants,
            optimizer_options(module, optimizer),
            {f"{name}{'.' if name else ''}{attribute}": x for _, name, attribute, x in modes_of(module)},
            _autocast(),
            sizes if symbolic else None,
        )

    return trace


class Given(NamedTuple):
    """The arguments that a function is traced for; `owners` are those that the leaves are of, by name, and all but
    these and `leaves` as in `TracedResult`."""

    leaves: list[Any]
    in_spec: pytree.TreeSpec
    arguments: dict[str, pytree.TreeSpec]
    parameters: tuple[str, ...]
    names: tuple[str, ...]
    constants: dict[int, Any]
    owners: list[str]


@dataclasses.dataclass
class _Result:
    """What a function gave when it was traced: its pytree, its leaves that are no tensors, and its tensors' slots."""

    spec: Any = None
    constants: dict[int, Any] = dataclasses.field(default_factory=dict)
    slots: tuple[Slot, ...] = ()


def take_call(parameters: tuple[str, ...], args: tuple, kwargs: dict[str, Any]) -> Given:
    """Flatten a call's arguments, and refuse those that a graph can't take."""
    paths, in_spec = pytree.tree_flatten_with_path(_call(args, kwargs))
    leaves = [leaf for _, leaf in paths]
    names = tuple(_leaf_name(path, parameters) for path, _ in paths)
    arguments = {name: pytree.tree_structure(x) for name, x in _by_name(args, kwargs, parameters).items()}
    constants = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
    for name, leaf in zip(names, leaves, strict=True):
        _check_argument(name, leaf)
    owners = [name for name, spec in arguments.items() for _ in range(spec.num_leaves)]
    return Given(leaves, in_spec, arguments, parameters, names, constants, owners)


def _on_flat_tensors(
    fn: Callable[..., Any],
    module: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    given: Given,
    slots: tuple[Slot, ...],
    values: list[tuple[str, str, Any]],
    out: _Result,
) -> Callable[..., list[torch.Tensor]]:
    """Give the function that is traced: plain tensors in, plain tensors out, on state that is swapped for them.

    A call fills `out`.
    """

    def run(*flat: torch.Tensor) -> list[torch.Tensor]:
        traced = dict(zip([(s.kind, s.name) for s in slots], _unflatten(slots, flat, values), strict=True))
        full = [given.constants[i] if i in given.constants else traced["input", n] for i, n in enumerate(given.names)]
        args, kwargs = pytree.tree_unflatten(full, given.in_spec)
        with swapped_state(module, optimizer, traced), unchanged_attributes(module), unassigned_data(traced):
            result = fn(*args, **kwargs)
        paths, out.spec = pytree.tree_flatten_with_path(result)
        for path, x in paths:
            _check_result(f"the result{pytree.keystr(path)}", x)
        out.constants = {i: x for i, (_, x) in enumerate(paths) if not isinstance(x, torch.Tensor)}
        tensors = [(path, x.detach()) for path, x in paths if isinstance(x, torch.Tensor)]
        out.slots = tuple(Slot(pytree.keystr(path), "output", layout_of(x)) for path, x in tensors)
        return [t for slot, (_, x) in zip(out.slots, tensors, strict=True) for t in slot.layout.flatten(x)]

    return run


def _unless_read(
    graph: Callable[[Mapping[str, torch.nn.Module]], GraphModule], blocks: Mapping[str, torch.nn.Module]
) -> GraphModule | None:
    """Trace each kind of block once, or say why that can't be; give None if the function reads a tensor's value."""
    try:
        try:
            return graph(blocks)
        except TraceInFull as reason:
            logger.info(f"every block is traced, not every kind: {reason}")
        return graph({})  # here, where nothing of the first is held: a checkpoint that it left begun would go on
    except DataDependentOutputException:
        return None


@contextlib.contextmanager
def _refusing_reads(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Refuse, in words of the function's author, what depends on numbers that no trace has."""
    try:
        yield
    except GuardOnDataDependentSymNode as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if optimizer is not None and any(inspect.getfile(type(optimizer)) == file for file in files):
            raise UserError(
                f"{type(optimizer).__name__} branches on a number of its state, which no trace has; one that does not "
                "is fused: such as AdamW(fused=True, lr=torch.tensor(...))"
            ) from error
        raise UserError(
            f"the traced function reads a tensor's value or an unbacked size and decides by it ({error.cond}"
            f"{place(traceback.extract_tb(error.__traceback__))}), which no trace has: keep it a tensor (torch.where), "
            "promise what holds by torch._check, or decide outside"
        ) from error
    except DynamicOutputShapeException as error:
        raise UserError(
            f"the traced function makes a tensor whose shape depends on values ({error.func}), which no trace has: "
            "take torch.where or a mask of fixed shape, or do it outside"
        ) from error
    except (TypeError, RuntimeError, IndexError) as error:
        first = str(error).partition("\n")[0]
        if "use_reentrant=True" in str(error):
            raise UserError(
                "the traced function calls torch.utils.checkpoint with use_reentrant=True, or without the argument, "
                "which only works with .backward(): pass use_reentrant=False"
            ) from error
        of_symbols = any(word in first for word in ("SymInt", "symbolic", "isIntList"))
        if isinstance(error, UserError) or not of_symbols:
            raise
        raise UserError(
            f"the traced function does with a dynamic size, or a number that it reads, what takes a plain number only"
            f"{place(traceback.extract_tb(error.__traceback__))}: {first}; leave it out, or let the dimension be fixed"
        ) from error


def run_traced(
    traced: TracedResult,
    module: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    make_run: Callable[[GraphModule], Callable[[list[torch.Tensor]], list[torch.Tensor]]] = Watchable,
) -> Callable[..., Any]:
    """Give a callable with the traced function's own signature that runs the graph on the live state.

    State is matched by name and bound once; each call checks only that the modules still hold the bound tensors, and
    binds again if they don't. Runs under `no_grad`. `make_run` gives the graph as a function of a list of plain
    tensors, which it empties.

    Raises:
        UserError: the state's names or layouts, or a call's arguments, differ from those traced; names the difference.
    """
    if optimizer is not None and module is None:
        raise UserError("run_traced got an optimizer without its module: pass module=, the one it optimizes")
    signature, graph = signature_of(traced.gm), make_run(traced.gm)
    state_slots = tuple(s for s in signature.inputs if s.kind != "input")
    input_slots = tuple(s for s in signature.inputs if s.kind == "input")
    examples = _example_inputs(traced.gm)
    bound = BoundState(state_slots, traced.options, traced.modes, module, optimizer)
    guarded: list[torch.Tensor] | None = None  # the state that was bound when guards were last checked

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal guarded
        state = bound.tensors()
        inputs, sizes = _flat_inputs(traced, input_slots, examples, args, kwargs)
        if traced.guards is not None and guarded is not state:
            traced.guards(*args, **kwargs)
            guarded = state
        flat = state + inputs
        del inputs
        strides = [x.stride() for x in flat]
        del args, kwargs  # the graph frees an input after its last use, if nobody else holds it
        if _autocast() != traced.autocast:
            raise UserError(
                f"torch.autocast is {_autocast() or 'off'}, traced with {traced.autocast or 'off'}: its casts are in "
                "the graph; call under the same, or trace again"
            )
        with torch.no_grad(), contextlib.ExitStack() as stack:
            for kind in traced.autocast:  # its casts are in the graph, and backward has none
                stack.enter_context(torch.autocast(kind, enabled=False))
            try:
                values = graph(flat)
            except RuntimeError as error:
                if traced.sizes and (refused := traced.sizes.failed(error)):
                    raise refused from None
                if "view size is not compatible" in str(error):
                    _refuse_strides(traced.gm, strides, error)
                raise
            except ZeroDivisionError as error:  # in Python, where a kernel has inf
                if not traced.sizes:
                    raise
                found = ", ".join(map(str, traced.sizes.dimensions)) or "a number that it reads"
                raise UserError(
                    f"the graph divides a number by one that is 0 in this call, which it computes of {found}: trace "
                    "again for these sizes"
                ) from error
            return _unflatten_result(traced, signature.outputs, values, sizes)

    return run


def _flat_inputs(
    traced: TracedResult,
    slots: tuple[Slot, ...],
    examples: dict[str, torch.Tensor],
    args: tuple,
    kwargs: dict[str, Any],
) -> tuple[list[torch.Tensor], Mapping[Any, Any]]:
    """Give the plain tensors of a call's arguments, checked against those traced, and its sizes by symbol."""
    leaves, in_spec = pytree.tree_flatten(_call(args, kwargs))
    if in_spec != traced.in_spec:
        leaves = _leaves_by_name(args, kwargs, traced)
    for i, constant in traced.constants.items():
        if type(leaves[i]) is not type(constant) or repr(leaves[i]) != repr(constant):  # nan is nan, 0 is not -0
            found = "a tensor" if isinstance(leaves[i], torch.Tensor) else repr(leaves[i])
            raise UserError(
                f"{traced.names[i]} is {found}, traced with {constant!r}: a value that is no tensor is a "
                "constant of the trace; pass it as a tensor, or trace again"
            )
    tensors = [leaf for i, leaf in enumerate(leaves) if i not in traced.constants]
    for slot, tensor in zip(slots, tensors, strict=True):
        device = examples[slot.name].device.type
        if isinstance(tensor, torch.Tensor) and tensor.device.type != device != "meta":
            raise UserError(f"{slot.name} is on {tensor.device}, traced on {device}: move it, or trace again")
    flat = [t for slot, tensor in zip(slots, tensors, strict=True) for t in flatten(slot, tensor)]
    if traced.sizes is None:
        return flat, {}
    return flat, traced.sizes.check({slot.name: tensor for slot, tensor in zip(slots, tensors, strict=True)})


def _unflatten_result(
    traced: TracedResult, slots: tuple[Slot, ...], values: list[torch.Tensor], sizes: Mapping[Any, Any]
) -> Any:
    """Build the traced function's result of a graph's outputs."""
    results: list[Any] = []
    position = 0
    for slot in slots:
        results.append(slot.layout.unflatten(values[position : position + slot.layout.num_tensors]))
        position += slot.layout.num_tensors
    for i, constant in traced.out_constants.items():  # ascending, so that each lands at its own place
        results.insert(i, int(constant.xreplace(sizes)) if isinstance(constant, sympy.Expr) else constant)
    return pytree.tree_unflatten(results, traced.out_spec)


def _example_inputs(gm: GraphModule) -> dict[str, torch.Tensor]:
    """Give what each argument was traced as, by name; of a tensor subclass its last part."""
    placeholders = iter(gm.graph.find_nodes(op="placeholder"))
    owners = [(slot, next(placeholders)) for slot in signature_of(gm).inputs for _ in range(slot.layout.num_tensors)]
    return {slot.name: node.meta["val"] for slot, node in owners if slot.kind == "input"}


def _refuse_strides(gm: GraphModule, strides: list[tuple[int, ...]], error: RuntimeError) -> None:
    """Name the argument whose strides are not those traced, where a view in the graph has failed for them."""
    owners = [slot for slot in signature_of(gm).inputs for _ in range(slot.layout.num_tensors)]
    for slot, found, node in zip(owners, strides, gm.graph.find_nodes(op="placeholder"), strict=True):
        wanted = node.meta["val"].stride()
        if not is_dynamic(slot.layout) and found != wanted:
            name = slot.name
            raise UserError(f"{name} has strides {found}, traced with {wanted}: make it so, or trace again") from error


def _call(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Give a call's arguments in one order, however its keywords are."""
    return args, dict(sorted(kwargs.items()))


def _unflatten(slots: tuple[Slot, ...], flat: tuple[torch.Tensor, ...], values: list) -> list[torch.Tensor]:
    """Build the traced leaves: subclasses rewrapped, each a leaf that requires grad as the live tensor does."""
    leaves, position = [], 0
    for slot, (_, _, live) in zip(slots, values, strict=True):
        leaf = slot.layout.unflatten(list(flat[position : position + slot.layout.num_tensors])).detach()
        if live.requires_grad:
            leaf.requires_grad_()
            if live.is_leaf:
                leaf.grad_dtype = live.grad_dtype
        leaves.append(leaf)
        position += slot.layout.num_tensors
    return leaves


def fakes_of(
    plain: Sequence[tuple[torch.Tensor, tuple[Sequence[Any], Sequence[Any]]]],
    fake_mode: FakeTensorMode,
    device: torch.device | str | None,
) -> list[torch.Tensor]:
    """Give tensors without numbers like these, and `device` as that of those on meta."""
    with fake_mode:
        return [
            torch.empty_strided(
                tuple(shape), tuple(stride), dtype=t.dtype, device=device if t.is_meta and device else t.device
            )
            for t, (shape, stride) in plain
        ]


def _positional_parameters(fn: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin, such as torch.sin, has no signature
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def _by_name(args: tuple, kwargs: dict[str, Any], parameters: tuple[str, ...]) -> dict[str, Any]:
    """Name a call's arguments as the function's author does, in the order in which they are flattened."""
    names = (*parameters[: len(args)], *(f"args[{i}]" for i in range(len(parameters), len(args))))
    return dict(zip(names, args, strict=True)) | dict(sorted(kwargs.items()))


def _leaf_name(path: tuple, parameters: tuple[str, ...]) -> str:
    """Name a leaf of (args, kwargs): `batch.tokens_BL`, not `args[0].tokens_BL`."""
    kind, first, *rest = path
    if kind.idx == 1:
        return f"{first.key}{pytree.keystr(tuple(rest))}"
    name = parameters[first.idx] if first.idx < len(parameters) else f"args[{first.idx}]"
    return name + pytree.keystr(tuple(rest))


def _leaves_by_name(args: tuple, kwargs: dict[str, Any], traced: TracedResult) -> list[Any]:
    """Give the leaves of a call in the traced order, where its arguments come in another form: by keyword, not by
    position, or the reverse.

    Raises:
        UserError: other arguments, or others inside them; names the difference.
    """
    given, traced_leaves = _by_name(args, kwargs, traced.parameters), set(traced.names)
    found: dict[str, Any] = {}
    words = []
    for name, value in given.items():
        if name not in traced.arguments:
            words.append(f"{name} was not traced{_nearest(name, traced.arguments)}")
            continue
        leaves = {name + pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(value)[0]}
        own = {leaf for leaf in traced_leaves if leaf == name or leaf.startswith((f"{name}[", f"{name}."))}
        words += [f"{leaf} is missing" for leaf in traced.names if leaf in own and leaf not in leaves]
        words += [f"{leaf} was not traced{_nearest(leaf, own)}" for leaf in leaves if leaf not in own]
        if own == leaves.keys() and pytree.tree_structure(value) != traced.arguments[name]:
            words.append(f"{name} has another structure: its keys in another order, or other containers or constants")
        found |= leaves
    words = [f"{name} is missing" for name in traced.arguments if name not in given] + words
    if words:
        shown = "; ".join(words[:8]) + (f"; and {len(words) - 8} more" if len(words) > 8 else "")
        raise UserError(f"the call's arguments are not those traced: {shown}. Trace again for others")
    return [found[name] for name in traced.names]


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _name_placeholders(gm: GraphModule) -> None:
    placeholders = iter(gm.graph.find_nodes(op="placeholder"))
    for slot in signature_of(gm).inputs:
        for _ in range(slot.layout.num_tensors):
            node = next(placeholders)
            stem = "".join(c if c.isalnum() else "_" for c in slot.name).strip("_")
            node._rename(stem)
            node.target = node.name
    gm.recompile()


def _autocast() -> dict[str, torch.dtype]:
    return {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}


def _check_state(module: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None) -> None:
    marked = [name for (_, name), x in live_state(module, optimizer).items() if dynamic_marks(x)]
    if marked:
        raise UserError(f"{', '.join(marked)} has a dimension marked dynamic: only an argument's may be")
    hooked = [name for name, p in module.named_parameters() if has_gradient_hooks(p)] if module is not None else []
    if hooked:
        raise UserError(
            f"{', '.join(hooked)} has a hook on its gradient, which a graph would not call: remove it, and change the "
            "gradient in the traced function"
        )


def _check_argument(name: str, leaf: Any) -> None:
    if isinstance(leaf, torch.nn.Module):
        raise UserError(f"{name} is an nn.Module: pass it as module=, then its parameters become inputs of the graph")
    if isinstance(leaf, torch.Tensor):
        _check_dense(name, leaf)
    elif not isinstance(leaf, _CONSTANT_TYPES):
        raise UserError(
            f"{name} is a {type(leaf).__name__}; a traced function takes tensors and int, float, bool, str or None: "
            "capture it in the function's closure, or register its type with torch.utils._pytree "
            "(register_pytree_node if it holds tensors, register_constant if it does not)"
        )


def _check_result(name: str, leaf: Any) -> None:
    if isinstance(leaf, torch.Tensor):
        _check_dense(name, leaf)
    elif isinstance(leaf, torch.SymFloat | torch.SymBool):
        raise UserError(f"{name} is {leaf}, a number that only a run knows: return the tensor that it is read from")
    elif not isinstance(leaf, (*_CONSTANT_TYPES, torch.SymInt)):
        raise UserError(
            f"{name} is a {type(leaf).__name__}; a traced function gives tensors and int, float, bool, str or None: "
            "register its type with torch.utils._pytree (register_pytree_node), or return what it holds"
        )


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise UserError(f"{name} is a {kind} tensor: a traced function takes and gives dense ones")


def _refuse_unsupported(gm: GraphModule, may_write: Collection[tuple[str, str]]) -> None:
    """Refuse random operations, and in-place writes to inputs other than those, by kind and name; name them."""
    for nested in gm.modules():
        for node in nested.graph.nodes if isinstance(nested, GraphModule) else ():
            if _draws(node):
                raise UserError(
                    f"the traced function draws random numbers ({node.target}, in "
                    f"{meta.module(node) or 'the function itself'}{_line(node)}): a graph that recomputes or reorders "
                    "would draw others; draw outside and pass the numbers in"
                )
    placeholders = iter(gm.graph.find_nodes(op="placeholder"))
    owner = {next(placeholders): slot for slot in signature_of(gm).inputs for _ in range(slot.layout.num_tensors)}
    root: dict[Node, tuple[str, str]] = {node: (slot.kind, slot.name) for node, slot in owner.items()}
    known: set[Node] = set()  # small tensors that the function brings: reading one gives a constant of the trace
    for node in gm.graph.nodes:
        inputs = node.all_input_nodes
        if node.target is torch.ops.aten.lift_fresh_copy.default or (inputs and known.issuperset(inputs)):
            known.add(node)
        elif any(is_write and x in known for x, is_write in aliased(node)) and _writes_to_many(node):
            # Of one tensor torch notices that its numbers are no longer known, of a list it does not.
            raise UserError(
                f"the traced function writes to a number of its own ({node.target}{_line(node)}), and reading it would "
                "give what was there before: make it by torch.full, or write to one tensor at a time"
            )
        if node.op == "get_attr":
            root[node] = ("constant", "a tensor that it closes over")
            if isinstance(getattr(gm, str(node.target)), FakeTensor):
                raise UserError(
                    f"{meta.module(node) or 'the traced function'} reads a tensor that another trace left: let it be "
                    "an argument, or forget it before the function begins; where one block leaves it for another, "
                    "debug.trace_every_block helps"
                )
        for source, is_write in aliased(node):
            if source in root:
                kind, name = root[source]
                if is_write and root[source] not in may_write:
                    raise UserError(
                        f"the traced function writes in place to {name} ({node.target}{_line(node)}): a graph's inputs "
                        "are not its own; return the new value from the function and write it back outside"
                    )
                root.setdefault(node, root[source])


def _writes_to_many(node: Node) -> bool:
    """Tell whether an operator writes to the tensors of a list."""
    return isinstance(node.target, torch._ops.OpOverload) and any(
        a.alias_info is not None and a.alias_info.is_write and isinstance(a.type, torch.ListType)
        for a in node.target._schema.arguments
    )


def _line(node: Node) -> str:
    line = meta.source_line(node)
    return f", {line}" if line else ""


def _draws(node: Node) -> bool:
    """Tell whether a node draws random numbers: of those tagged so, attention does not where its dropout is 0."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    if "dropout_p" not in names:
        return True
    i = names.index("dropout_p")
    return bool((node.args[i] if i < len(node.args) else node.kwargs.get("dropout_p", 0.0)) != 0.0)
