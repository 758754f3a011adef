"""A graph's inputs and outputs: per value its name, kind and layout. The graph carries them; passes edit them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node

from torchtitan_graph.errors import UserError
from torchtitan_graph.torch_private.tensors import is_traceable_wrapper_subclass


class TensorLayout(Protocol):
    """How one logical value (perhaps a tensor subclass) is made of plain tensors."""

    @property
    def num_tensors(self) -> int: ...

    def flatten(self, value: Any) -> list[torch.Tensor]:
        """Return the plain tensors of `value`; raise UserError if it has another layout."""
        ...

    def unflatten(self, tensors: list[torch.Tensor]) -> Any:
        """Return the logical value."""
        ...


@dataclasses.dataclass(frozen=True)
class Plain:
    """A plain tensor; a size that may differ from call to call is an expression of symbols, as text."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    num_tensors = 1

    def flatten(self, value: Any) -> list[torch.Tensor]:
        if is_traceable_wrapper_subclass(value):
            raise UserError(f"is a {type(value).__name__}, traced as a plain tensor")
        found = tuple(value.shape)
        fits = len(found) == len(self.shape) and all(
            size == own for size, own in zip(found, self.shape, strict=True) if not isinstance(own, str)
        )
        if not fits or value.dtype != self.dtype:
            traced = ", ".join("any" if isinstance(size, str) else str(size) for size in self.shape)
            raise UserError(f"has shape {list(found)} and {value.dtype}, traced with [{traced}] and {self.dtype}")
        return [value]

    def unflatten(self, tensors: list[torch.Tensor]) -> Any:
        return tensors[0]

    def __str__(self) -> str:
        return f"[{', '.join(str(size) for size in self.shape)}]"


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """A traceable tensor subclass (DTensor, or one nested in another): its class, its inner values, its context."""

    cls: type
    inner: tuple[tuple[str, TensorLayout], ...]  # attribute -> layout of the tensor it holds
    constants: tuple[tuple[str, Any], ...]  # attribute -> a value that is not a tensor (a DTensor's mesh)
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    @property
    def num_tensors(self) -> int:
        return sum(layout.num_tensors for _, layout in self.inner)

    def flatten(self, value: Any) -> list[torch.Tensor]:
        found = layout_of(value)
        if found != self:
            raise UserError(f"is laid out as {found}, traced as {self}")
        return [t for attr, layout in self.inner for t in layout.flatten(getattr(value, attr))]

    def unflatten(self, tensors: list[torch.Tensor]) -> Any:
        values = unflatten_each([layout for _, layout in self.inner], tensors)
        inner = dict(self.constants) | dict(zip((attr for attr, _ in self.inner), values, strict=True))
        return self.cls.__tensor_unflatten__(inner, self.context, self.size, self.stride)  # type: ignore[attr-defined]

    def __str__(self) -> str:
        inner = ", ".join(f"{attr}: {layout}" for attr, layout in self.inner)
        return f"{self.cls.__name__}{list(self.size)} of ({inner}) with {self.context}"


def _size(size: Any) -> int | str:
    if isinstance(size, int):
        return size
    number: int | None = size.node.maybe_as_int()
    return str(size) if number is None else number


def layout_of(value: torch.Tensor) -> Plain | Wrapped:
    """Return the layout of `value` in plain tensors, nested subclasses included."""
    if not is_traceable_wrapper_subclass(value):
        return Plain(tuple(map(_size, value.shape)), value.dtype)
    attrs, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    held = [(attr, getattr(value, attr)) for attr in attrs]
    return Wrapped(
        cls=type(value),
        inner=tuple((attr, layout_of(x)) for attr, x in held if isinstance(x, torch.Tensor)),
        constants=tuple((attr, x) for attr, x in held if not isinstance(x, torch.Tensor)),
        context=context,
        size=value.size(),
        stride=value.stride(),
    )


def unflatten_each(layouts: Iterable[TensorLayout], tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Return the logical values that plain tensors make up, one after the other."""
    given = iter(tensors)
    return [layout.unflatten([next(given) for _ in range(layout.num_tensors)]) for layout in layouts]


def is_dynamic(layout: TensorLayout) -> bool:
    """Return whether a size may differ from call to call."""
    return isinstance(layout, Plain) and any(isinstance(size, str) for size in layout.shape)


@dataclasses.dataclass(frozen=True)
class Slot:
    """One logical input or output of a graph; it spans `layout.num_tensors` placeholders or output values.

    `kind` is "param", "buffer", "optim" or "input" for inputs, and "output", "loss", "grad" or "state" for outputs.
    """

    name: str
    kind: str
    layout: TensorLayout


@dataclasses.dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a graph, in the order of its placeholders and output values."""

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]


def signature_of(gm: GraphModule) -> Signature:
    """Return a traced graph's inputs and outputs.

    Raises:
        UserError: `gm` is not a traced graph.
    """
    if not isinstance(gm, GraphModule) or "signature" not in gm.meta:
        raise UserError(f"a {type(gm).__name__} has no signature: write signature_of(traced.gm) of a traced graph")
    return gm.meta["signature"]


def inputs_of(gm: GraphModule) -> list[tuple[Slot, Node]]:
    """Return each placeholder with the slot that it is a plain tensor of."""
    slots = (slot for slot in signature_of(gm).inputs for _ in range(slot.layout.num_tensors))
    return list(zip(slots, gm.graph.find_nodes(op="placeholder"), strict=False))  # a pass may be adding some


def outputs_of(gm: GraphModule) -> list[tuple[Slot, Any]]:
    """Return each of the graph's output values, a node or None, with the slot that it is a plain tensor of."""
    slots = (slot for slot in signature_of(gm).outputs for _ in range(slot.layout.num_tensors))
    return list(zip(slots, gm.graph.output_node().args[0], strict=False))  # type: ignore[arg-type]


def input_nodes(gm: GraphModule, kind: str) -> dict[str, Node]:
    """Return the placeholder of each input of that kind by name; each must be a single plain tensor in the graph."""
    return _single_tensors(inputs_of(gm), kind)


def output_nodes(gm: GraphModule, kind: str) -> dict[str, Node]:
    """Return the node that feeds each output of that kind by name; each must be a single plain tensor in the graph."""
    return _single_tensors(outputs_of(gm), kind)


def _single_tensors(pairs: Sequence[tuple[Slot, Node]], kind: str) -> dict[str, Node]:
    found = [(slot, node) for slot, node in pairs if slot.kind == kind]
    assert all(slot.layout.num_tensors == 1 for slot, _ in found), f"a {kind} is several tensors in the graph"
    return {slot.name: node for slot, node in found}


def set_outputs(gm: GraphModule, kind: str, nodes: dict[str, Node]) -> None:
    """Replace the nodes of the named outputs of that kind."""
    values = [nodes.get(slot.name, node) if slot.kind == kind else node for slot, node in outputs_of(gm)]
    gm.graph.output_node().args = (values,)


def set_layouts(gm: GraphModule, kinds: tuple[str, ...], layouts: Mapping[str, TensorLayout]) -> None:
    """Replace the layouts of the inputs and outputs of those kinds, by name: the second half of an edit of their
    nodes."""

    def changed(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
        return tuple(dataclasses.replace(s, layout=layouts[s.name]) if s.kind in kinds else s for s in slots)

    old = signature_of(gm)
    gm.meta["signature"] = Signature(changed(old.inputs), changed(old.outputs))
