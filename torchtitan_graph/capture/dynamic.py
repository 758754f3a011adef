"""Dynamic dimensions, and numbers that a traced function reads from tensors.

Note [Dynamic dimensions]
A marked dimension (`torch._dynamo.mark_dynamic`, `mark_unbacked`, `maybe_mark_dynamic`, or `dynamic_shapes` of the
tracer) is a symbol in the trace: sizes that derive from it (`2 * s`) are computed by the graph when it runs.
Comparisons of it in the traced function are decided by the traced sizes. Each is recorded as a condition, and each
call's sizes are checked against it. A dimension on which the function is specialized can't be dynamic: that is an
error.

A number that is read from a tensor (`.item()`) is a symbol too, without a value: the function may compute with it, and
with `torch._check` use it as a size, but not branch on it. The graph checks it when it runs.

In a training step a node's fake value, in its `meta`, has the traced sizes, and passes compute with these. A pass that
inserts an operator with a size of the batch takes it from a node, never from a fake value.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import sympy
import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torchtitan_graph.capture.dimensions import SMALLEST, Dimension, DynamicShapes, SizeError, declared_by, marked
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.edit import erase_dead
from torchtitan_graph.graph.signature import Plain, TensorLayout, inputs_of, layout_of
from torchtitan_graph.torch_private.fake import FakeTensorMode
from torchtitan_graph.torch_private.sizes import (
    add_runtime_checks,
    compute,
    hint,
    is_symbolic,
    new_symbol,
    require,
)
from torchtitan_graph.torch_private.tracing import TRACERS, author_stack


class Condition(NamedTuple):
    """A condition on a call's sizes, and the line of the traced function that needs it."""

    expression: sympy.Basic
    where: str


class Compared(list[Any]):
    """A trace's guards on symbols, with the lines of the traced function."""

    def __init__(self) -> None:
        super().__init__()
        self.where: list[str] = []

    def append(self, guard: Any) -> None:
        super().append(guard)
        self.where.append(place(author_stack()))


def compare(condition: Any, where: str) -> None:
    """Add a relation of a trace's symbols to its guards, with the line that needs it."""
    if is_symbolic(condition):
        found = condition.node.shape_env.guards
        before = len(found)
        assert condition, f"{condition}{where} does not hold of the sizes that are traced"
        found.where[before:] = [where] * (len(found) - before)


class _PromisedOf(dict[Any, Compared]):
    """The relations that `torch._check` assumed, by symbol of a number that is read from data."""

    def setdefault(self, symbol: sympy.Symbol, _: list) -> Compared:  # type: ignore[override]
        return super().setdefault(symbol, Compared())


