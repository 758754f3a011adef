"""Gradients that a function accumulates over calls, where a graph starts each call without any: refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from torchtitan_graph.errors import UserError
from torchtitan_graph.graph.signature import layout_of

aten = torch.ops.aten
_CLEAR = (aten.zero_.default, aten._foreach_zero_.default, aten.fill_.Scalar)
_READ_NOTHING = (aten.detach.default, aten.alias.default)


class Uncleared:
    """Sets gradients in `.grad` before a function runs, and checks at its end which of them are included in a sum.

    `see` is called with each operator. The first use of such a gradient is to clear it, to replace it, which is no
    operator, or to add to it.
    """

    def __init__(self) -> None:
        self._laid: dict[int, str] = {}  # names by the identity of memory that is still unused
        self._used: set[str] = set()
        self._cleared: set[int] = set()
        self._kept: list[Any] = []  # freed memory could become another's

    def lay(self, traced: Mapping[tuple[str, str], Tensor]) -> None:
        for (_, name), x in traced.items():
            if x.is_leaf and x.requires_grad:
                layout = layout_of(x)
                with torch.no_grad():
                    parts = [torch.zeros_like(t) for t in layout.flatten(x)]
                    x.grad_dtype = None
                    x.grad = layout.unflatten(parts)
                self._laid |= {self._memory(t): name for t in parts}

    def see(self, func: Any, given: Any) -> None:
        if func in _READ_NOTHING:
            return
        writes = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
        for memory in (self._memory(x) for x in pytree.tree_leaves(given) if isinstance(x, Tensor)):
            name = self._laid.pop(memory, None)
            if func in _CLEAR:
                self._cleared.add(memory)
            elif name is not None:
                self._used.add(name)
            elif writes:
                self._cleared.discard(memory)

    def _memory(self, x: Tensor) -> int:
        self._kept.append(x.untyped_storage())
        return id(self._kept[-1])

    def refuse(self, traced: Mapping[tuple[str, str], Tensor]) -> None:
        """Raise a UserError for gradients that the function used before it cleared them, and does not clear for the
        next call."""
        left = []
        for (_, name), x in traced.items():
            parts = layout_of(x.grad).flatten(x.grad) if name in self._used and x.grad is not None else []
            if any(self._memory(t) not in self._cleared for t in parts):
                left.append(name)
        if left:
            raise UserError(
                f"the traced function adds to .grad of {', '.join(left)}, which it does not clear: eager adds up from "
                "call to call, a graph would not. Call optimizer.zero_grad() in the function, before backward() or at "
                "its end"
            )
