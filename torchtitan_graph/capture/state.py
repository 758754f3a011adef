"""The state that a traced function closes over: a module's parameters and buffers, an optimizer's tensors, by name."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchtitan_graph.capture.dynamic import place
from torchtitan_graph.errors import UserError, listed
from torchtitan_graph.graph.signature import Plain, Slot, TensorLayout, layout_of, unflatten_each
from torchtitan_graph.torch_private.tensors import data_assigned, mark_as_parameter
from torchtitan_graph.torch_private.tracing import FakeTensor, author_stack, reparametrize


def local_part(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor, itself unless it is a DTensor, each of whose operators takes longer."""
    return x.to_local() if isinstance(x, DTensor) else x


def live_state(module: nn.Module | None, optimizer: Optimizer | None) -> dict[tuple[str, str], Tensor]:
    """Return the state's tensors by (kind, name): tied ones once, optimizer state under its parameter's name."""
    if module is None:
        return {}
    state: dict[tuple[str, str], Tensor] = {("param", name): p for name, p in module.named_parameters()}
    state |= {("buffer", name): b for name, b in module.named_buffers()}
    if optimizer is not None:
        names = _parameter_names(module, optimizer)
        for group in optimizer.param_groups:
            owner = _group_name(group, names)
            state |= {("optim", f"{owner}.{key}"): x for key, x in group.items() if isinstance(x, Tensor)}
        for p, values in optimizer.state.items():
            for key, x in values.items():
                if isinstance(x, Tensor):
                    state["optim", f"{names[p]}.{key}"] = x
                elif x is not None:
                    raise UserError(f"the optimizer's {names[p]}.{key} = {x!r} is not a tensor, so no graph updates it")
    return state


def _parameter_names(module: nn.Module | None, optimizer: Optimizer) -> dict[Tensor, str]:
    names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()} if module is not None else {}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p not in names:
            raise UserError(f"the optimizer holds a parameter of shape {list(p.shape)} that its module does not")
    return names


def _group_name(group: dict[str, Any], names: dict[Tensor, str]) -> str:
    """Return a parameter group's name, by its members, whatever their order."""
    return f"group of {min((names[p] for p in group['params']), default='nothing')}"


