"""Trace a Python function, with the state it closes over, into one FX graph; run that graph on live state.

    traced = minimal_fx_tracer(step, module=model)(batch, num_tokens)
    step = run_traced(traced, module=model)
    loss, grads = step(batch, num_tokens)
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node
from torch.nn.attention.flex_attention import BlockMask

from torchtitan_graph.graph import meta
from torchtitan_graph.graph.signature import Layout, Plain, Signature, Slot, Wrapped, layout_of, signature_of
from torchtitan_graph.graph.torch_private import FakeTensorMode, reparametrize, trace_to_graph

_CONSTANT_TYPES = (int, float, bool, str, type(None))

if BlockMask not in pytree.SUPPORTED_NODES:
    # A mask is an input like any other: another batch's documents then run through the same graph.
    pytree.register_pytree_node(
        BlockMask, BlockMask._flatten, BlockMask._unflatten, flatten_with_keys_fn=BlockMask._flatten_with_keys
    )


@dataclasses.dataclass(frozen=True)
class TracedResult:
    """A traced function: its graph and the user's calling convention.

    gm          plain tensors in, a list of plain tensors out; `signature_of(gm)` describes both
    in_spec     pytree of (args, kwargs)
    constants   the leaves of (args, kwargs) that are no tensors, by position; a call with other values is refused
    out_spec    pytree of the result
    out_constants  the leaves of the result that are no tensors, by position
    """

    gm: GraphModule
    in_spec: pytree.TreeSpec
    constants: dict[int, Any]
    out_spec: pytree.TreeSpec
    out_constants: dict[int, Any]


def minimal_fx_tracer(
    fn: Callable[..., Any],
    module: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device: torch.device | str | None = None,
    stack_traces: bool = False,
) -> Callable[..., TracedResult]:
    """Give a callable that traces `fn(*args, **kwargs)` for the arguments it is called with.

    `fn` closes over `module` and `optimizer`. Their tensors become inputs of the graph, by name: parameters and
    buffers (a tied one once), and optimizer state, which the graph updates in place. What else `fn` closes over is a
    constant of the trace. The loss function too: changing it means tracing again.

    Args:
        device: what meta tensors are traced as (a model built on meta is traced before it is allocated).
        stack_traces: record the Python stack on each node; roughly doubles the time to trace.

    Raises:
        ValueError: an argument or a use of state that a graph can't hold, naming it and what to do instead.
    """
    if optimizer is not None and module is None:
        raise ValueError("minimal_fx_tracer got an optimizer without its module: pass module=, the one it optimizes")

    def trace(*args: Any, **kwargs: Any) -> TracedResult:
        state = _live_state(module, optimizer)
        paths, in_spec = pytree.tree_flatten_with_path((args, kwargs))
        leaves = [leaf for _, leaf in paths]
        names = [_argument_name(path, fn) for path, _ in paths]
        constants = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        for i, leaf in constants.items():
            _check_constant(names[i], leaf)

        values = [(kind, name, tensor) for (kind, name), tensor in state.items()]
        values += [("input", names[i], leaf) for i, leaf in enumerate(leaves) if i not in constants]
        slots = tuple(Slot(name, kind, layout_of(tensor)) for kind, name, tensor in values)
        plain = [t for slot, (_, _, tensor) in zip(slots, values, strict=True) for t in slot.layout.flatten(tensor)]
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        out: dict[str, Any] = {}

        def run(*flat: torch.Tensor) -> list[torch.Tensor]:
            traced = dict(zip([(s.kind, s.name) for s in slots], _unflatten(slots, flat, values), strict=True))
            full = [constants[i] if i in constants else traced["input", names[i]] for i in range(len(leaves))]
            user_args, user_kwargs = pytree.tree_unflatten(full, in_spec)
            with _swapped_state(module, optimizer, traced):
                result = fn(*user_args, **user_kwargs)
            out_paths, out["spec"] = pytree.tree_flatten_with_path(result)
            out["constants"] = {i: x for i, (_, x) in enumerate(out_paths) if not isinstance(x, torch.Tensor)}
            tensors = [(path, x.detach()) for path, x in out_paths if isinstance(x, torch.Tensor)]
            out["slots"] = tuple(Slot(pytree.keystr(path), "output", layout_of(x)) for path, x in tensors)
            return [t for slot, (_, x) in zip(out["slots"], tensors, strict=True) for t in slot.layout.flatten(x)]

        gm = trace_to_graph(run, _fake(plain, fake_mode, device), fake_mode, module, stack_traces)
        gm.meta["signature"] = Signature(slots, out["slots"])
        _name_placeholders(gm)
        meta.settle(gm)
        _refuse_unsupported(gm, may_write=("param", "optim") if optimizer is not None else ())
        return TracedResult(gm, in_spec, constants, out["spec"], out["constants"])

    return trace


def run_traced(
    traced: TracedResult,
    module: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Callable[..., Any]:
    """Give a callable with the traced function's own signature that runs the graph on the live state.

    State is matched by name and bound once; each call checks only that the modules still hold the bound tensors, and
    binds again if they don't. Runs under `no_grad`.

    Raises:
        ValueError: the state's names or layouts, or a call's arguments, differ from those traced; names the difference.
    """
    if optimizer is not None and module is None:
        raise ValueError("run_traced got an optimizer without its module: pass module=, the one it optimizes")
    gm, signature = traced.gm, signature_of(traced.gm)
    state_slots = tuple(s for s in signature.inputs if s.kind != "input")
    input_slots = tuple(s for s in signature.inputs if s.kind == "input")
    _check_names(state_slots, _live_state(module, optimizer))
    bound = _Bound(state_slots, module, optimizer)

    @torch.no_grad()
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, in_spec = pytree.tree_flatten((args, kwargs))
        if in_spec != traced.in_spec:
            raise ValueError(f"the call's arguments have the structure {in_spec}, the trace was made with {traced.in_spec}")
        for i, constant in traced.constants.items():
            if type(leaves[i]) is not type(constant) or leaves[i] != constant:
                raise ValueError(
                    f"argument leaf {i} is {leaves[i]!r}, the trace was made with {constant!r}: a value that is no tensor "
                    "is a constant of the trace; pass it as a tensor, or trace again"
                )
        tensors = [leaf for i, leaf in enumerate(leaves) if i not in traced.constants]
        flat = list(bound.tensors())
        for slot, tensor in zip(input_slots, tensors, strict=True):
            flat += _flatten(slot, tensor)
        values = gm(*flat)
        results: list[Any] = []
        position = 0
        for slot in signature.outputs:
            results.append(slot.layout.unflatten(values[position : position + slot.layout.num_tensors]))
            position += slot.layout.num_tensors
        for i, constant in traced.out_constants.items():  # ascending, so that each lands at its own place
            results.insert(i, constant)
        return pytree.tree_unflatten(results, traced.out_spec)

    return run


class _Bound:
    """The plain tensors of the live state, held between steps."""

    def __init__(self, slots: tuple[Slot, ...], module: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None):
        self.slots, self.module, self.optimizer = slots, module, optimizer
        self._bind()

    def _bind(self) -> None:
        state = _live_state(self.module, self.optimizer)
        self._tensors = [t for slot in self.slots for t in _flatten(slot, state[slot.kind, slot.name])]
        self._held = list(_places(self.module, self.optimizer))

    def tensors(self) -> list[torch.Tensor]:
        # A parameter that was replaced (load_state_dict(assign=True), a swap) would leave the graph stepping on a
        # tensor nobody holds. Identity in the owning dict is all that needs checking: no module is walked.
        if not all(place.get(key) is held for place, key, held in self._held):
            self._bind()
        return self._tensors


def _places(
    module: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[dict, Any, torch.Tensor]]:
    """Yield (dict, key, tensor) for every place that holds a tensor of the state, a DTensor's local one included."""
    for child in module.modules() if module is not None else ():
        for place in (child._parameters, child._buffers):
            for key, held in place.items():
                if held is not None:
                    yield place, key, held
                    if "_local_tensor" in held.__dict__:
                        yield held.__dict__, "_local_tensor", held.__dict__["_local_tensor"]
    for place in optimizer.state.values() if optimizer is not None else ():
        for key, held in place.items():
            if isinstance(held, torch.Tensor):
                yield place, key, held


