"""Dimensions that may differ from call to call, and numbers that a traced function reads from tensors.

Note [Dynamic dimensions]
What is marked (`torch._dynamo.mark_dynamic`, `mark_unbacked`, `maybe_mark_dynamic`, or `dynamic_shapes` of the tracer)
is a symbol to the trace: sizes that derive from it (`2 * s`) are computed by the graph when it runs. What the traced
function compares it to holds for the sizes that it was traced with. Each such comparison is kept, and each call's sizes
are checked against it. A dimension that the function takes for one number can't be dynamic: that is an error.

A number that is read from a tensor (`.item()`) is a symbol too, without a value: the function may compute with it, and
with `torch._check` take sizes of it, but not branch on it. The graph checks it when it runs.

In a training step a node's value, in its `meta`, has the sizes that it was traced with, and passes reckon with these. A
pass that gives a size of the batch to an operator takes it from a node, never from a value.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sympy
import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import erase_dead
from torchtitan_graph.graph.signature import Layout, Plain, layout_of, signature_of
from torchtitan_graph.graph.torch_private import (
    FakeTensorMode,
    add_runtime_checks,
    compute,
    dynamic_marks,
    export_dims,
    hint,
    is_symbolic,
    is_traceable_wrapper_subclass,
    new_symbol,
    require,
)

# Of a tensor's name and a dimension, what that is called: see `Sizes`. A sequence has all dimensions.
DynamicShapes = Mapping[str, Mapping[int, Any] | Sequence[Any]]

_SMALLEST = 2  # torch takes sizes 0 and 1 for other cases: a symbol is never one of them


class Dimension(NamedTuple):
    """A dimension that may differ: `tensor.shape[dim]`, as it is when it is traced.

    name       what `dynamic_shapes` calls it, None where it is marked on the tensor
    of         another dimension's name and the function of it that this one is, None for one of its own
    unbacked   the trace may not use its size
    required   it is an error if the function takes it for one number
    low, high  the sizes that are declared, None where nothing is
    """

    tensor: str
    dim: int
    size: int
    name: str | None = None
    of: tuple[str, Callable[[Any], Any]] | None = None
    unbacked: bool = False
    required: bool = True
    low: int | None = None
    high: int | None = None

    def __str__(self) -> str:
        return f"{self.tensor}.shape[{self.dim}]"


class Condition(NamedTuple):
    """What the sizes of a call have to fulfil, and where the traced function needs it."""

    expression: sympy.Basic
    where: str


class SizeError(UserError):
    """A function that is not for the sizes that it is to be traced for, or a call whose sizes are not among those."""


class _Found(list[Any]):
    """What a trace compared symbols to, and where the traced function did."""

    def __init__(self) -> None:
        super().__init__()
        self.where: list[str] = []

    def append(self, guard: Any) -> None:
        super().append(guard)
        self.where.append(place(traceback.extract_stack()))


class _FoundOf(dict[Any, _Found]):
    """What was promised of a number that only a run knows, by the number's symbol."""

    def setdefault(self, symbol: sympy.Symbol, _: list) -> _Found:  # type: ignore[override]
        return super().setdefault(symbol, _Found())


