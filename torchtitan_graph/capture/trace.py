"""Trace a Python function, with the state it closes over, into one FX graph, to be run on live state.

traced = minimal_fx_tracer(step, module=model)(batch, num_tokens)
step = run_traced(traced, module=model)
loss, grads = step(batch, num_tokens)
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.optim import Optimizer

from torchtitan_graph.capture.arguments import Given, check_result, flatten_with_path, positional_parameters, take_call
from torchtitan_graph.capture.calls import TRACE, called_as, expect, expect_arguments, expect_function, expect_state
from torchtitan_graph.capture.dimensions import DynamicShapes
from torchtitan_graph.capture.dynamic import Sizes, keep_traced_sizes
from torchtitan_graph.capture.effects import no_effects
from torchtitan_graph.capture.gradients import (
    left_gradients,
    no_other_step,
    refuse_live,
    refuse_lost,
    unchanged_gradients,
    warn_of_constants,
)
from torchtitan_graph.capture.reached import Reached, reached
from torchtitan_graph.capture.refusals import check_state, refuse_unsupported, refusing_reads
from torchtitan_graph.capture.stamp import TraceInFull, opaque
from torchtitan_graph.capture.state import (
    classes_of,
    live_state,
    modes_of,
    new_leaves,
    optimizer_options,
    swapped_state,
    unassigned_data,
)
from torchtitan_graph.capture.strides import reshape_unknown
from torchtitan_graph.capture.traced import TracedResult, autocast
from torchtitan_graph.capture.uncleared import Uncleared
from torchtitan_graph.capture.uncollected import uncollected
from torchtitan_graph.errors import UserError, listed
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.hierarchy import ScopeRecorder
from torchtitan_graph.graph.signature import Signature, Slot, inputs_of, layout_of
from torchtitan_graph.log import logger
from torchtitan_graph.torch_private.fake import FakeTensorMode, NeedsSymbols
from torchtitan_graph.torch_private.sizes import SymbolicFakeTensorMode
from torchtitan_graph.torch_private.tensors import is_traceable_wrapper_subclass
from torchtitan_graph.torch_private.tracing import DataDependentOutputException, trace_to_graph


class InParts(functools.partial):
    """`whole(forward, *arguments)`: a function to trace, with a `forward` that captures may treat separately.

    `forward` has the first of the arguments, or all of them. The code around it, such as backward, is traced as
    usual.
    """

    @property
    def forward(self) -> Callable[..., Any]:
        if not self.args:
            raise UserError("InParts has no forward: write InParts(whole, forward), for whole(forward, *arguments)")
        return self.args[0]

    def with_forward(self, forward: Callable[..., Any]) -> InParts:
        return InParts(self.func, forward)


class Capture(Protocol):
    """A function that turns a function, which closes over `module`, into a graph: `capture(fn, module)(*args,
    **kwargs)`. Of `blocks`, submodules by name, those that are alike need to be traced only once. `fn` may be
    `InParts`."""

    def __call__(
        self,
        fn: Callable[..., Any],
        module: nn.Module | None = ...,
        *,
        device: Any = ...,
        blocks: Mapping[str, nn.Module] = ...,
        stack_traces: bool = ...,
        dynamic_shapes: DynamicShapes | None = ...,
        call_hierarchy: bool = ...,
    ) -> Callable[..., TracedResult]: ...


@called_as("make_fx_capture(fn, module=model)(*arguments)")
def make_fx_capture(
    fn: Callable[..., Any],
    module: nn.Module | None = None,
    *,
    device: Any = None,
    blocks: Mapping[str, nn.Module] = types.MappingProxyType({}),
    stack_traces: bool = False,
    dynamic_shapes: DynamicShapes | None = None,
    call_hierarchy: bool = False,
) -> Callable[..., TracedResult]:
    """Trace as `minimal_fx_tracer` does, without an optimizer: a `Capture`. Nodes' fake values have the traced sizes,
    with which passes compute, unless only a run knows them."""
    options = dict(device=device, blocks=blocks, dynamic_shapes=dynamic_shapes, call_hierarchy=call_hierarchy)
    trace = minimal_fx_tracer(fn, module, stack_traces=stack_traces, **options)  # type: ignore[arg-type]

    def capture(*args: Any, **kwargs: Any) -> TracedResult:
        traced = trace(*args, **kwargs)
        if traced.sizes is not None and _unknown(traced) is None:
            keep_traced_sizes(traced.gm, traced.sizes)
        return traced

    return capture


def capture_step(
    capture: Capture, fn: Callable[..., Any], module: nn.Module | None, *, device: Any
) -> Callable[..., TracedResult]:
    """Return `capture(fn, module, device=device)` for a training step: a callable that raises a UserError for sizes
    that passes could not compute with."""

    def call(*arguments: Any) -> TracedResult:
        traced = capture(fn, module, device=device)(*arguments)
        if _unknown(traced) is None:
            return traced
        again = capture(fn, module, device=device, stack_traces=True)(*arguments)  # to name the line
        raise UserError(
            f"{_unknown(again)}: a training step's passes need known sizes, and numbers in tensors: keep a number a "
            "tensor (without .item() or .tolist()), and choose by torch.where"
        )

    return call


def _unknown(traced: TracedResult) -> str | None:
    return traced.sizes.what_is_unknown(traced.gm) if traced.sizes is not None else None


@called_as(TRACE)
def minimal_fx_tracer(
    fn: Callable[..., Any],
    module: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    *,
    device: torch.device | str | None = None,
    blocks: Mapping[str, nn.Module] = types.MappingProxyType({}),
    stack_traces: bool = False,
    donated: Collection[str] = (),
    dynamic_shapes: DynamicShapes | None = None,
    call_hierarchy: bool = False,
) -> Callable[..., TracedResult]:
    """Return a callable that traces `fn(*args, **kwargs)` for the arguments it is called with.

    `fn` closes over `module` and `optimizer`. Their tensors become inputs of the graph, by name: parameters and buffers
    (a tied one once), and optimizer state, which the graph updates in place. All else that `fn` closes over is a
    constant of the trace, the loss function too: changing it requires a new trace.

    Args:
        device: the device that replaces meta in the trace (a model built on meta is traced before it is allocated).
        blocks: submodules of `module`, by name: those that are alike are traced once. See Note [Stamping].
        stack_traces: record the Python stack on each node; tracing then takes about 1.6 times as long.
        donated: the arguments, by name, that the function may write to in place.
        dynamic_shapes: the dimensions that may differ from call to call, by the tensor's name and the dimension: a name
            (those of one name are equal), a `torch.export.Dim`, or None. Marks on tensors (`mark_dynamic`) do the same.
            See Note [Dynamic dimensions].
        call_hierarchy: record on each node the calls of modules and functions around it. See Note [Call
            hierarchy].

    Raises:
        UserError: names an argument or a use of state that a graph can't contain, and what to do instead.
    """
    expect_state(TRACE, module, optimizer)
    expect_function(TRACE, fn, module, device, blocks)
    expect(TRACE, "donated", donated, (list, tuple, set, frozenset), "a list of the arguments' names")
    for name in donated:
        expect(TRACE, "what donated holds", name, str, "an argument's name")

    @uncollected()
    def trace(*args: Any, **kwargs: Any) -> TracedResult:
        expect_arguments(fn, args, kwargs)
        given = take_call(positional_parameters(fn), args, kwargs)
        if unknown := [name for name in donated if name not in given.arguments]:
            raise UserError(f"donated = {[*donated]}: {unknown[0]!r} must be one of {', '.join(given.arguments)}")
        check_state(module, optimizer)
        values = [(kind, name, tensor) for (kind, name), tensor in live_state(module, optimizer).items()]
        values += [("input", given.names[i], x) for i, x in enumerate(given.leaves) if i not in given.constants]
        sizes = Sizes(given.by_name, dynamic_shapes)
        slots = tuple(
            Slot(name, kind, sizes.layout(name, tensor) if kind == "input" else layout_of(tensor))
            for kind, name, tensor in values
        )
        held = list(reached(fn, module, optimizer))

        def begun(sizes: Sizes, out: _Result) -> tuple[Callable[..., list[Tensor]], list[Any]]:
            """Return the function to trace, and its arguments with their sizes and strides."""
            plain = [
                (t, sizes.strided(slot.name, t) if slot.kind == "input" else (t.shape, t.stride()))
                for slot, (_, _, tensor) in zip(slots, values, strict=True)
                for t in slot.layout.flatten(tensor)
            ]
            numbers = {i: sizes.number(given.names[i], x) for i, x in given.constants.items()}
            run = _on_flat_tensors(fn, module, optimizer, given._replace(constants=numbers), slots, values, out)
            return run, plain

        out = _Result()
        run, plain = begun(sizes, out)

        def graph(blocks: Mapping[str, nn.Module], env: ShapeEnv | None = None) -> GraphModule:
            fake_mode = _fake_mode(env)
            names = {id(child): name for name, child in module.named_modules()} if module is not None else {}
            recorder = ScopeRecorder(names) if call_hierarchy else None
            fakes = fakes_of(plain, fake_mode, device)
            stamped = opaque(blocks, module, fake_mode, stack_traces, recorder)
            unchanged = unchanged_gradients(held, fake_mode)
            with no_effects(held), unchanged, no_other_step(optimizer), stamped as stamps:
                gm = trace_to_graph(run, fakes, fake_mode, module, stack_traces, recorder)
                refuse_live(fn, module, fake_mode)
                out.has_computed_grad = refuse_lost(gm, out.left)
                stamps.put_in(gm)
            reshape_unknown(gm)
            return gm

        with refusing_reads(optimizer, sizes):
            gm = None if sizes.dimensions else _unless_read(graph, blocks)
            symbolic = gm is None
            gm = gm or graph({}, sizes.env)
            gm.meta["signature"] = Signature(slots, out.slots)
            if optimizer is not None and out.has_computed_grad:  # else they are results of this call alone
                others = Sizes(given.by_name, dynamic_shapes)  # `sizes` collects the graph's own guards
                _refuse_uncleared(begun, others, held, device, symbolic)
            if symbolic:
                sizes.settle(gm)
                out.constants = {i: sizes.returned(x) for i, x in out.constants.items()}
        _name_placeholders(gm)
        meta.settle(gm)
        warn_of_constants(gm, fn)
        may_write = {(s.kind, s.name) for s in slots if s.kind in ("param", "optim") and optimizer is not None}
        of_argument = zip(given.names, given.owners, strict=True)
        may_write |= {("input", leaf) for leaf, argument in of_argument if argument in donated}
        try:
            refuse_unsupported(gm, may_write)
        except UserError:
            if not stack_traces:  # again, to name the line
                again = dict(device=device, stack_traces=True, donated=donated, dynamic_shapes=dynamic_shapes)
                minimal_fx_tracer(fn, module, optimizer, **again)(*args, **kwargs)  # type: ignore[arg-type]
            raise
        return TracedResult(
            gm=gm,
            in_spec=given.in_spec,
            arguments=given.arguments,
            parameters=given.parameters,
            names=given.names,
            constants=given.constants,
            out_spec=out.spec,
            out_constants=out.constants,
            options=optimizer_options(module, optimizer),
            modes={name: x for _, name, _, x in modes_of(module)},
            autocast=autocast(),
            sizes=sizes if symbolic else None,
            classes=classes_of(module),
        )

    return trace


@dataclasses.dataclass
class _Result:
    """A traced function's result: its pytree, its leaves that are no tensors, and its tensors' slots; the gradients
    left in `.grad`, as numbers of plain tensors by name; whether it computed them; and the check of uncleared ones."""

    spec: Any = None
    constants: dict[int, Any] = dataclasses.field(default_factory=dict)
    slots: tuple[Slot, ...] = ()
    left: dict[str, int] = dataclasses.field(default_factory=dict)
    has_computed_grad: bool = False
    uncleared: Uncleared | None = None


def _on_flat_tensors(
    fn: Callable[..., Any],
    module: nn.Module | None,
    optimizer: Optimizer | None,
    given: Given,
    slots: tuple[Slot, ...],
    values: list[tuple[str, str, Any]],
    out: _Result,
) -> Callable[..., list[Tensor]]:
    """Return the function that is traced: plain tensors in, plain tensors out, with the state replaced by them.

    A call fills `out`.
    """

    def run(*flat: Tensor) -> list[Tensor]:
        leaves = new_leaves([x for _, _, x in values], [slot.layout for slot in slots], flat)
        traced = dict(zip([(s.kind, s.name) for s in slots], leaves, strict=True))
        full = [given.constants[i] if i in given.constants else traced["input", n] for i, n in enumerate(given.names)]
        args, kwargs = pytree.tree_unflatten(full, given.in_spec)
        forms = {key: _form(x) for key, x in traced.items()}
        if out.uncleared is not None:
            out.uncleared.lay(traced)
        with swapped_state(module, optimizer, traced), unassigned_data(traced):
            result = fn(*args, **kwargs)
        if changed := [key[1] for key, x in traced.items() if not _is_form(x, forms[key])]:
            raise UserError(
                f"the traced function changes the shape, the strides or the memory of {listed(changed)} in place, by"
                " t_, resize_, set_ or the like, which a graph does to no tensor of its caller: return a new one"
            )
        if out.uncleared is not None:
            out.uncleared.refuse(traced)
        paths, out.spec = flatten_with_path(result)
        for path, x in paths:
            check_result(f"the result{pytree.keystr(path)}", x)
        out.constants = {i: x for i, (_, x) in enumerate(paths) if not isinstance(x, Tensor)}
        tensors = [(path, x.detach() if x.requires_grad else x) for path, x in paths if isinstance(x, Tensor)]
        out.slots = tuple(Slot(pytree.keystr(path), "output", layout_of(x)) for path, x in tensors)
        left = left_gradients(traced)
        out.left = {name: len(parts) for name, parts in left.items()}
        given_back = [t for slot, (_, x) in zip(out.slots, tensors, strict=True) for t in slot.layout.flatten(x)]
        return [*given_back, *(t for parts in left.values() for t in parts)]

    return run


def _form(x: Tensor) -> tuple[Any, Any]:
    """Return the memory of a plain tensor, and how the tensor lies in it."""
    memory = None if is_traceable_wrapper_subclass(x) else x.untyped_storage()
    return memory, (x.shape, x.stride(), x.storage_offset())


def _is_form(x: Tensor, before: tuple[Any, Any]) -> bool:
    memory, place = _form(x)
    return memory is before[0] and place == before[1]


def _refuse_uncleared(
    begun: Callable[[Sizes, _Result], tuple[Callable[..., list[Tensor]], list[Any]]],
    sizes: Sizes,
    held: list[Reached],
    device: Any,
    symbolic: bool,
) -> None:
    """Run a function that leaves gradients in `.grad` again, unrecorded, with gradients of an earlier call."""
    out = _Result(uncleared=Uncleared())
    run, plain = begun(sizes, out)
    fake_mode = _fake_mode(sizes.env if symbolic else None)
    fake_mode.watch = out.uncleared.see  # type: ignore[union-attr]
    fakes = fakes_of(plain, fake_mode, device)
    one_thread = torch.autograd.set_multithreading_enabled(False)  # a mode is thread-local
    with unchanged_gradients(held, fake_mode), no_effects(held), fake_mode, one_thread:
        run(*fakes)


def _unless_read(
    graph: Callable[[Mapping[str, nn.Module]], GraphModule], blocks: Mapping[str, nn.Module]
) -> GraphModule | None:
    """Trace each kind of block once, or all blocks, with the reason logged; return None if symbols are needed: the
    function reads a tensor's value, or loops by one."""
    try:
        try:
            return graph(blocks)
        except TraceInFull as reason:
            logger.info(f"every block is traced, not every kind: {reason}")
        return graph({})  # outside the handler: references to the first trace would keep its open checkpoint alive
    except (DataDependentOutputException, NeedsSymbols):
        return None
    except AssertionError as error:  # of a loop that carries a Python number
        if "fake_mode with shape_env" not in str(error):
            raise
        return None


def _fake_mode(env: ShapeEnv | None) -> FakeTensorMode:
    kind = FakeTensorMode if env is None else SymbolicFakeTensorMode
    return kind(allow_non_fake_inputs=True, shape_env=env)


def fakes_of(
    plain: Sequence[tuple[Tensor, tuple[Sequence[Any], Sequence[Any]]]],
    fake_mode: FakeTensorMode,
    device: torch.device | str | None,
) -> list[Tensor]:
    """Return fake tensors like these, on `device` instead of meta."""
    with fake_mode:
        places = [device if t.is_meta and device else t.device for t, _ in plain]
        return [
            torch.empty_strided(tuple(shape), tuple(stride), dtype=t.dtype, device=place)
            for (t, (shape, stride)), place in zip(plain, places, strict=True)
        ]


def _name_placeholders(gm: GraphModule) -> None:
    for slot, node in inputs_of(gm):
        node._rename("".join(c if c.isalnum() else "_" for c in slot.name).strip("_"))
        node.target = node.name
    gm.recompile()