def optimizer_options(module: nn.Module | None, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return the parameter groups' values that are no tensors, by name: constants of a trace. Members are listed by
    name."""
    if optimizer is None:
        return {}
    names = _parameter_names(module, optimizer)
    options: dict[str, Any] = {}
    for group in optimizer.param_groups:
        owner = _group_name(group, names)
        options |= {f"{owner}.{key}": x for key, x in _options_of(group)}
        options[f"{owner}.params"] = sorted(names[p] for p in group["params"])
    return options


def _options_of(group: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in group.items():
        if key not in ("params", "param_names") and not isinstance(value, Tensor):
            yield key, value


def modes_of(module: nn.Module | None) -> Iterator[tuple[Any, str, str, bool]]:
    """Yield (object, the attribute's name in the module, in the object, value) of the flags of modules and parameters
    that are constants of a trace."""
    for name, child in module.named_modules() if module is not None else ():
        yield child, f"{name}.training".lstrip("."), "training", child.training
    for name, p in module.named_parameters() if module is not None else ():
        yield p, f"{name}.requires_grad", "requires_grad", p.requires_grad


def classes_of(module: nn.Module | None) -> dict[str, str]:
    """Return the class of each module, by name, and its number of hooks, if any."""
    found = {}
    for name, child in module.named_modules() if module is not None else ():
        hooks = sum(len(held) for key, held in vars(child).items() if key in _HOOKS)
        of = f"{type(child).__module__}.{type(child).__qualname__}"
        found[name] = f"{of} with {hooks} hook{'s' * (hooks != 1)}" if hooks else of
    return found


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@contextlib.contextmanager
def swapped_state(
    module: nn.Module | None, optimizer: Optimizer | None, traced: dict[tuple[str, str], Tensor]
) -> Iterator[None]:
    """Replace the live tensors by the traced ones while the function runs. Those of parameters are parameters to
    `isinstance`, for the function may check it."""
    for (kind, _), t in traced.items():
        if kind == "param":
            mark_as_parameter(t)
    if module is None:
        yield
        return
    by_name = {name: t for (kind, name), t in traced.items() if kind in ("param", "buffer")}
    with _same_members(module), _swapped_optimizer(module, optimizer, traced), reparametrize(module, by_name):
        yield
        held = dict(module.named_parameters()) | dict(module.named_buffers())
        rebound = sorted(name for name in by_name.keys() | held.keys() if held.get(name) is not by_name.get(name))
        if rebound:
            raise UserError(
                f"the traced function assigns new tensors to {', '.join(rebound)}: a graph would lose the update "
                "silently; return the new value from the function and write it back outside"
            )


@contextlib.contextmanager
def _same_members(module: nn.Module) -> Iterator[None]:
    """Remove parameters, buffers and submodules that the function adds: they are tensors of the trace."""
    members: list[dict[str, Any]] = []
    for child in module.modules():
        members += [child._parameters, child._buffers, child._modules]
    before = [dict(place) for place in members]
    try:
        yield
    finally:
        for place, held in zip(members, before, strict=True):
            if place.keys() != held.keys() or any(place[key] is not x for key, x in held.items()):
                place.clear()
                place.update(held)


@contextlib.contextmanager
def _swapped_optimizer(
    module: nn.Module, optimizer: Optimizer | None, traced: dict[tuple[str, str], Tensor]
) -> Iterator[None]:
    # `torch.optim._stateless` (2.13 on) swaps by position in the state dict; here names match, and 2.11 works too.
    if optimizer is None:
        yield
        return
    live = _parameter_names(module, optimizer)
    old_state, groups = optimizer.state, [(group, dict(group)) for group in optimizer.param_groups]
    new_state: dict = collections.defaultdict(dict)
    for p, values in old_state.items():
        name = live[p]
        new_state[traced["param", name]] = {k: traced.get(("optim", f"{name}.{k}"), v) for k, v in values.items()}
    before = {p: dict(values) for p, values in new_state.items()}
    optimizer.state = new_state  # type: ignore[assignment]
    for group, old in groups:
        owner = _group_name(group, live)
        group["params"] = [traced["param", live[p]] for p in group["params"]]
        for key in old:
            group[key] = traced.get(("optim", f"{owner}.{key}"), group[key])
    swapped = [dict(group) for group, _ in groups]
    try:
        yield
        for p, values in new_state.items():
            new = [key for key, x in values.items() if x is not before.get(p, {}).get(key)]
            if new:
                raise UserError(
                    f"the traced function makes the optimizer's state ({', '.join(new)}): a graph can't keep it; take "
                    "one step before tracing, so that it exists, and let the optimizer update it in place"
                )
    finally:
        optimizer.state = old_state
        for (group, old), there in zip(groups, swapped, strict=True):
            # Values that the function set instead are left for `no_effects` to find.
            group.update({key: x for key, x in old.items() if group.get(key) is there[key]})


@contextlib.contextmanager
def unassigned_data(traced: Mapping[tuple[str, str], Tensor]) -> Iterator[None]:
    """Raise a UserError for `x.data = y`, for which a graph would keep the old values, and for state that is frozen or
    unfrozen inside."""
    names = {id(x): name for (_, name), x in traced.items()}

    def refuse(x: Tensor) -> NoReturn:
        what = "compute a new tensor instead, in a torch.autograd.Function if gradients are to pass as if unchanged"
        if id(x) in names:
            what = "return the new value from the function and write it back outside"
        raise UserError(
            f"the traced function assigns the data of {names.get(id(x), 'a tensor')}{place(author_stack())}: a graph "
            f"would keep the old values silently; {what}"
        )

    took_gradients = {name: (x, x.requires_grad) for (kind, name), x in traced.items() if kind in ("param", "buffer")}
    with data_assigned(refuse):
        yield
    if changed := [name for name, (x, took) in took_gradients.items() if x.is_leaf and x.requires_grad is not took]:
        raise UserError(
            f"the traced function changes requires_grad of {', '.join(changed)}, which a graph would not do when it is"
            " called: set it before the trace"
        )


def new_leaves(live: Iterable[Tensor], layouts: Sequence[TensorLayout], flat: Iterable[Tensor]) -> list[Tensor]:
    """Return plain tensors, wrapped as the live ones are, as leaves that require gradients where those do, in their
    dtype."""
    # A wrapper that was just made is a tensor of its own already.
    made = zip(layouts, unflatten_each(layouts, flat), strict=True)
    leaves = [x.detach() if isinstance(layout, Plain) else x for layout, x in made]
    for x, leaf in zip(live, leaves, strict=True):
        if x.requires_grad:
            leaf.requires_grad_()
            if x.is_leaf:
                leaf.grad_dtype = x.grad_dtype
    return leaves


def is_traced(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and any(isinstance(t, FakeTensor) for t in layout_of(leaf).flatten(leaf))


class BoundState:
    """The plain tensors of the live state, kept between steps.

    Raises:
        UserError: names, layouts or the optimizer's options differ from those traced; names the difference.
    """

    def __init__(
        self,
        slots: tuple[Slot, ...],
        traced_options: dict[str, Any],
        traced_modes: dict[str, bool],
        traced_classes: dict[str, str],
        module: nn.Module | None,
        optimizer: Optimizer | None,
    ):
        self._slots, self._module, self._optimizer = slots, module, optimizer
        self._traced_options, self._traced_modes = traced_options, traced_modes
        self._traced_classes = traced_classes
        self._bind()

    def tensors(self) -> list[Tensor]:
        # A parameter that was replaced (load_state_dict(assign=True), a swap) would leave the graph stepping on a
        # tensor without an owner. Identity in the owner is all that needs checking: no module is walked.
        if not (
            all(place.get(key) is held for place, key, held in self._places)
            and all(t._local_tensor is held for t, held in self._locals)
            and all(group.get(key) == value for group, key, value in self._options)
            and all(getattr(owner, attribute) is value for owner, _, attribute, value in self._modes)
            and all(t.dtype is dtype for t, dtype in self._dtypes)  # `module.to` changes it in place
        ):
            self._bind()
        return self._tensors

    def _bind(self) -> None:
        options = optimizer_options(self._module, self._optimizer)
        for name in sorted(options.keys() | self._traced_options.keys()):
            found, traced = options.get(name, "missing"), self._traced_options.get(name, "missing")
            if found != traced:
                what = "keep it"
                if name.endswith(".lr") and self._optimizer is not None and "fused" in self._optimizer.defaults:
                    what = f"{type(self._optimizer).__name__}(fused=True, lr=torch.tensor(...)) takes it as a tensor"
                raise UserError(
                    f"the optimizer's {name} is {found!r}, traced with {traced!r}: all but tensors are constants of "
                    f"the trace; {what}, or trace again"
                )
        state = live_state(self._module, self._optimizer)
        _check_names(self._slots, state)
        modes = list(modes_of(self._module))
        for _, name, _, value in modes:
            if self._traced_modes.get(name, value) is not value:
                raise UserError(f"{name} is {value}, traced with {not value}: set it back, or trace again")
        found = classes_of(self._module)
        # A graph that was read from a file has none.
        for name in sorted(found.keys() | self._traced_classes.keys()) if self._traced_classes else ():
            is_now, was = (f"a {x[name]}" if name in x else "missing" for x in (found, self._traced_classes))
            if is_now != was:
                raise UserError(
                    f"{name or 'the module'} is {is_now}, traced as {was}: what a module computes is in the graph; set "
                    "it back, or trace again"
                )
        self._tensors = [t for slot in self._slots for t in flatten(slot, state[slot.kind, slot.name])]
        self._dtypes = [(t, t.dtype) for t in self._tensors]
        self._modes = modes  # after all checks, else the next call would find no change
        self._places = list(_places(self._module, self._optimizer))
        self._locals = [(t, t._local_tensor) for _, _, t in self._places if isinstance(t, DTensor)]
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        self._options = [(group, key, value) for group in groups for key, value in _options_of(group)]


def _places(module: nn.Module | None, optimizer: Optimizer | None) -> Iterator[tuple[dict, Any, Any]]:
    """Yield (dict, key, object) for every dictionary entry that is a tensor of the state, or the owner of one."""
    for child in module.modules() if module is not None else ():
        for held_in in (child._parameters, child._buffers, child._modules):
            yield from ((held_in, key, held) for key, held in held_in.items() if held is not None)
    if optimizer is not None:
        yield from ((vars(optimizer), key, vars(optimizer)[key]) for key in ("state", "param_groups"))
        for held_in in (*optimizer.state.values(), *optimizer.param_groups):
            yield from ((held_in, key, held) for key, held in held_in.items() if isinstance(held, Tensor))


def flatten(slot: Slot, tensor: Any) -> list[Tensor]:
    """Return the plain tensors of a slot's live value, checked against the slot."""
    if not isinstance(tensor, Tensor):
        raise UserError(f"{slot.name} is a {type(tensor).__name__}, traced as a tensor")
    try:
        return slot.layout.flatten(tensor)
    except UserError as error:
        raise UserError(f"{slot.name} {error}") from None


def _check_names(slots: tuple[Slot, ...], state: dict[tuple[str, str], Tensor]) -> None:
    traced = {(slot.kind, slot.name) for slot in slots}
    differing = (("missing", traced - state.keys()), ("not in the trace:", state.keys() - traced))
    said = [f"{what} {listed([' '.join(each) for each in sorted(names)])}" for what, names in differing if names]
    if said:
        raise UserError(f"the live state is not the traced one: {'; '.join(said)}")


def sharing_memory(results: Mapping[str, Tensor], others: Iterable[Tensor]) -> set[str]:
    """Return the names of results that can't be written to in place: they share memory with another tensor, or are
    expanded.

    Of two results that share memory, the second is named. Disjoint parts of one buffer share none.
    """
    held = [("", t) for x in others for t in layout_of(x).flatten(x)]
    spans = []
    for name, t in held + [(name, t) for name, x in results.items() for t in layout_of(x).flatten(x)]:
        reach = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        if t.numel():
            spans.append((t.data_ptr(), bool(name), t.data_ptr() + (reach + 1) * t.element_size(), name, t))
    shared, end = set(), 0
    for begin, is_result, own_end, name, t in sorted(spans, key=lambda span: span[:2]):
        is_repeated = any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True))
        if is_result and (begin < end or is_repeated):
            shared.add(name)
        end = max(end, own_end)
    return shared
