"""Dynamic dimensions as a user declares them: by marks on tensors, and by names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.signature import layout_of
from torchtitan_graph.torch_private.sizes import dynamic_marks, export_dims
from torchtitan_graph.torch_private.tensors import is_traceable_wrapper_subclass

# By a tensor's name and a dimension: the dimension's name, see `Sizes`. A sequence lists all dimensions.
DynamicShapes = Mapping[str, Mapping[int, Any] | Sequence[Any]]

# The dimensions of a block mask's tensors, counted from the last, that count blocks of queries, and of keys.
_BLOCKS: dict[str, tuple[int | None, int | None]]
_BLOCKS = {"kv_num_blocks": (-1, None), "kv_indices": (-2, -1), "q_num_blocks": (None, -1), "q_indices": (-1, -2)}
_BLOCKS |= {f"full_{name}": dims for name, dims in _BLOCKS.items()}

SMALLEST = 2  # torch specializes sizes 0 and 1: a symbol is never one of them


class SizeError(UserError):
    """A function that is specialized on a dynamic size, or a call with a size outside the traced range."""


class Dimension(NamedTuple):
    """A dimension that may differ: `tensor.shape[dim]`, with its traced size; without `dim` a number.

    name       its name in `dynamic_shapes`, or the `shape_id` of a mark; None where there is none
    of         the name of the dimension that this one derives from, and the function of its size; None for its own
    unbacked   the trace may not use its size: so it may be 0 and 1
    required   it is an error if the function is specialized on one size
    low, high  declared bounds of its size, None where there is none
    """

    tensor: str
    dim: int | None
    size: int
    name: str | None = None
    of: tuple[str, Callable[[Any], Any]] | None = None
    unbacked: bool = False
    required: bool = True
    low: int | None = None
    high: int | None = None

    def __str__(self) -> str:
        return self.tensor if self.dim is None else f"{self.tensor}.shape[{self.dim}]"

    def in_call(self, leaves: Mapping[str, Any]) -> int:
        """Return its size in a call's arguments, by name."""
        return leaves[self.tensor] if self.dim is None else leaves[self.tensor].shape[self.dim]

    @property
    def root(self) -> str | None:
        """The name of the dimension that this one is, or derives from."""
        return self.of[0] if self.of else self.name

    def of_root(self, size: Any) -> Any:
        """Return this dimension's size, from the root's."""
        return self.of[1](size) if self.of else size

    def check(self, size: int, root: Dimension, its_size: int) -> None:
        """Raise a SizeError for a size that does not match the root's."""
        expected = self.of_root(its_size)
        if size != expected and self.of is None:
            raise SizeError(f"{root} is {its_size}, but {self} is {size}: both are {self.name}, and must be equal")
        if size != expected:
            raise SizeError(f"{self} is {size}, but {self.name} is {expected}, for {root} is {its_size}")


def marked(name: str, tensor: torch.Tensor) -> list[Dimension]:
    """Return the dimensions that are marked on a tensor."""
    marks = dynamic_marks(tensor)
    if is_traceable_wrapper_subclass(tensor) and any(map(dynamic_marks, (tensor, *layout_of(tensor).flatten(tensor)))):
        raise UserError(
            f"{name} is a {type(tensor).__name__} with a dynamic dimension, which is not supported: pass its plain "
            "tensor, or leave the mark out"
        )
    for mark in marks:
        if not 0 <= mark.dim < tensor.dim():
            raise UserError(f"{name}: dimension {mark.dim} is marked dynamic, and it has {tensor.dim()} dimensions")
        if mark.specialized:
            raise UserError(
                f"{name}.shape[{mark.dim}] is marked with specialize_on, but one graph serves all sizes: leave it out"
            )
    declared = [
        Dimension(name, m.dim, tensor.shape[m.dim], m.name, None, m.unbacked, m.required, m.low, m.high) for m in marks
    ]
    return [x for each in declared for x in _checked(each)]