class Sizes:
    """The symbols of a trace; afterwards, the conditions on a call's sizes.

    Args:
        leaves: the leaves of the arguments, tensors and others, by name.
        dynamic_shapes: by such a name and a dimension, the dimension's name: dimensions of one name are equal. A
            `torch.export.Dim` has bounds as well, and may derive from another (`2 * n`). A `BlockMask` has a name too.
    """

    def __init__(self, leaves: Mapping[str, Any], dynamic_shapes: DynamicShapes | None = None) -> None:
        tensors = {name: x for name, x in leaves.items() if isinstance(x, torch.Tensor)}
        found = [x for name, tensor in tensors.items() for x in marked(name, tensor)]
        found += declared_by(leaves, dynamic_shapes or {})
        self.dimensions = sorted(found, key=_is_computed)  # those with symbols of their own first
        self.env = ShapeEnv()
        self.env.guards = self._found = Compared()
        self._promised = _PromisedOf()
        self.env.deferred_runtime_asserts = self._promised  # type: ignore[assignment]
        self._own = [x for x in self.dimensions if not _is_computed(x)]
        self._symbols = [new_symbol(self.env, str(x), x.size, x.unbacked, x.low, x.high) for x in self._own]
        first = {x.name: str(x) for x in reversed(self._own) if x.name is not None}  # of each set of equal dimensions
        self._names = {
            size.node.expr: first.get(x.name, str(x)) for x, size in zip(self._own, self._symbols, strict=True)
        }
        self._conditions: list[Condition] = []
        self._seen: set[tuple[int, ...]] = set()
        self._relate()
        computed = enumerate(self.dimensions[len(self._own) :], len(self._own))
        sizes = [*self._symbols, *(x.of_root(self._symbols[self._roots[i]]) for i, x in computed)]
        self._at = {(x.tensor, x.dim): size for x, size in zip(self.dimensions, sizes, strict=True)}

    def layout(self, name: str, tensor: torch.Tensor) -> TensorLayout:
        """Return an argument's layout, with symbols' names as its dynamic sizes."""
        layout = layout_of(tensor)
        if not isinstance(layout, Plain):
            return layout
        sizes = [self._at.get((name, i), size) for i, size in enumerate(tensor.shape)]
        return Plain(tuple(x if isinstance(x, int) else str(x) for x in sizes), layout.dtype)

    def strided(self, name: str, tensor: torch.Tensor) -> tuple[list[Any], list[Any]]:
        """Return an argument's sizes and strides, with symbols for dynamic ones.

        A stride is a symbol where it is the product of the inner dimensions.
        """
        shape = [self._at.get((name, i), size) for i, size in enumerate(tensor.shape)]
        stride: list[Any] = list(tensor.stride())
        inside, symbolic = 1, 1
        for i in sorted(range(tensor.dim()), key=lambda i: (tensor.stride(i), -i)):
            if tensor.stride(i) == inside:
                stride[i] = symbolic
                inside, symbolic = inside * tensor.shape[i], symbolic * shape[i]
        return shape, stride

    def number(self, name: str, number: Any) -> Any:
        """Return the symbol of an argument that is a number, or the number itself if it is static."""
        return self._at.get((name, None), number)

    def varies(self, name: str) -> bool:
        """Return whether an argument is a dynamic number."""
        return (name, None) in self._at

    def settle(self, gm: GraphModule) -> None:
        """Store the trace's conditions on symbols, and insert checks of the numbers that the graph reads.

        Raises:
            UserError: the function is specialized on a dynamic dimension, needs sizes within narrower bounds, or an
                undeclared relation.
        """
        found = [self._found, *self._promised.values()]  # no guard has the assumptions on an unbacked size
        self._conditions = [Condition(g.expr, where) for of in found for g, where in zip(of, of.where, strict=True)]
        for x, symbol in zip(self._own, self._names, strict=True):
            self._check_traced(x, symbol)
        add_runtime_checks(gm, self.env)
        self.env.freeze()
        self._take_sizes_of_inputs(gm)

    def _take_sizes_of_inputs(self, gm: GraphModule) -> None:
        """Compute each size once, at the graph's beginning, from its inputs' sizes.

            n = sym_stride(x, 0); a = view(x, [n]); m = sym_size(a, 0); b = ones(m)
            s = sym_size(x, 1); a = view(x, [s]); b = ones(s)

        The tracer takes a size from any node that has it: a stride, which may differ in a call, or an activation, which
        would then be saved, or recomputed, for its size.
        """
        roots: dict[Any, tuple[Node, Dimension, Any]] = {}
        nodes = {slot.name: node for slot, node in inputs_of(gm) if slot.kind == "input"}
        for x, symbol, size in zip(self._own, self._names, self._symbols, strict=True):
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
        """Return a leaf of the traced function's result as it is stored: for a size, its expression of a call's
        sizes."""
        if not isinstance(leaf, torch.SymInt):
            return leaf
        if not leaf.node.expr.free_symbols <= self._names.keys():
            raise UserError(f"the result holds {leaf.node.expr}, a number that only a run knows: return its tensor")
        return leaf.node.expr

    def check(self, leaves: Mapping[str, Any]) -> dict[sympy.Symbol, sympy.Integer]:
        """Return a call's sizes by symbol, checked against the trace's conditions.

        Raises:
            UserError: names the violated condition.
        """
        return self._check(tuple(x.in_call(leaves) for x in self.dimensions))

    def check_named(self, sizes: Mapping[str, int]) -> None:
        """Check a call's sizes, by the names of dimensions; all must have one."""
        self._check(tuple(x.of_root(sizes[x.root or ""]) for x in self.dimensions))

    def _check(self, sizes: tuple[int, ...]) -> dict[sympy.Symbol, sympy.Integer]:
        given = {symbol: sympy.Integer(n) for symbol, n in zip(self._names, sizes, strict=False)}
        if sizes in self._seen:
            return given
        for x, size in zip(self.dimensions, sizes, strict=True):
            low = x.low if x.low is not None else 0 if x.unbacked or x.of else SMALLEST
            if size < low or (x.high is not None and size > x.high):
                legal = f"{low} and more" if x.high is None else f"{low} to {x.high}"
                raise SizeError(f"{x} is {size}: the trace holds for {legal}; trace again for this size")
        for i, root in self._roots.items():
            self.dimensions[i].check(sizes[i], self.dimensions[root], sizes[root])
        for expression, where in self._conditions:
            if expression.free_symbols <= given.keys() and expression.xreplace(given) == sympy.false:
                found = ", ".join(f"{self._names[s]} is {given[s]}" for s in sorted(expression.free_symbols, key=str))
                raise SizeError(
                    f"{found}: the trace holds where {self.words(expression)}{where}; keep to that, or trace again"
                )
        self._seen.add(sizes)
        return given

    def what_is_unknown(self, gm: GraphModule) -> str | None:
        """Return a description of a number that the trace has no value for, None if there is none."""
        if unbacked := next((x for x in self.dimensions if x.unbacked and x.of is None), None):
            return f"{unbacked} is unbacked"
        node = next((n for n in gm.graph.nodes if n.target is torch.ops.aten._local_scalar_dense.default), None)
        if node is not None:
            line = meta.source_line(node)
            return f"{meta.module(node) or 'the traced function'} reads a tensor's value{f' ({line})' if line else ''}"
        for loop in (n for n in gm.graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator)):
            symbols = {s for x in _sizes(loop.meta.get("val")) if is_symbolic(x) for s in x.node.expr.free_symbols}
            if not symbols <= self._names.keys():
                return f"{meta.module(loop) or 'the traced function'} gives what only a run knows ({loop.target})"
        return None

    def of_unbacked(self) -> dict[Any, int]:
        """Return the traced sizes of unbacked symbols."""
        return {symbol: x.size for x, symbol in zip(self._own, self._names, strict=True) if x.unbacked}

    def failed(self, error: RuntimeError) -> UserError | None:
        """Return a UserError for a failed check of a number that the graph reads; None for another error. A graph
        checks bounds (u0 <= 99) that torch derives from the assumptions (u0 < 100)."""
        failed = re.search(r"expression (.*) on node", str(error))
        if failed is None:
            return None
        numbers = set(re.findall(r"\w+", failed[1]))
        promised = [
            (symbol, check.expr, where)
            for symbol, checks in self._promised.items()
            for check, where in zip(checks, checks.where, strict=True)
            if numbers & set(map(str, check.expr.free_symbols))
        ]
        promised = [each for each in promised if str(each[1]) == failed[1]] or promised
        needs = " and ".join(dict.fromkeys(f"{self.words(expression)}{where}" for _, expression, where in promised))
        what = self._names.get(promised[0][0] if promised else None, "a number that it reads from a tensor")
        name = promised[0][0] if promised else failed[1].split()[0]
        return UserError(
            f"the traced function needs {needs or failed[1]}, where {name} is {what}; that is not so in this call"
        )

    def _relate(self) -> None:
        """Make dimensions of one name equal, and derived dimensions equal to their function of the root."""
        first: dict[str, int] = {}
        for i, x in enumerate(self.dimensions):
            if x.name is not None and x.of is None:
                first.setdefault(x.name, i)
        self._roots: dict[int, int] = {}  # of a dimension, another one with its root's name
        for i, x in sorted(enumerate(self.dimensions), key=lambda pair: pair[1].of is not None and pair[1].unbacked):
            if x.root is None:
                continue
            if x.root not in first:
                raise UserError(f"dynamic_shapes: {x} is {x.name}, but no dimension is {x.root}: name that one as well")
            root = first[x.root]
            other = self.dimensions[root]
            x.check(x.size, other, other.size)
            if root != i:
                self._roots[i] = root
            if root != i and x.of is None:
                require(self._symbols[i] == self._symbols[root])

    def _check_traced(self, x: Dimension, symbol: sympy.Symbol) -> None:
        found = self.env.replace(symbol)
        if found.is_number and x.required:
            pins = (c.where for c in self._conditions if isinstance(c[0], sympy.Eq) and len(c[0].free_symbols) == 1)
            raise SizeError(
                f"{x} is to be dynamic, but the traced function takes it for {found}{next(pins, '')}: let it not "
                "depend on that number, or leave the dimension out"
            )
        sources = [y for y, s in zip(self._own, self._names, strict=True) if s in found.free_symbols]
        others = {y.root for y in sources}
        if x.of is None and x.name is not None and others - {x.name}:
            where = next((c.where for c in self._conditions if symbol in c.expression.free_symbols), "")
            raise SizeError(
                f"dynamic_shapes: the traced function needs {x} == {self.words(found)}{where}: give {x.name} that "
                "name, or say so by torch.export.Dim (2 * Dim(...))"
            )
        for bound in (x.low, x.high):
            for expression, where in self._conditions if bound is not None else ():
                if expression.free_symbols == {symbol} and expression.xreplace({symbol: bound}) == sympy.false:
                    raise SizeError(
                        f"{self._names[symbol]} may be {bound}, as declared, but the trace holds only where "
                        f"{self.words(expression)}{where}: declare other bounds"
                    )

    def words(self, expression: sympy.Basic) -> str:
        """Return an expression as text, with the names of dimensions in place of symbols."""
        named = expression.xreplace({symbol: sympy.Symbol(name) for symbol, name in self._names.items()})
        if isinstance(named, sympy.Rel):
            return f"{named.lhs} {named.rel_op} {named.rhs}"
        return str(named)