class Sizes:
    """The symbols of a trace; afterwards, what a call's sizes are checked against.

    Args:
        tensors: the arguments that are tensors, by name.
        dynamic_shapes: of such a name and a dimension, what it is called: dimensions of one name are equal. A
            `torch.export.Dim` has bounds as well, and may derive from another (`2 * n`).
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], dynamic_shapes: DynamicShapes | None = None) -> None:
        self.dimensions = [x for name, tensor in tensors.items() for x in _marked(name, tensor)]
        self.dimensions += _declared(tensors, dynamic_shapes or {})
        self.env = ShapeEnv()
        self.env.guards = self._found = _Found()
        self._promised = _FoundOf()
        self.env.deferred_runtime_asserts = self._promised  # type: ignore[assignment]
        self._symbols = [new_symbol(self.env, str(x), x.size, x.unbacked) for x in self.dimensions]
        self._at = {(x.tensor, x.dim): size for x, size in zip(self.dimensions, self._symbols, strict=True)}
        first = {x.name: str(x) for x in reversed(self.dimensions) if x.name is not None}  # of those that are equal
        self._names = {
            size.node.expr: first.get(x.name, str(x)) for x, size in zip(self.dimensions, self._symbols, strict=True)
        }
        self._conditions: list[Condition] = []
        self._seen: set[tuple[int, ...]] = set()
        self._relate()

    def layout(self, name: str, tensor: torch.Tensor) -> Layout:
        """Give an argument's layout, with the symbols' names where its sizes may differ."""
        layout = layout_of(tensor)
        if not isinstance(layout, Plain):
            return layout
        sizes = [self._at.get((name, i), size) for i, size in enumerate(tensor.shape)]
        return Plain(tuple(x if isinstance(x, int) else str(x) for x in sizes), layout.dtype)

    def strided(self, name: str, tensor: torch.Tensor) -> tuple[list[Any], list[Any]]:
        """Give an argument's sizes and strides, symbols where they may differ.

        A stride is a symbol where it is what the dimensions inside it take.
        """
        shape = [self._at.get((name, i), size) for i, size in enumerate(tensor.shape)]
        stride: list[Any] = list(tensor.stride())
        inside, symbolic = 1, 1
        for i in sorted(range(tensor.dim()), key=lambda i: (tensor.stride(i), -i)):
            if tensor.stride(i) == inside:
                stride[i] = symbolic
                inside, symbolic = inside * tensor.shape[i], symbolic * shape[i]
        return shape, stride

    def settle(self, gm: GraphModule) -> None:
        """Keep what the trace found about the symbols, and let the graph check the numbers that it reads.

        Raises:
            UserError: the function takes a dynamic dimension for one number, needs sizes that its bounds don't keep,
                or a relation that is not declared.
        """
        found = [self._found, *self._promised.values()]  # what is promised of an unbacked size no guard says
        self._conditions = [Condition(g.expr, where) for of in found for g, where in zip(of, of.where, strict=True)]
        for x, symbol in zip(self.dimensions, self._names, strict=True):
            self._check_traced(x, symbol)
        add_runtime_checks(gm, self.env)
        self.env.freeze()
        self._take_sizes_of_inputs(gm)

    def _take_sizes_of_inputs(self, gm: GraphModule) -> None:
        """Let the graph compute each size once, at its beginning, of its inputs' sizes.

            n = sym_stride(x, 0); a = view(x, [n]); m = sym_size(a, 0); b = ones(m)
            s = sym_size(x, 1); a = view(x, [s]); b = ones(s)

        The tracer takes a size where it finds it: of a stride, which a call may have otherwise, or of an activation,
        which would then be held, or computed again, for its size.
        """
        roots: dict[Any, tuple[Node, Dimension, Any]] = {}
        nodes = dict(_inputs(gm))
        for x, symbol, size in zip(self.dimensions, self._names, self._symbols, strict=True):
            root = self.env.replace(symbol)
            if root.is_Symbol and not x.unbacked:
                roots.setdefault(root, (nodes[x.tensor], x, size))
        found: dict[Any, list[Node]] = {}
        for node in gm.graph.nodes:
            if node.op == "call_function" and is_symbolic(val := node.meta.get("val")):
                expression = self.env.replace(val.node.expr)
                if expression.free_symbols and expression.free_symbols <= roots.keys():
                    found.setdefault(expression, []).append(node)
        before = next(node for node in gm.graph.nodes if node.op != "placeholder")
        of_inputs: dict[Any, Node] = {}
        with gm.graph.inserting_before(before):
            for root in dict.fromkeys(s for expression in found for s in sorted(expression.free_symbols, key=str)):
                node, x, size = roots[root]
                of_inputs[root] = gm.graph.call_function(torch.ops.aten.sym_size.int, (node, x.dim))
                of_inputs[root].meta["val"] = size
            sizes = {each: compute(gm.graph, each, of_inputs) for each in found}
        for expression, replaced in found.items():
            for node in replaced:
                node.replace_all_uses_with(sizes[expression])
        order = {node: i for i, node in enumerate(gm.graph.nodes)}
        taken = {node for replaced in found.values() for node in replaced} | {*sizes.values(), *of_inputs.values()}
        erase_dead(gm.graph, sorted(taken, key=order.__getitem__, reverse=True))
        gm.recompile()

    def returned(self, leaf: Any) -> Any:
        """Give what stands for a leaf of the traced function's result: for a size, its expression of a call's sizes."""
        if not isinstance(leaf, torch.SymInt):
            return leaf
        found = leaf.node.expr
        if found.free_symbols <= self._names.keys():
            return found
        raise UserError(f"the result holds {found}, a number that only a run knows: return its tensor")

    def check(self, tensors: Mapping[str, torch.Tensor]) -> dict[sympy.Symbol, sympy.Integer]:
        """Give a call's sizes by symbol, for which the trace holds.

        Raises:
            UserError: it does not; names the relation.
        """
        return self._check(tuple(tensors[x.tensor].shape[x.dim] for x in self.dimensions))

    def check_named(self, sizes: Mapping[str, int]) -> None:
        """Check sizes of a call by the names of dimensions, all of which have one."""
        self._check(tuple(x.of[1](sizes[x.of[0]]) if x.of else sizes[x.name or ""] for x in self.dimensions))

    def _check(self, sizes: tuple[int, ...]) -> dict[sympy.Symbol, sympy.Integer]:
        given = {symbol: sympy.Integer(n) for symbol, n in zip(self._names, sizes, strict=True)}
        if sizes in self._seen:
            return given
        for x, size in zip(self.dimensions, sizes, strict=True):
            low = x.low if x.low is not None else 0 if x.unbacked else _SMALLEST
            if size < low or (x.high is not None and size > x.high):
                legal = f"{low} and more" if x.high is None else f"{low} to {x.high}"
                raise SizeError(f"{x} is {size}: the trace holds for {legal}; trace again for this size")
        for expression, where in self._conditions:
            if expression.free_symbols <= given.keys() and expression.xreplace(given) == sympy.false:
                found = ", ".join(f"{self._names[s]} is {given[s]}" for s in sorted(expression.free_symbols, key=str))
                raise SizeError(
                    f"{found}: the trace holds where {self._words(expression)}{where}; keep to that, or trace again"
                )
        self._seen.add(sizes)
        return given

    def what_is_unknown(self, gm: GraphModule) -> str | None:
        """Say of which number the trace has no value, if there is one."""
        if unbacked := next((x for x in self.dimensions if x.unbacked), None):
            return f"{unbacked} is unbacked"
        node = next((n for n in gm.graph.nodes if n.target is torch.ops.aten._local_scalar_dense.default), None)
        return node and f"{meta.module(node) or 'the traced function'} reads a tensor's value ({node.target})"

    def failed(self, error: RuntimeError) -> UserError | None:
        """Say in words which check of a number that the graph reads has failed, if that is the error."""
        for symbol, checks in self._promised.items():
            for check, where in zip(checks, checks.where, strict=True):
                if f"expression {check.expr} on node" in str(error):
                    what = self._names.get(symbol, "a number that it reads from a tensor")
                    return UserError(
                        f"the traced function needs {self._words(check.expr)}{where}, where "
                        f"{symbol} is {what}; that is not so in this call"
                    )
        return None

    def _relate(self) -> None:
        """Make dimensions of one name equal, and those that derive from another what they are of it."""
        first: dict[str, tuple[Dimension, Any]] = {}
        for x, size in zip(self.dimensions, self._symbols, strict=True):
            if x.name is not None and x.of is None:
                first.setdefault(x.name, (x, size))
        for x, size in zip(self.dimensions, self._symbols, strict=True):
            if x.name is None:
                continue
            root = x.of[0] if x.of else x.name
            if root not in first:
                raise UserError(f"dynamic_shapes: {x} is {x.name}, but no dimension is {root}: name that one as well")
            other, its_size = first[root]
            expected, wanted = (x.of[1](n) if x.of else n for n in (other.size, its_size))
            if x.size != expected:
                raise UserError(f"dynamic_shapes: {x} is {x.size}, but {x.name} is {expected}, as {other}'s size is")
            if other is not x:
                require(size == wanted)

    def _check_traced(self, x: Dimension, symbol: sympy.Symbol) -> None:
        found = self.env.replace(symbol)
        if found.is_number and x.required:
            pins = (c.where for c in self._conditions if isinstance(c[0], sympy.Eq) and len(c[0].free_symbols) == 1)
            raise SizeError(
                f"{x} is to be dynamic, but the traced function takes it for {found}{next(pins, '')}: let it not "
                "depend on that number, or leave the dimension out"
            )
        sources = [y for y, s in zip(self.dimensions, self._names, strict=True) if s in found.free_symbols]
        others = {y.of[0] if y.of else y.name for y in sources}
        if x.of is None and x.name is not None and others - {x.name}:
            where = next((c.where for c in self._conditions if symbol in c.expression.free_symbols), "")
            raise SizeError(
                f"dynamic_shapes: the traced function needs {x} == {self._words(found)}{where}: give {x.name} that "
                "name, or say so by torch.export.Dim (2 * Dim(...))"
            )
        for bound in (x.low, x.high):
            for expression, where in self._conditions if bound is not None else ():
                if expression.free_symbols == {symbol} and expression.xreplace({symbol: bound}) == sympy.false:
                    raise SizeError(
                        f"{self._names[symbol]} may be {bound}, as declared, but the trace holds only where "
                        f"{self._words(expression)}{where}: declare other bounds"
                    )

    def _words(self, expression: sympy.Basic) -> str:
        """Write an expression with the names of dimensions in place of symbols."""
        named = expression.xreplace({symbol: sympy.Symbol(name) for symbol, name in self._names.items()})
        if isinstance(named, sympy.Rel):
            return f"{named.lhs} {named.rel_op} {named.rhs}"
        return str(named)


def _inputs(gm: GraphModule) -> Iterator[tuple[str, Node]]:
    """Give the placeholders of arguments that are plain tensors, by name."""
    placeholders = iter(gm.graph.find_nodes(op="placeholder"))
    for slot in signature_of(gm).inputs:
        nodes = [next(placeholders) for _ in range(slot.layout.num_tensors)]
        if slot.kind == "input" and len(nodes) == 1:
            yield slot.name, nodes[0]


def keep_traced_sizes(gm: GraphModule) -> None:
    """Give each node's value the sizes that it was traced with, as numbers; those of the graph's arguments stay."""
    mode, known = FakeTensorMode(allow_non_fake_inputs=True), dict[Any, torch.Tensor]()
    with mode:
        for inner in gm.modules():
            for node in inner.graph.nodes if isinstance(inner, GraphModule) else ():
                if "val" in node.meta:
                    node.meta["val"] = pytree.tree_map(lambda x: _as_traced(x, known), node.meta["val"])
    gm.recompile()


def _as_traced(x: Any, known: dict[Any, torch.Tensor]) -> Any:
    """Give a size as a number; a tensor in memory of numbers, one for all that lie alike."""
    if is_symbolic(x):
        return hint(x)
    if not isinstance(x, torch.Tensor):
        return x
    shape, stride = ([hint(n) for n in sizes] for sizes in (x.shape, x.stride()))
    offset, num_bytes = hint(x.storage_offset()), hint(x.untyped_storage().nbytes())
    key = (*shape, None, *stride, offset, num_bytes, x.dtype, x.device)
    if key not in known:
        whole = torch.empty(num_bytes // x.element_size(), dtype=x.dtype, device=x.device)
        known[key] = whole.as_strided(shape, stride, offset)
    return known[key]


def place(frames: traceback.StackSummary) -> str:
    """Give the place in a user's code that a stack leads to."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
    found = [f for f in frames if not f.filename.startswith(own)]
    return f" ({Path(found[-1].filename).name}:{found[-1].lineno}: {found[-1].line})" if found else ""