def declared_by(leaves: Mapping[str, Any], shapes: DynamicShapes) -> list[Dimension]:
    """Return the dimensions that `dynamic_shapes` names."""
    tensors, found = {name: x for name, x in leaves.items() if isinstance(x, torch.Tensor)}, []
    if not isinstance(shapes, Mapping):
        raise UserError(
            f"dynamic_shapes is {shapes!r}: legal is a dict of tensors' names, as in {{{next(iter(tensors), 'x')!r}: "
            "{0: 'rows'}}"
        )
    for name, dims in shapes.items():
        if f"{name}.seq_lengths[0]" in leaves:
            found += _of_mask(name, leaves, dims)
            continue
        if name not in tensors:
            raise UserError(f"dynamic_shapes: {name} is not a tensor among the arguments: {', '.join(tensors)}")
        tensor = tensors[name]
        if is_traceable_wrapper_subclass(tensor):
            raise UserError(
                f"dynamic_shapes: {name} is a {type(tensor).__name__}, which is not supported there: pass its plain "
                "tensor, or leave it out"
            )
        if not isinstance(dims, Mapping | list | tuple | None):
            raise UserError(
                f"dynamic_shapes: {name} is {dims!r}: legal are a dict of its dimensions' names, and a list of names"
            )
        for i, what in dims.items() if isinstance(dims, Mapping) else enumerate(dims or ()):
            if type(i) is not int or not 0 <= i < tensor.dim():
                raise UserError(f"dynamic_shapes: {name} has no dimension {i!r}: 0 to {tensor.dim() - 1}")
            if i in (mark.dim for mark in dynamic_marks(tensor)):
                raise UserError(f"dynamic_shapes: {name}.shape[{i}] is marked on the tensor as well: do one of them")
            found += [x for declared in _named(Dimension(name, i, tensor.shape[i]), what) for x in _checked(declared)]
    return found


def _of_mask(name: str, leaves: Mapping[str, Any], dims: Any) -> list[Dimension]:
    """Return the dimensions that follow from a block mask's: its lengths, and the numbers of blocks in them.

    A trace must not depend on the number of blocks: a row that ends in the first block is not a special case.
    """
    found: list[Dimension] = []
    if not isinstance(dims, Mapping) or not dims.keys() <= {2, 3}:
        raise UserError(
            f"dynamic_shapes: {name} is {dims!r}: of a BlockMask legal are names of its queries and keys, as in "
            "{2: 'rows', 3: 'rows'}"
        )
    for dim, what in dims.items():
        i = dim - 2
        own, block = f"{name}.seq_lengths[{i}]", leaves[f"{name}.BLOCK_SIZE[{i}]"]
        for x in _named(Dimension(own, None, leaves[own]), what):
            if x.name is None or x.root is None:
                raise UserError(f"dynamic_shapes: dimension {dim} of {name} is {what!r}: give it another one's name")
            found.append(x._replace(of=(x.root, x.of_root)))
            in_blocks = partial(_in_blocks, x.of_root, block)
            for part, counted in _BLOCKS.items():
                tensor, last = leaves.get(f"{name}.{part}"), counted[i]
                if tensor is not None and last is not None:
                    at, words = tensor.dim() + last, f"{x.name} in blocks of {block}"
                    of = Dimension(f"{name}.{part}", at, tensor.shape[at], words, (x.root, in_blocks), unbacked=True)
                    found.append(of)
    return found


def _in_blocks(length: Callable[[Any], Any], block: int, root: Any) -> Any:
    return (length(root) + block - 1) // block


def _named(x: Dimension, what: Any) -> list[Dimension]:
    """Return a dimension as declared in `dynamic_shapes`; nothing for a static one."""
    derived, hint = export_dims()
    if what is None:
        return []
    if isinstance(what, str):
        return [x._replace(name=what)]
    if isinstance(what, derived):
        return [x._replace(name=what.__name__, of=(what.root.__name__, what.fn))]  # type: ignore[attr-defined]
    if isinstance(what, torch.export.Dim):
        low, high = (int(n) if str(n).isdigit() else None for n in (what.min, what.max))
        return [x._replace(name=what.__name__, low=low or None, high=high)]
    if isinstance(what, hint):
        kind = what.type.name  # type: ignore[attr-defined]
        return [] if kind == "STATIC" else [x._replace(required=kind == "DYNAMIC", low=what.min, high=what.max)]  # type: ignore[attr-defined]
    raise UserError(f"dynamic_shapes: {x} is {what!r}: legal are a name, a torch.export.Dim, and None")


def _checked(x: Dimension) -> list[Dimension]:
    """Return the dimension after checks of its size and bounds; nothing for an optional one whose size can't be
    dynamic."""
    if not x.unbacked and x.size < SMALLEST:
        if not x.required:
            return []
        raise UserError(
            f"{x} is to be dynamic, but is {x.size}: trace with {SMALLEST} or more, for one is another case"
        )
    if not x.unbacked and x.low is not None and x.low < SMALLEST:
        raise UserError(f"{x} is declared from {x.low} on: a trace holds for {SMALLEST} and more; declare that")
    if (x.low is not None and x.size < x.low) or (x.high is not None and x.size > x.high):
        low, high = ("any" if n is None else n for n in (x.low, x.high))
        raise UserError(f"{x} is {x.size}, outside the declared bounds, {low} to {high}")
    return [x]
