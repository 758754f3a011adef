"""UserErrors for code that no graph can contain, in terms of the user's function."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Collection, Iterator
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.optim import Optimizer

from torchtitan_graph.capture.dynamic import Sizes, place
from torchtitan_graph.capture.state import live_state
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import aliased
from torchtitan_graph.graph.signature import inputs_of, is_dynamic
from torchtitan_graph.torch_private.fake import WritesToLive
from torchtitan_graph.torch_private.sizes import dynamic_marks
from torchtitan_graph.torch_private.tensors import has_gradient_hooks, has_step_hooks
from torchtitan_graph.torch_private.tracing import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    refused_region,
)


def check_state(module: nn.Module | None, optimizer: Optimizer | None) -> None:
    marked = [name for (_, name), x in live_state(module, optimizer).items() if dynamic_marks(x)]
    if marked:
        raise UserError(f"{', '.join(marked)} has a dimension marked dynamic: only an argument's may be")
    hooked = [name for name, p in module.named_parameters() if has_gradient_hooks(p)] if module is not None else []
    if hooked:
        raise UserError(
            f"{', '.join(hooked)} has a hook on its gradient, which a graph would not call: remove it, and change the "
            "gradient in the traced function"
        )
    if optimizer is not None and has_step_hooks(optimizer):
        raise UserError(
            f"{type(optimizer).__name__} has a hook on its step, which a graph would not call: remove it, and do what "
            "it does in the traced function, or outside"
        )


@contextlib.contextmanager
def refusing_reads(optimizer: Optimizer | None, sizes: Sizes) -> Iterator[None]:
    """Convert errors of code that depends on data into UserErrors in terms of the user's function."""
    try:
        yield
    except (WritesToLive, DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UserError(_of_data(error, optimizer, sizes)) from error
    except (TypeError, RuntimeError, IndexError) as error:
        is_guard = isinstance(error, GuardOnDataDependentSymNode)
        if (message := _of_data(error, optimizer, sizes) if is_guard else _of_text(error)) is None:
            raise
        raise UserError(message) from error


def _of_data(error: Any, optimizer: Optimizer | None, sizes: Sizes) -> str:
    """Return the message for one of torch's errors of code that depends on data."""
    if isinstance(error, WritesToLive):
        return (
            f"the traced function writes in place to a tensor that it closes over, by {error.func}{place(error.stack)}:"
            " a graph's inputs are not its own; return the new value from the function and write it back outside"
        )
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"the traced function makes a tensor whose shape depends on values ({error.func}{place(frames)}), which no "
            "trace has: take torch.where or a mask of fixed shape, or do it outside"
        )
    files = [frame.filename for frame in frames]
    if optimizer is not None and inspect.unwrap(type(optimizer).step).__code__.co_filename in files:
        return (
            f"{type(optimizer).__name__} branches on a number of its state, which no trace has; one that does not is "
            "fused: such as AdamW(fused=True, lr=torch.tensor(...))"
        )
    if inspect.getfile(torch.amp.GradScaler) in files:
        return (
            f"the traced function steps by a GradScaler{place(frames)}, which decides by a number whether to, and no "
            "trace has it: train in bfloat16, which needs no scaler, or return gradients and step outside"
        )
    if isinstance(error, GuardOnDataDependentSymNode) and isinstance(error.cond, sympy.Symbol):
        return (
            f"the traced function makes a plain number of a tensor's value, by float(), int() or torch.tensor()"
            f"{place(frames)}, which no trace has: keep it a tensor (torch.stack makes one of several), or compute it "
            "outside"
        )
    what = sizes.words(error.cond) if isinstance(error, GuardOnDataDependentSymNode) else "a number"
    return (
        f"the traced function reads a tensor's value or an unbacked size and decides by it ({what}{place(frames)}), "
        "which no trace has: keep it a tensor (torch.where), promise what holds by torch._check, or decide outside"
    )


