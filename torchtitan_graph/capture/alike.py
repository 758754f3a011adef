"""Descriptions of modules: equal for modules whose traces are equal except for names."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

_ATOMS = (int, bool, str, bytes, complex, type(None), type, torch.dtype, torch.device, torch.memory_format, DeviceMesh)


class _Itself:
    """Compares an object by identity, and keeps it alive, so that its `id` is not reused."""

    def __init__(self, x: object) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.x is other.x

    def __hash__(self) -> int:
        return id(self.x)


def description(module: nn.Module, forward: Any, arguments: Any) -> Hashable:
    """Return a value that is equal for modules of one kind with equal calls: classes, attributes, hooks, wrappers of
    `forward`.

    Parameters, buffers and submodules count by their names in the module. An opaque object is compared by identity: a
    module with one of its own is a kind of its own.
    """
    seen: dict[int, tuple[str, Any]] = {id(m): (f"module {name}", m) for name, m in module.named_modules()}
    seen |= {id(x): (f"tensor {name}", x) for name, x in (*module.named_parameters(), *module.named_buffers())}

    def own(name: str, of: nn.Module) -> dict[str, Any]:
        held = dict(vars(of))
        if not name:
            held.pop("forward", None)  # `forward` is an argument; while it is traced, the attribute is a replacement
        return held

    try:
        attributes = tuple((name, type(m), _described(own(name, m), seen)) for name, m in module.named_modules())
        return attributes, _described(forward, seen), _described(arguments, seen)
    except RecursionError:  # it is too large or too deep to describe
        return _Itself(object())


def _described(x: Any, seen: dict[int, tuple[str, Any]]) -> Hashable:
    """Describe an object; `seen` has the objects that are described elsewhere, by identity, and keeps them alive
    meanwhile."""
    if id(x) in seen:
        return seen[id(x)][0]
    if isinstance(x, float):
        return "float", repr(x)  # nan equals nan, 0 differs from -0
    if isinstance(x, _ATOMS):
        return type(x), x
    if isinstance(x, (torch.Tensor, nn.Module)):
        return _Itself(x)
    seen[id(x)] = f"object {len(seen)}", x  # it may contain itself
    if isinstance(x, dict):
        items = tuple((_described(k, seen), _described(v, seen)) for k, v in x.items())
        return type(x), _attributes(x, seen), _described(getattr(x, "default_factory", None), seen), items
    if isinstance(x, (list, tuple)):
        return type(x), _attributes(x, seen), tuple(_described(each, seen) for each in x)
    if isinstance(x, (set, frozenset)):
        return type(x), _attributes(x, seen), frozenset(_described(each, seen) for each in x)
    if isinstance(x, functools.partial):
        return "partial", _described((x.func, x.args, x.keywords), seen)
    if isinstance(x, types.MethodType):
        return "method", _described((x.__func__, x.__self__), seen)
    if isinstance(x, types.FunctionType):
        cells = [cell.cell_contents for cell in x.__closure__ or ()]
        held = _described((cells, x.__defaults__, x.__kwdefaults__), seen)
        return "function", x.__code__, _Itself(x.__globals__), held, _attributes(x, seen)
    if type(x).__new__ is object.__new__ and not any("__slots__" in vars(cls) for cls in type(x).__mro__):
        return type(x), _attributes(x, seen)
    return _Itself(x)


def _attributes(x: Any, seen: dict[int, tuple[str, Any]]) -> Hashable:
    """Describe an object's `__dict__`: functions have one, and instances of subclasses of `dict` and its like."""
    return _described(getattr(x, "__dict__", None), seen)