def _live_state(
    module: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> dict[tuple[str, str], torch.Tensor]:
    """Give the state's tensors by (kind, name): tied ones once, optimizer state under its parameter's name."""
    if module is None:
        return {}
    state: dict[tuple[str, str], torch.Tensor] = {("param", name): p for name, p in module.named_parameters()}
    state |= {("buffer", name): b for name, b in module.named_buffers()}
    if optimizer is not None:
        names = {p: name for (kind, name), p in state.items() if kind == "param"}
        for g, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if p not in names:
                    raise ValueError(f"the optimizer holds a parameter of shape {list(p.shape)} that its module does not")
            owner = names[group["params"][0]]
            state |= {("optim", f"group of {owner}.{k}"): v for k, v in group.items() if isinstance(v, torch.Tensor)}
            if not any(optimizer.state.get(p) for p in group["params"]):
                raise ValueError(f"parameter group {g} of the optimizer has no state yet: take one step before tracing it")
        state |= {
            ("optim", f"{names[p]}.{key}"): value
            for p, values in optimizer.state.items()
            for key, value in values.items()
            if isinstance(value, torch.Tensor)
        }
    return state


def _swapped_state(module: Any, optimizer: Any, traced: dict[tuple[str, str], torch.Tensor]) -> Any:
    """Put the traced tensors in the places of the live ones while the function runs."""
    import contextlib

    @contextlib.contextmanager
    def swap() -> Iterator[None]:
        if module is None:
            yield
            return
        by_name = {name: t for (kind, name), t in traced.items() if kind in ("param", "buffer")}
        live = {p: name for name, p in module.named_parameters()}
        with contextlib.ExitStack() as stack:
            if optimizer is not None:
                stack.enter_context(_swapped_optimizer(optimizer, live, traced))
            stack.enter_context(reparametrize(module, by_name))
            yield
            held = dict(module.named_parameters()) | dict(module.named_buffers())
            rebound = sorted(name for name, t in by_name.items() if held.get(name) is not t)
            if rebound:
                raise ValueError(
                    f"the traced function assigns new tensors to {', '.join(rebound)}: a graph would lose the update "
                    "silently; return the new value from the function and write it back outside"
                )

    return swap()


def _swapped_optimizer(optimizer: torch.optim.Optimizer, live: dict, traced: dict) -> Any:
    import collections
    import contextlib

    @contextlib.contextmanager
    def swap() -> Iterator[None]:
        # `torch.optim._stateless` (2.13 on) swaps by position in the state dict; here names match, and 2.11 works too.
        old_state, old_groups = optimizer.state, [dict(group) for group in optimizer.param_groups]
        new_state: dict = collections.defaultdict(dict)
        for p, values in old_state.items():
            name = live[p]
            new_state[traced["param", name]] = {k: traced.get(("optim", f"{name}.{k}"), v) for k, v in values.items()}
        optimizer.state = new_state
        for group in optimizer.param_groups:
            owner = live[group["params"][0]]
            group["params"] = [traced["param", live[p]] for p in group["params"]]
            for key in group:
                group[key] = traced.get(("optim", f"group of {owner}.{key}"), group[key])
        try:
            yield
        finally:
            optimizer.state = old_state
            for group, old in zip(optimizer.param_groups, old_groups, strict=True):
                group.update(old)

    return swap()


def _unflatten(slots: tuple[Slot, ...], flat: tuple[torch.Tensor, ...], values: list) -> list[torch.Tensor]:
    """Build the traced leaves: subclasses rewrapped, each a leaf that requires grad as the live tensor does."""
    leaves, position = [], 0
    for slot, (_, _, live) in zip(slots, values, strict=True):
        leaf = slot.layout.unflatten(list(flat[position : position + slot.layout.num_tensors])).detach()
        leaves.append(leaf.requires_grad_() if live.requires_grad else leaf)
        position += slot.layout.num_tensors
    return leaves


def _fake(plain: list[torch.Tensor], fake_mode: FakeTensorMode, device: torch.device | str | None) -> list[torch.Tensor]:
    with fake_mode:
        return [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device if t.is_meta and device else t.device)
            for t in plain
        ]


