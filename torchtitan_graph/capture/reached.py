"""The values reachable from a traced function: by its variables, and by containers, objects, modules and optimizers
among these."""

from __future__ import annotations

import collections
import functools
import inspect
import pickle
import random
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Content = Mapping[Any, Any]


class Place(NamedTuple):
    """A mutable part of a value: `read(owner)` returns its content by key, `write(owner, content)` restores it, and
    `form` formats an element's name from the owner's name and a key."""

    owner: Any
    read: Callable[[Any], Content]
    write: Callable[[Any, Content], None]
    form: str


class Reached(NamedTuple):
    """A value reachable from a function, its name, and its mutable parts, with their content."""

    name: str
    value: Any
    places: list[tuple[Place, Content]]


_MOST = 100_000
_HOLD_NOTHING = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = (dict, collections.OrderedDict, collections.defaultdict, list, tuple, set, collections.deque)
_LOOKED_INTO = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler, types.SimpleNamespace)
_LIBRARIES = {*sys.stdlib_module_names, "torch", "torchtitan_graph"}


def reached(
    fn: Callable[..., Any], module: nn.Module | None = None, optimizer: Optimizer | None = None
) -> Iterator[Reached]:
    """Yield the values reachable from a function, its module and its optimizer, by their names in the function's
    source, with their mutable parts and content.

    The search covers the variables that a function's code names, the object that it is bound to, and functions,
    containers and objects among these; of libraries only modules, optimizers, learning rates' schedules and closures of
    their functions; up to 100,000 values.
    """
    seen: dict[int, Any] = {}
    left = collections.deque([("", module), ("optimizer", optimizer), ("", fn)])
    own = {_package(fn)} - _LIBRARIES
    while left and len(seen) < _MOST:
        name, held = left.popleft()
        if id(held) in seen:
            continue
        seen[id(held)] = held
        places = [(place, place.read(place.owner)) for place in _places(held, own)]
        yield Reached(name, held, places)
        left.extend(
            (_named(place.form, name, key), x)
            for place, content in places
            if not isinstance(held, Tensor)
            for key, x in content.items()
            if not isinstance(x, _HOLD_NOTHING)
        )
        left.extend((".".join(filter(None, (name, key))), x) for key, x in _behind(held, own))


def readable(name: str) -> str:
    """Return model.weight for model._parameters['weight']."""
    return re.sub(r"(^|\.)_(?:modules|parameters|buffers)\['([^']+)'\]", r"\1\2", name)


def _named(form: str, name: str, key: Any) -> str:
    return form.format(name=name, key=key).removeprefix(".")


