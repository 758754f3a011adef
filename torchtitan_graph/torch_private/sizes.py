"""Dynamic sizes: torch's marks on dimensions, symbols, and their arithmetic in a graph."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch._subclasses import FakeTensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, constrain_range

from torchtitan_graph.torch_private.fake import FakeTensorMode
from torchtitan_graph.torch_private.tensors import is_traceable_wrapper_subclass


def export_dims() -> tuple[type, type]:
    """Return the classes of `2 * dim` for a `torch.export.Dim`, and of Dim.DYNAMIC and Dim.AUTO: neither has a public
    name."""
    from torch.export.dynamic_shapes import _DerivedDim, _DimHint  # late: a third of a second that few runs need

    return _DerivedDim, _DimHint


class Mark(NamedTuple):
    """A dimension marked by `torch._dynamo`'s functions: whether it is unbacked, whether it must stay dynamic, its
    bounds, the name shared by dimensions of equal size, and whether code was asked for some of its sizes."""

    dim: int
    unbacked: bool
    required: bool
    low: int | None
    high: int | None
    name: str | None
    specialized: bool


def dynamic_marks(tensor: torch.Tensor) -> list[Mark]:
    """Return the marks on a tensor, also of dimensions that it does not have. `mark_dynamic` and its like keep them in
    attributes, which no function reads back."""
    bounds = {x.dim: (x.min, x.max) for x in getattr(tensor, "_dynamo_dynamic_range", ())}
    bounds |= getattr(tensor, "_dynamo_unbacked_bounds", {})
    names, specialized = getattr(tensor, "_dynamo_shape_ids", {}), getattr(tensor, "_specialize_on", {})
    kinds = (
        ("_dynamo_dynamic_indices", False, True),
        ("_dynamo_weak_dynamic_indices", False, False),
        ("_dynamo_unbacked_indices", True, False),
        ("_dynamo_strict_unbacked_indices", True, True),
    )
    found: dict[int, Mark] = {}
    for attribute, unbacked, required in kinds:
        for i in getattr(tensor, attribute, ()):
            dim = i + tensor.dim() if i < 0 else i
            low, high = bounds.get(i, (None, None))
            found[dim] = Mark(dim, unbacked, required, low, high, names.get(i), bool(specialized.get(i)))
    return [found[i] for i in sorted(found)]


class SymbolicFakeTensorMode(FakeTensorMode):
    """The fake tensor mode for sizes that are symbols.

    The C++ shape rule of a padded tensor takes no symbols. torch has the same in Python, and calls it only under its
    Python dispatcher, which would also decompose `matmul` into parts that may round otherwise than eager's.

    Results of small tensors with data, such as `torch.tensor(2.0)`, are computed by torch while it traces. It would do
    so with floats and booleans that depend on data too (with integers it does not), and use nan for them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if any(isinstance(x, torch.SymFloat | torch.SymBool) for x in pytree.tree_leaves((args, kwargs))):
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._without_numbers, (args, kwargs))
        if func is not torch.ops.aten.constant_pad_nd.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        from torch._refs import constant_pad_nd  # late, for few runs need it

        with self:
            return constant_pad_nd(*args, **(kwargs or {}))

    def _without_numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_traceable_wrapper_subclass(tensor):
            return tensor  # its own operators come here again, with plain tensors
        fake = tensor if isinstance(tensor, FakeTensor) else self.from_tensor(tensor)
        if fake.constant is not None:
            self.fake_tensor_converter.invalidate_constant_aliases(fake.constant)
        return fake


# Assume that a relation of symbols holds: documented, but with an underscore.
require = torch._check


def new_symbol(
    env: ShapeEnv, name: str, size: int, unbacked: bool, low: int | None = None, high: int | None = None
) -> Any:
    """Return a new symbol for a size; `torch.export` makes one by way of a source of its own front end. Comparisons of
    an unbacked size are decided by its bounds; of a backed one by the traced size."""
    from torch._dynamo.source import ConstantSource  # late, for it takes a second

    source = ConstantSource(name)
    if unbacked:
        with env.ignore_fresh_unbacked_symbols():  # else the first operator would be recorded as its producer
            symbol = env.create_unbacked_symint(source)
        constrain_range(symbol, min=low or 0, max=high)
        return symbol
    return env.create_symintnode(
        env.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC), hint=size, source=source
    )


def is_symbolic(x: Any) -> bool:
    """Return whether a value is a symbolic number. torch has no public name for its three classes together."""
    return isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool)


def hint(x: Any, unbacked: Mapping[Any, int]) -> Any:
    """Return a number's value at tracing; `int` of a symbol would specialize it. There is no public name for that, and
    torch does not know the value of unbacked symbols."""
    if not is_symbolic(x):
        return x
    return x.node.hint if x.node.has_hint() else int(x.node.expr.xreplace(unbacked))


def compute(graph: torch.fx.Graph, expression: Any, of: Mapping[Any, torch.fx.Node]) -> torch.fx.Node:
    """Insert the arithmetic of an expression of symbols, as torch does for its own checks, and return its last node."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    tracer, known = torch.fx.proxy.GraphAppendingTracer(graph), set(graph.nodes)
    proxies = {symbol: torch.fx.Proxy(node, tracer) for symbol, node in of.items()}
    made = sympy_interp(PythonReferenceAnalysis, proxies, expression)
    for node in graph.nodes:
        if node not in known:
            args = torch.fx.node.map_arg(node.args, lambda x: x.meta["val"])
            node.meta["val"] = node.target(*args)  # type: ignore[operator]
    return made.node


def add_runtime_checks(gm: torch.fx.GraphModule, env: ShapeEnv) -> None:
    """Insert runtime assertions of the relations that `torch._check` assumed of unbacked sizes, as in `torch.export`'s
    graphs."""
    from torch.fx.passes.runtime_assert import insert_deferred_runtime_asserts

    insert_deferred_runtime_asserts(gm, env, "trace")
