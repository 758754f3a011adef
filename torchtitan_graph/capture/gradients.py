"""Gradients and optimizers' steps that a graph would lose: refused by name, with live gradients restored."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchtitan_graph.capture.reached import Reached, reached, readable
from torchtitan_graph.errors import UserError, listed
from torchtitan_graph.graph.edit import aliased
from torchtitan_graph.graph.signature import layout_of
from torchtitan_graph.log import logger
from torchtitan_graph.torch_private.fake import FakeTensorMode

_CALL = "minimal_fx_tracer(step, module=model, optimizer=optimizer)"


@contextlib.contextmanager
def no_other_step(optimizer: Optimizer | None) -> Iterator[None]:
    """Raise a UserError for the step of any other optimizer while a function is traced, or for a step on live gradients
    alone."""
    groups = optimizer.param_groups if optimizer is not None else []
    has_live = any(p.grad is not None for group in groups for p in group["params"])

    def refuse(stepped: Optimizer, args: Any, kwargs: Any) -> None:
        if stepped is not optimizer:
            given = f"inside the {type(optimizer).__name__} that was passed" if optimizer else "which was not passed"
            raise UserError(
                f"the traced function takes a step of an optimizer ({type(stepped).__name__}), {given}: a graph would"
                f" lose it; write {_CALL}, of one optimizer with a group for each kind of parameter, or take the step"
                " outside"
            )
        is_alone = len(args) < 2 and not any(kwargs.values())  # a closure would compute gradients
        if is_alone and has_live and all(p.grad is None for group in stepped.param_groups for p in group["params"]):
            raise UserError(
                f"the traced function takes a step of {type(stepped).__name__}, and has computed no gradients: those "
                "that lie in .grad when it is called are not read. Call backward() in the function, before the step, "
                "or pass gradients in and assign them"
            )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def unchanged_gradients(held: Iterable[Reached], fake_mode: FakeTensorMode) -> Iterator[None]:
    """Restore the `.grad` of live tensors after the trace: those reachable from the function, its module and its
    optimizer, and those among operators' arguments in this mode."""
    before = {id(x): (x, x.grad) for _, x, _ in held if isinstance(x, Tensor) and x.is_leaf}
    try:
        yield
    finally:
        for x, gradient in (fake_mode.live | before).values():
            if x.is_leaf and x.grad is not gradient:
                x.grad = gradient
        fake_mode.live.clear()


def refuse_live(fn: Callable[..., Any], module: nn.Module | None, fake_mode: FakeTensorMode) -> None:
    """Raise a UserError for gradients in live tensors, and for parameters of the module that the function references
    directly."""
    live = fake_mode.live
    own = [name for name, p in module.named_parameters() if id(p) in live] if module is not None else []
    if own:
        raise UserError(
            f"the traced function reads {', '.join(own)} by a reference that was made outside of it, which would be a "
            "constant of the graph, and have no gradient: list parameters inside, as dict(model.named_parameters())"
        )
    reached = [x for x, gradient in live.values() if x.is_leaf and x.grad is not gradient]
    if reached:
        raise UserError(
            f"the traced function's backward reaches tensors that it closes over ({_names(fn, reached)}), where a "
            "graph leaves no gradient: pass the module that holds them as module="
        )


def left_gradients(traced: Mapping[tuple[str, str], Tensor]) -> dict[str, list[Tensor]]:
    """Return the `.grad` of a trace's leaves, as plain tensors by name."""
    held = {name: x.grad for (_, name), x in traced.items() if x.is_leaf and x.grad is not None}
    return {name: layout_of(g).flatten(g) for name, g in held.items()}


def refuse_lost(gm: GraphModule, left: Mapping[str, int]) -> bool:
    """Remove the gradients in `.grad` from a graph's results; raise a UserError for those that neither another result
    nor a write to an input depends on. `left` is the number of plain tensors of each, by name. Return whether the
    function computed one."""
    output = gm.graph.output_node()
    results: list[Node] = list(output.args[0])  # type: ignore[arg-type]
    num_left = sum(left.values())
    kept, gradients = results[: len(results) - num_left], iter(results[len(results) - num_left :])
    if not num_left:
        return False
    output.args = (kept,)
    needed = _needed(gm)
    parts = [(name, next(gradients)) for name, n in left.items() for _ in range(n)]
    computed = [(name, node) for name, node in parts if _is_computed(node)]
    lost = list(dict.fromkeys(name for name, node in computed if node not in needed))
    if lost:
        raise UserError(
            f"the traced function leaves gradients in .grad of {', '.join(lost)}, which no optimizer takes and no "
            f"result depends on: a graph would lose them. Write {_CALL} and step in it, or return gradients from the "
            "function (torch.autograd.grad); for what is not trained set requires_grad_(False)"
        )
    return bool(computed)


def _is_computed(gradient: Node) -> bool:
    return gradient.op != "placeholder" and gradient.target is not torch.ops.aten.zero_.default


def _needed(gm: GraphModule) -> set[Node]:
    """Return the nodes that a result, or a write to an input, depends on."""
    of_input = set(gm.graph.find_nodes(op="placeholder"))
    needed = {gm.graph.output_node()}
    for node in gm.graph.nodes:
        shared = [(source, is_write) for source, is_write in aliased(node) if source in of_input]
        if shared:
            of_input.add(node)
        if any(is_write for _, is_write in shared):
            needed.add(node)
    for node in reversed(gm.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return needed


def warn_of_constants(gm: GraphModule, fn: Callable[..., Any]) -> None:
    """Log a warning with the parameters among a trace's constants."""
    held = [getattr(gm, str(node.target)) for node in gm.graph.find_nodes(op="get_attr")]
    if found := [x for x in held if isinstance(x, nn.Parameter)]:
        logger.warning(
            f"parameters are constants of the trace ({_names(fn, found)}): where one is replaced by another, as by "
            "load_state_dict(assign=True), the graph goes on with the old one; pass the module that holds them as "
            "module="
        )


def _names(fn: Callable[..., Any], tensors: Iterable[Tensor]) -> str:
    """Return tensors' names in the function's closure or its modules; of others, their shape."""
    known: dict[int, str] = {}
    for name, x, _ in reached(fn):
        if isinstance(x, Tensor):
            known.setdefault(id(x), readable(name))
    return listed([*dict.fromkeys(known.get(id(x), f"one of shape {list(x.shape)}") for x in tensors)])