def _of_text(error: Exception) -> str | None:
    """Return the message for an error that torch only describes in its text; None for any other error."""
    first, at = str(error).partition("\n")[0], place(traceback.extract_tb(error.__traceback__))
    if "Sharding propagation failed" in str(error) and isinstance(error.__cause__, GuardOnDataDependentSymNode):
        return (
            f"the traced function gives a DTensor's operator a number that it reads from a tensor{at}, and DTensor "
            "takes none that only a run knows: keep it a tensor (without .item())"
        )
    if "its data is not allocated yet" in first:
        return (
            f"the traced function copies numbers out of a tensor{at}, which no trace has: torch.stack([...]) makes one "
            "tensor of several, where torch.tensor([...]) reads them; make a kernel of your own one operator, by "
            "torch.library.custom_op and register_fake"
        )
    if refused := refused_region(error):
        operator, reason, stack = refused
        where = place(stack) or at
        return f"a function given to {operator} can't be a graph of its own{where}: {reason}; let it return new values"
    if "use_reentrant=True" in str(error):
        return (
            "the traced function calls torch.utils.checkpoint with use_reentrant=True, or without the argument, which "
            "only works with .backward(): pass use_reentrant=False"
        )
    if "leaf Variable that requires grad" in first:
        return (
            f"the traced function writes in place to a parameter, or another tensor that takes gradients{at}: compute a"
            " new tensor instead"
        )
    if "Cannot access data pointer" in first:
        return (
            f"the traced function takes the address of a tensor{at}, by data_ptr(), DLPack or a kernel called with it,"
            " and no trace has one: make what needs it one operator, by torch.library.custom_op and register_fake"
        )
    if "torch.storage." in first or "Not available for 'meta'" in first:
        return (
            f"the traced function reads or writes a tensor's storage{at}, which no trace has: use operators on the "
            "tensor, or make what needs it one operator, by torch.library.custom_op and register_fake"
        )
    if first.startswith("Cannot swap t"):
        return f"the traced function swaps tensors in place{at}, which a graph would not: swap the names instead"
    if ".numpy() is not supported" in first:
        return (
            f"the traced function makes a NumPy array of a tensor{at}, which holds numbers that no trace has: compute "
            "with torch, or outside"
        )
    if "unsupported format string passed to" in first:
        return f"the traced function formats a number that only a run knows{at}: return it, and format it outside"
    if "does not require grad and does not have a grad_fn" in first:
        around = "" if torch.is_grad_enabled() else "torch.no_grad() is around the trace: leave it; or "
        return (
            f"the traced function differentiates what depends on no tensor that takes gradients{at}: {around}set "
            "requires_grad_() before the trace"
        )
    if any(word in first for word in ("SymInt", "symbolic", "isIntList")):
        return (
            f"the traced function does with a dynamic size, or a number that it reads, what takes a plain number "
            f"only{at}: {first}; leave it out, or let the dimension be fixed"
        )
    return None


def refuse_unsupported(gm: GraphModule, may_write: Collection[tuple[str, str]]) -> None:
    """Raise a UserError for random operations, and for in-place writes to inputs other than those in `may_write`, by
    kind and name."""
    for nested in gm.modules():
        for node in nested.graph.nodes if isinstance(nested, GraphModule) else ():
            if _draws(node):
                raise UserError(
                    f"the traced function draws random numbers ({node.target}, in "
                    f"{meta.module(node) or 'the function itself'}{_line(node)}): a graph that recomputes or reorders "
                    "would draw others; draw outside and pass the numbers in"
                )
    root: dict[Node, tuple[str, str]] = {node: (slot.kind, slot.name) for slot, node in inputs_of(gm)}
    known: set[Node] = set()  # the function's own small tensors: reading one is a constant of the trace
    for node in gm.graph.nodes:
        inputs = node.all_input_nodes
        if node.target is torch.ops.aten.lift_fresh_copy.default or (inputs and known.issuperset(inputs)):
            known.add(node)
        elif any(is_write and x in known for x, is_write in aliased(node)) and _writes_to_many(node):
            # torch notices writes to one such tensor, whose data is unknown then, but not to a list.
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
                    "pass it from one to the other as a result and an argument"
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


def refuse_strides(gm: GraphModule, strides: list[tuple[int, ...]], error: RuntimeError) -> None:
    """Raise a UserError that names the argument whose strides differ from the traced, if a view in the graph failed on
    them."""
    for (slot, node), found in zip(inputs_of(gm), strides, strict=True):
        wanted, name = node.meta["val"].stride(), slot.name
        if not is_dynamic(slot.layout) and found != wanted:
            raise UserError(f"{name} has strides {found}, traced with {wanted}: make it so, or trace again") from error


def _writes_to_many(node: Node) -> bool:
    """Return whether an operator writes to the tensors of a list."""
    return isinstance(node.target, torch._ops.OpOverload) and any(
        a.alias_info is not None and a.alias_info.is_write and isinstance(a.type, torch.ListType)
        for a in node.target._schema.arguments
    )


def _line(node: Node) -> str:
    line = meta.source_line(node)
    return f", {line}" if line else ""


def _draws(node: Node) -> bool:
    """Return whether a node draws random numbers: of those tagged so, attention does not where its dropout is 0."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    if "dropout_p" not in names:
        return True
    i = names.index("dropout_p")
    return bool((node.args[i] if i < len(node.args) else node.kwargs.get("dropout_p", 0.0)) != 0.0)