def _argument_name(path: tuple, fn: Callable[..., Any]) -> str:
    """Name a leaf of (args, kwargs) as the function's author does: `batch.tokens_BL`, not `args[0].tokens_BL`."""
    kind, first, *rest = path
    if kind.idx == 1:
        return f"{first.key}{pytree.keystr(tuple(rest))}"
    parameters = list(inspect.signature(fn).parameters.values())
    named = first.idx < len(parameters) and parameters[first.idx].kind is not inspect.Parameter.VAR_POSITIONAL
    return (parameters[first.idx].name if named else f"args[{first.idx}]") + pytree.keystr(tuple(rest))


def _name_placeholders(gm: GraphModule) -> None:
    placeholders = iter(gm.graph.find_nodes(op="placeholder"))
    for slot in signature_of(gm).inputs:
        for _ in range(slot.layout.num_tensors):
            node = next(placeholders)
            stem = "".join(c if c.isalnum() else "_" for c in slot.name).strip("_")
            node._rename(stem)
            node.target = node.name
    gm.recompile()


def _check_constant(name: str, leaf: Any) -> None:
    if isinstance(leaf, torch.nn.Module):
        raise ValueError(f"{name} is an nn.Module: pass it as module=, so that its parameters become inputs of the graph")
    if not isinstance(leaf, _CONSTANT_TYPES):
        raise ValueError(
            f"{name} is a {type(leaf).__name__}; a traced function takes tensors and int, float, bool, str or None: "
            "capture it in the function's closure, or register its type with torch.utils._pytree "
            "(register_pytree_node if it holds tensors, register_constant if it does not)"
        )


