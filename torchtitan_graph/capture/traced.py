"""A traced function: its graph and its calling convention, and its run on live state."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import sympy
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.optim import Optimizer

from torchtitan_graph.capture.arguments import leaves_by_name, ordered
from torchtitan_graph.capture.calls import RUN, TRACE, called_as, expect, expect_state
from torchtitan_graph.capture.dynamic import Sizes
from torchtitan_graph.capture.refusals import refuse_strides
from torchtitan_graph.capture.state import BoundState, flatten, live_state
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.signature import Slot, inputs_of, signature_of, unflatten_each
from torchtitan_graph.runtime.observe import Watchable


@dataclasses.dataclass(frozen=True)
class TracedResult:
    """A traced function: its graph and the user's calling convention.

    gm          plain tensors in, a list of plain tensors out; `signature_of(gm)` describes both
    in_spec     pytree of (args, kwargs)
    arguments   the pytree of each argument by its name, in the order of in_spec
    parameters  the function's positional parameters
    names       the leaves of (args, kwargs), by the function's own names
    constants   the leaves of (args, kwargs) that are no tensors, by position; a call with other values is refused
    out_spec    pytree of the result
    out_constants  the leaves of the result that are no tensors, by position; a dynamic size as an expression
    options     the values in the optimizer's groups that are no tensors, by name: constants of the trace as well
    modes       modules' training mode and parameters' requires_grad, by name: constants as well
    autocast    the device types with autocast active around the call, and its dtype
    sizes       the dynamic dimensions and the numbers that the graph reads; None without any
    classes     the modules' classes and their number of hooks, by name: compared when state is bound;
                a stored step has none
    guards      raises a UserError, before the first run and whenever state is bound again, if other Python values that
                the graph depends on have changed; None where the capture does not know them
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
    classes: dict[str, str] = dataclasses.field(default_factory=dict)

    def __reduce__(self) -> NoReturn:
        raise UserError(
            "a TracedResult can't be pickled or copied: its graph would lose its signature. Write save_traced(traced, "
            "path) and load_traced(path, *arguments) of torchtitan_graph.formats.traced_file"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UserError(f"a traced function is run on the live state of its module: write {RUN}")


@called_as(RUN)
def run_traced(
    traced: TracedResult,
    module: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    *,
    make_run: Callable[[GraphModule], Callable[[list[Tensor]], list[Tensor]]] = Watchable,
) -> Callable[..., Any]:
    """Return a callable with the traced function's own signature that runs the graph on the live state.

    State is matched by name and bound once; each call checks only that the modules still have the bound tensors, and
    binds again if they don't. Runs under `no_grad`. `make_run` returns the graph as a function of a list of plain
    tensors, which it empties.

    Raises:
        UserError: the state's names or layouts, or a call's arguments, differ from those traced; names the difference.
    """
    expect(RUN, "traced", traced, TracedResult, f"what {TRACE} returns")
    expect_state(RUN, module, optimizer)
    _expect_state_as_traced(traced, module, optimizer)
    signature, graph = signature_of(traced.gm), make_run(traced.gm)
    state_slots = tuple(s for s in signature.inputs if s.kind != "input")
    input_slots = tuple(s for s in signature.inputs if s.kind == "input")
    examples = _example_inputs(traced.gm)
    bound = BoundState(state_slots, traced.options, traced.modes, traced.classes, module, optimizer)
    guarded: list[Tensor] | None = None  # the state that was bound when guards were last checked

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
        del args, kwargs  # the graph frees an input without other references after its last use
        if autocast() != traced.autocast:
            raise UserError(
                f"torch.autocast is {autocast() or 'off'}, traced with {traced.autocast or 'off'}: its casts are in "
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
                    refuse_strides(traced.gm, strides, error)
                raise
            except ZeroDivisionError as error:  # in Python, where a kernel returns inf
                if not traced.sizes:
                    raise
                found = ", ".join(map(str, traced.sizes.dimensions)) or "a number that it reads"
                raise UserError(
                    f"the graph divides a number by one that is 0 in this call, which it computes of {found}: trace "
                    "again for these sizes"
                ) from error
            return _unflatten_result(traced, signature.outputs, values, sizes)

    return run


def check_call(traced: TracedResult, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise a UserError for a call's arguments that differ in shape, dtype or constants from those traced."""
    slots = tuple(slot for slot in signature_of(traced.gm).inputs if slot.kind == "input")
    _flat_inputs(traced, slots, _example_inputs(traced.gm), args, kwargs)


def _expect_state_as_traced(traced: TracedResult, module: nn.Module | None, optimizer: Optimizer | None) -> None:
    with_module = any(slot.kind in ("param", "buffer") for slot in signature_of(traced.gm).inputs)
    if module is None and with_module:
        raise UserError(f"the function was traced with module=, and is run without: write {RUN}")
    if live_state(module, None) and not with_module:
        raise UserError(
            "the function was traced without module=, and is run with one: its parameters are constants of the graph;"
            f" write {TRACE}, or run_traced(traced)(*arguments)"
        )
    if traced.options and optimizer is None:
        raise UserError(
            "the function was traced with optimizer=, and is run without: write "
            "run_traced(traced, module=model, optimizer=optimizer)(*arguments)"
        )
    if optimizer is not None and not traced.options:
        raise UserError(
            "the function was traced without optimizer=, and is run with one: write "
            "minimal_fx_tracer(fn, module=model, optimizer=optimizer)(*arguments), or run it without"
        )


def _flat_inputs(
    traced: TracedResult, slots: tuple[Slot, ...], examples: dict[str, Tensor], args: tuple, kwargs: dict[str, Any]
) -> tuple[list[Tensor], Mapping[Any, Any]]:
    """Return the plain tensors of a call's arguments, checked against those traced, and its sizes by symbol."""
    leaves, in_spec = pytree.tree_flatten(ordered(args, kwargs))
    if in_spec != traced.in_spec:
        leaves = leaves_by_name(args, kwargs, traced.parameters, traced.arguments, traced.names)
    for i, constant in traced.constants.items():
        if traced.sizes is not None and traced.sizes.varies(traced.names[i]):
            continue
        if type(leaves[i]) is not type(constant) or repr(leaves[i]) != repr(constant):  # nan equals nan, 0 is not -0
            found = "a tensor" if isinstance(leaves[i], Tensor) else repr(leaves[i])
            raise UserError(
                f"{traced.names[i]} is {found}, traced with {constant!r}: a value that is not a tensor is a "
                "constant of the trace; pass it as a tensor, or trace again"
            )
    _refuse_given_twice(traced.names, leaves)
    tensors = [leaf for i, leaf in enumerate(leaves) if i not in traced.constants]
    for slot, tensor in zip(slots, tensors, strict=True):
        device = examples[slot.name].device.type
        if isinstance(tensor, Tensor) and tensor.device.type != device != "meta":
            raise UserError(f"{slot.name} is on {tensor.device}, traced on {device}: move it, or trace again")
    flat = [t for slot, tensor in zip(slots, tensors, strict=True) for t in flatten(slot, tensor)]
    if traced.sizes is None:
        return flat, {}
    return flat, traced.sizes.check(dict(zip(traced.names, leaves, strict=True)))


def _refuse_given_twice(names: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raise a UserError if one tensor that takes gradients is given for two arguments: each of them would get a part of
    its gradients."""
    first: dict[int, str] = {}
    for name, x in zip(names, leaves, strict=True):
        if isinstance(x, Tensor) and x.requires_grad and first.setdefault(id(x), name) != name:
            raise UserError(
                f"{first[id(x)]} and {name} are one tensor that takes gradients, which are two inputs of the graph: "
                "trace a function that has it as one argument, or pass a copy for the other"
            )


def _unflatten_result(
    traced: TracedResult, slots: tuple[Slot, ...], values: list[Tensor], sizes: Mapping[Any, Any]
) -> Any:
    """Return the traced function's result, from a graph's outputs."""
    results = unflatten_each([slot.layout for slot in slots], values)
    for i, constant in traced.out_constants.items():  # ascending, so that each gets its own position
        results.insert(i, int(constant.xreplace(sizes)) if isinstance(constant, sympy.Expr) else constant)
    return pytree.tree_unflatten(results, traced.out_spec)


def _example_inputs(gm: GraphModule) -> dict[str, Tensor]:
    """Return each argument's traced fake tensor, by name; for a tensor subclass its last part."""
    return {slot.name: node.meta["val"] for slot, node in inputs_of(gm) if slot.kind == "input"}


def autocast() -> dict[str, torch.dtype]:
    return {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}