def _marked(name: str, tensor: torch.Tensor) -> list[Dimension]:
    """Give the dimensions that are marked on a tensor."""
    marks = dynamic_marks(tensor)
    if is_traceable_wrapper_subclass(tensor) and any(map(dynamic_marks, (tensor, *layout_of(tensor).flatten(tensor)))):
        raise UserError(
            f"{name} is a {type(tensor).__name__} with a dynamic dimension, which is not supported: pass its plain "
            "tensor, or leave the mark out"
        )
    for i, *_ in marks:
        if not 0 <= i < tensor.dim():
            raise UserError(f"{name}: dimension {i} is marked dynamic, and it has {tensor.dim()} dimensions")
    return [
        x
        for i, unbacked, required, low, high in marks
        for x in _checked(Dimension(name, i, tensor.shape[i], unbacked=unbacked, required=required, low=low, high=high))
    ]


def _declared(tensors: Mapping[str, torch.Tensor], shapes: DynamicShapes) -> list[Dimension]:
    """Give the dimensions that `dynamic_shapes` names."""
    found = []
    if not isinstance(shapes, Mapping):
        raise UserError(
            f"dynamic_shapes is {shapes!r}: legal is a dict of tensors' names, as in {{{next(iter(tensors), 'x')!r}: "
            "{0: 'rows'}}"
        )
    for name, dims in shapes.items():
        if name not in tensors:
            raise UserError(f"dynamic_shapes: {name} is no tensor among the arguments: {', '.join(tensors)}")
        tensor = tensors[name]
        if is_traceable_wrapper_subclass(tensor):
            raise UserError(f"dynamic_shapes: {name} is a {type(tensor).__name__}, which is not supported there")
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


def _named(x: Dimension, what: Any) -> list[Dimension]:
    """Give a dimension as `dynamic_shapes` has it, nothing for one that stays as it is."""
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
    """Give the dimension, or nothing if it stays as it is: one that may be dynamic, and is of a size that can't."""
    if not x.unbacked and x.size < _SMALLEST:
        if not x.required:
            return []
        raise UserError(
            f"{x} is to be dynamic, but is {x.size}: trace with {_SMALLEST} or more, for one is another case"
        )
    if not x.unbacked and x.low is not None and x.low < _SMALLEST:
        raise UserError(f"{x} is declared from {x.low} on: a trace holds for {_SMALLEST} and more; declare that")
    if (x.low is not None and x.size < x.low) or (x.high is not None and x.size > x.high):
        low, high = ("any" if n is None else n for n in (x.low, x.high))
        raise UserError(f"{x} is {x.size}, which is not within what is declared of it, {low} to {high}")
    return [x]
