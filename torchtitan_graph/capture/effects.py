"""Side effects of a traced function on Python state, which a graph would not repeat: undone, and refused by name."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch.utils._pytree as pytree
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchtitan_graph.capture.reached import Content, Place, Reached, is_random, random_places, readable
from torchtitan_graph.capture.state import is_traced
from torchtitan_graph.errors import UserError, listed
from torchtitan_graph.torch_private.tensors import KEPT_BY_TORCH


@contextlib.contextmanager
def no_effects(held: Iterable[Reached]) -> Iterator[None]:
    """Undo the function's changes of reachable Python values, and of random generators, after the trace, and raise a
    UserError that names them if it succeeded."""
    found = [(name, *each) for name, _, places in held for each in places]
    found += [(name, place, place.read(place.owner)) for name, place in random_places()]
    changed: dict[str, tuple[Place, Any]] = {}
    try:
        yield
    finally:
        for name, place, before in found:
            after = place.read(place.owner)
            if not _is_same(before, after):
                changed |= {each: (place, x) for each, x in _differing(name, place, before, after)}
                place.write(place.owner, before)
    if changed:
        _refuse(changed)


def _is_same(before: Content, after: Content) -> bool:
    return before.keys() == after.keys() and all(after[key] is x for key, x in before.items())


def _differing(name: str, place: Place, before: Content, after: Content) -> Iterator[tuple[str, Any]]:
    """Yield the changed values by name, with their present content, except permitted ones."""
    nothing = object()
    for key in dict.fromkeys([*before, *after]):
        kept = isinstance(place.owner, (nn.Module, Optimizer)) and key in KEPT_BY_TORCH
        cached = key not in before and isinstance(
            inspect.getattr_static(type(place.owner), str(key), None), functools.cached_property
        )
        if not kept and not cached and not _are_equal(before.get(key, nothing), after.get(key, nothing)):
            yield readable(place.form.format(name=name, key=key)).removeprefix("."), after.get(key)


_VALUES = (bool, int, float, complex, str, bytes)


def _are_equal(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    if isinstance(x, (tuple, list)):
        return len(x) == len(y) and all(map(_are_equal, x, y))
    return (type(x) in _VALUES or inspect.ismethod(x)) and (x == y or x != x and y != y)


def _refuse(changed: dict[str, tuple[Place, Any]]) -> None:
    owners = [place.owner for place, _ in changed.values()]
    if kept := [name for name, (_, x) in changed.items() if any(map(is_traced, pytree.tree_leaves(x)))]:
        raise UserError(
            f"the traced function keeps a tensor in {listed(kept)}: after the trace it would hold a value without "
            "numbers; return it from the function instead"
        )
    names = listed([*changed])
    if any(map(is_random, owners)):
        raise UserError(
            f"the traced function draws random numbers of Python or NumPy ({names}): a graph would have the same ones "
            "in every call; draw outside and pass the numbers in"
        )
    what = "return the new value from the function and write it back outside; a cache is filled by a call before"
    if any(name.rpartition(".")[2] in ("training", "requires_grad") for name in changed):
        what = "set it before the trace"
    elif any(isinstance(owner, LRScheduler) for owner in owners):
        what = "step the schedule after the call, with a learning rate that is a tensor"
    elif "param_groups" in names or isinstance(owners[0], Optimizer):
        what = "keep a counter as a tensor in the optimizer's state"
    raise UserError(f"the traced function changes {names}, which a graph would not do when it is called: {what}")