def _behind(held: Any, own: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield values that a value references other than by its places, by name: parts of a partial function, of a method;
    its classes."""
    if isinstance(held, functools.partial):
        yield from [("", held.func), *((str(i), x) for i, x in enumerate(held.args)), *held.keywords.items()]
    elif inspect.ismethod(held):
        yield from [("", held.__func__), ("self", held.__self__)]
    elif inspect.isfunction(held):
        if _is_own(held, own):
            parameters = held.__code__.co_varnames[: held.__code__.co_argcount]
            yield from zip(reversed(parameters), reversed(held.__defaults__ or ()), strict=False)
            yield from (held.__kwdefaults__ or {}).items()
    elif isinstance(held, (property, classmethod, staticmethod)):
        yield from ((key, getattr(held, key, None)) for key in ("__func__", "fget", "fset"))
    elif type(held) not in _CONTAINERS and not isinstance(held, (Tensor, types.ModuleType)):
        classes = held.__mro__[1:] if isinstance(held, type) else type(held).__mro__
        yield from ((cls.__qualname__, cls) for cls in classes if _is_own(cls, own))


def _places(held: Any, own: set[str]) -> Iterator[Place]:
    if isinstance(held, Tensor):
        if held.is_leaf and held.is_floating_point():
            yield Place(held, lambda x: {"requires_grad": x.requires_grad}, _set_attributes, "{name}.{key}")
    elif inspect.isfunction(held):
        cells = dict(zip(held.__code__.co_freevars, held.__closure__ or (), strict=True))
        yield Place(cells, _read_cells, _write_cells, "{key}")
        if _is_own(held, own):
            yield Place((held.__globals__, _names(held.__code__)), _read_globals, _write_globals, "{key}")
            yield Place(vars(held), dict, _write_items, "{name}.{key}")
    elif isinstance(held, type):
        if _is_own(held, own):
            yield Place(held, _read_class, _set_attributes, held.__qualname__ + ".{key}")
    elif isinstance(held, dict):
        yield Place(held, dict, _write_items, "{name}[{key!r}]")
    elif isinstance(held, (list, collections.deque)):
        yield Place(held, _read_elements, _write_elements, "{name}[{key}]")
    elif isinstance(held, set):
        yield Place(held, dict.fromkeys, _write_items, "{name}")
    elif isinstance(held, tuple):
        yield Place(held, _read_elements, lambda owner, content: None, "{name}[{key}]")
    elif is_random(held):
        yield from _random(held)
    elif isinstance(held, _LOOKED_INTO) or (
        not isinstance(held, functools.partial) and hasattr(held, "__dict__") and _is_own(held, own)
    ):
        yield Place(held, _read_attributes, _write_attributes, "{name}.{key}")
    if type(held) not in _CONTAINERS and hasattr(type(held), "__slots__") and _is_own(type(held), own):
        yield Place(held, _read_slots, _set_attributes, "{name}.{key}")


def random_places() -> list[tuple[str, Place]]:
    """Return the states of Python's and NumPy's default random generators, by name."""
    numpy = sys.modules.get("numpy.random")
    found = [("random", random._inst), *([("numpy.random", numpy.mtrand._rand)] if numpy is not None else [])]  # type: ignore[attr-defined]
    return [(name, place) for name, held in found for place in _random(held)]


def is_random(held: Any) -> bool:
    """Return whether a value is a random generator of Python or NumPy with a state."""
    numpy = sys.modules.get("numpy.random")
    kinds = (random.Random, *((numpy.RandomState, numpy.Generator) if numpy is not None else ()))
    return isinstance(held, kinds) and not isinstance(held, random.SystemRandom)


def _random(held: Any) -> Iterator[Place]:
    if not is_random(held):
        return
    if isinstance(held, random.Random):
        get, put = held.getstate, held.setstate
    elif hasattr(held, "get_state"):
        get, put = held.get_state, held.set_state
    else:
        get, put = lambda: held.bit_generator.state, lambda state: setattr(held.bit_generator, "state", state)
    read, write = lambda _: {"state": pickle.dumps(get())}, lambda _, content: put(pickle.loads(content["state"]))
    yield Place(held, read, write, "{name}")


def _names(code: types.CodeType) -> set[str]:
    """Return the global variables and attributes that a function's code names, functions inside it included."""
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _read_cells(cells: Mapping[str, types.CellType]) -> Content:
    return {name: cell.cell_contents for name, cell in cells.items() if cell != types.CellType()}  # not an empty one


def _write_cells(cells: Mapping[str, types.CellType], content: Content) -> None:
    for name, cell in cells.items():
        if name in content:
            cell.cell_contents = content[name]
        elif cell != types.CellType():
            del cell.cell_contents


def _read_globals(owner: tuple[dict[str, Any], set[str]]) -> Content:
    variables, names = owner
    return {name: variables[name] for name in names if name in variables}


def _write_globals(owner: tuple[dict[str, Any], set[str]], content: Content) -> None:
    variables, names = owner
    for name in names - content.keys():
        variables.pop(name, None)
    variables.update(content)


def _read_class(cls: type) -> Content:
    return {key: x for key, x in vars(cls).items() if not key.startswith("__") and not key.startswith("_abc_")}


def _read_slots(held: Any) -> Content:
    own = (vars(cls).get("__slots__", ()) for cls in type(held).__mro__)
    names = [name for slots in own for name in ((slots,) if isinstance(slots, str) else slots)]
    return {name: getattr(held, name) for name in names if not name.startswith("__") and hasattr(held, name)}


def _set_attributes(held: Any, content: Content) -> None:
    read = _read_class if isinstance(held, type) else _read_slots
    found = {"requires_grad": held.requires_grad} if isinstance(held, Tensor) else read(held)
    set_in, delete = (setattr, delattr) if isinstance(held, type) else (object.__setattr__, object.__delattr__)
    for key in found.keys() - content.keys():
        delete(held, key)
    for key, x in content.items():
        if found.get(key) is not x:
            set_in(held, key, x)


def _read_attributes(held: Any) -> Content:
    if isinstance(held, Optimizer):  # its state is checked where it is swapped
        return {key: x for key, x in vars(held).items() if key != "state"}
    return dict(vars(held))


def _write_attributes(held: Any, content: Content) -> None:
    kept = {"state": held.state} if isinstance(held, Optimizer) else {}
    _write_items(vars(held), {**content, **kept})


def _write_items(held: Any, content: Content) -> None:
    held.clear()
    held.update(content)


def _read_elements(held: Any) -> Content:
    return dict(enumerate(held))


def _write_elements(held: Any, content: Content) -> None:
    held.clear()
    held.extend(content.values())


def _package(held: Any) -> str:
    while isinstance(held, functools.partial):
        held = held.func
    module = getattr(held, "__module__", None) or type(held).__module__
    return str(getattr(held, "__name__", "") if isinstance(held, types.ModuleType) else module).partition(".")[0]


def _is_own(held: Any, own: set[str]) -> bool:
    """Return whether a value is of the user's code: libraries' internal state is not a side effect of a function."""
    package = _package(held)
    return package in own or _is_no_library(package)


@functools.cache
def _is_no_library(package: str) -> bool:
    path = getattr(sys.modules.get(package), "__file__", None) or ""
    return package not in _LIBRARIES and not {"site-packages", "dist-packages"} & set(Path(path).parts)