def _flatten(slot: Slot, tensor: Any) -> list[torch.Tensor]:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{slot.name} is a {type(tensor).__name__}, traced as a tensor")
    try:
        return slot.layout.flatten(tensor)
    except ValueError as error:
        raise ValueError(f"{slot.name} {error}") from None


def _check_names(slots: tuple[Slot, ...], state: dict[tuple[str, str], torch.Tensor]) -> None:
    traced = {(slot.kind, slot.name) for slot in slots}
    missing = [f"{kind} {name}" for kind, name in sorted(traced - set(state))]
    unknown = [f"{kind} {name}" for kind, name in sorted(set(state) - traced)]
    if missing or unknown:
        raise ValueError(
            "the live state is not the traced one: "
            + "; ".join(
                f"{what} {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
                for what, names in (("missing", missing), ("not in the trace:", unknown))
                if names
            )
        )


def _refuse_unsupported(gm: GraphModule, may_write: tuple[str, ...]) -> None:
    """Refuse random operations, and in-place writes to inputs other than those kinds, naming them."""
    kind_of: dict[Node, Slot] = {}
    placeholders = iter(gm.graph.find_nodes(op="placeholder"))
    for slot in signature_of(gm).inputs:
        for _ in range(slot.layout.num_tensors):
            kind_of[next(placeholders)] = slot
    root: dict[Node, Node] = {node: node for node in kind_of}
    for node in gm.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if torch.Tag.nondeterministic_seeded in node.target.tags and _draws(node):
            raise ValueError(
                f"the traced function draws random numbers ({node.target}, in {meta.module(node) or 'the function itself'}): "
                "a graph that recomputes or reorders would draw others; draw outside and pass the numbers in"
            )
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            alias = argument.alias_info
            for source in [value] if isinstance(value, Node) else value if isinstance(value, (list, tuple)) else []:
                if alias is None or not isinstance(source, Node) or source not in root:
                    continue
                slot = kind_of[root[source]]
                if alias.is_write and slot.kind not in may_write:
                    raise ValueError(
                        f"the traced function writes in place to {slot.name} ({node.target}): a graph's inputs are not "
                        "its own; return the new value from the function and write it back outside"
                    )
                root.setdefault(node, root[source])


def _draws(node: Node) -> bool:
    """Tell whether an operator tagged as random really is: attention is, unless its dropout is 0."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in names:
        return True
    i = names.index("dropout_p")
    return (node.args[i] if i < len(node.args) else node.kwargs.get("dropout_p", 0.0)) != 0.0