def _sizes(val: Any) -> list[Any]:
    """Return the sizes of a node's value, and the numbers in it."""
    leaves = pytree.tree_leaves(val)
    return [n for x in leaves for n in (x.shape if isinstance(x, torch.Tensor) else (x,))]


def _is_computed(x: Dimension) -> bool:
    """Return whether a dimension is computed from another's, without a symbol of its own."""
    return x.of is not None and not x.unbacked


def keep_traced_sizes(gm: GraphModule, sizes: Sizes) -> None:
    """Replace symbols in nodes' fake values by the traced sizes; the signature keeps them."""
    mode, known, unbacked = FakeTensorMode(allow_non_fake_inputs=True), dict[Any, torch.Tensor](), sizes.of_unbacked()
    with mode:
        for inner in gm.modules():
            for node in inner.graph.nodes if isinstance(inner, GraphModule) else ():
                if "val" in node.meta:
                    node.meta["val"] = pytree.tree_map(lambda x: _as_traced(x, known, unbacked), node.meta["val"])
    gm.recompile()


def _as_traced(x: Any, known: dict[Any, torch.Tensor], unbacked: Mapping[Any, int]) -> Any:
    """Return a symbolic size as a number; a fake tensor with traced sizes, one for all of equal layout."""
    if is_symbolic(x):
        return hint(x, unbacked)
    if not isinstance(x, torch.Tensor):
        return x
    shape, stride = ([hint(n, unbacked) for n in sizes] for sizes in (x.shape, x.stride()))
    offset, num_bytes = (hint(n, unbacked) for n in (x.storage_offset(), x.untyped_storage().nbytes()))
    key = (*shape, None, *stride, offset, num_bytes, x.dtype, x.device)
    if key not in known:
        whole = torch.empty(num_bytes // x.element_size(), dtype=x.dtype, device=x.device)
        known[key] = whole.as_strided(shape, stride, offset)
    return known[key]


_STANDARD = sysconfig.get_path("stdlib")
_NOT_THE_AUTHOR_S = (*TRACERS, "<")


def place(frames: traceback.StackSummary) -> str:
    """Return the innermost place of a stack in a user's code."""
    for frame in reversed(frames):
        is_standard = frame.filename.startswith(_STANDARD) and "site-packages" not in frame.filename
        is_standard |= frame.filename.endswith("typing_extensions.py")  # it decorates torch's own functions
        if not is_standard and not frame.filename.startswith(_NOT_THE_AUTHOR_S):
            return f" ({Path(frame.filename).name}:{frame.lineno}: {frame.line})"
    return ""
