"""Checks of calls of public functions, with a UserError of one line that shows the right call."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from torchtitan_graph.errors import UserError
from torchtitan_graph.nearest import nearest

P = ParamSpec("P")
R = TypeVar("R")

TRACE = "minimal_fx_tracer(fn, module=model)(*arguments)"
RUN = "run_traced(traced, module=model)(*arguments)"


def called_as(call: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that a call with wrong parameters raises a UserError with the right call.

    Raises:
        UserError: an unknown keyword, too many arguments, or one that is missing.
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(fn)

        @functools.wraps(fn)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                unknown = next((name for name in kwargs if name not in signature.parameters), "")
                near = nearest(unknown, signature.parameters) if unknown else None
                hint = f" (did you mean {near}?)" if near else ""
                name = fn.__qualname__.removesuffix(".__init__")
                raise UserError(f"{name}: {error}{hint}; write {call}") from None
            return fn(*args, **kwargs)

        return checked

    return decorate


def expect(call: str, name: str, value: object, kind: Any, wanted: str) -> None:
    """Raise a UserError unless a parameter is of a class; `wanted` describes legal values, `call` is the right call."""
    if not isinstance(value, kind):
        found = f"the class {value.__name__}" if isinstance(value, type) else f"of class {class_name(value)}"
        raise UserError(f"{name} is {found}: must be {wanted}; write {call}")


def class_name(value: object) -> str:
    """Return the name of a value's class; of a generated class, as each graph has, that of its base."""
    return next(cls.__name__ for cls in type(value).__mro__ if re.fullmatch("[A-Za-z]\\w*", cls.__name__))


def expect_state(call: str, module: object, optimizer: object) -> None:
    """Raise a UserError unless these are a module, and an optimizer of that module; either may be None."""
    if module is not None:
        expect(call, "module", module, nn.Module, "one nn.Module (several are one in an nn.ModuleList)")
    if optimizer is not None:
        expect(call, "optimizer", optimizer, torch.optim.Optimizer, "one torch.optim.Optimizer")
    if optimizer is not None and module is None:
        name = call.partition("(")[0]
        raise UserError(f"{name} got an optimizer without its module: pass module=, the one it optimizes")


def expect_function(call: str, fn: object, module: nn.Module | None, device: Any, blocks: Any) -> None:
    """Raise a UserError unless a function can be traced with these options."""
    expect(call, "fn", fn, Callable, "the function to trace")
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"device = {device!r}: must be a device of torch, such as 'cpu' or 'cuda'") from error
    expect(call, "blocks", blocks, Mapping, "submodules of module, by their names")
    names = dict(module.named_modules(remove_duplicate=False)) if module is not None and blocks else {}
    if foreign := [name for name, block in blocks.items() if names.get(name) is not block]:
        raise UserError(
            f"blocks: {foreign[0]!r} must be a submodule of module, by its name there, as in {{'layers.0': "
            "model.layers[0]}"
        )


def expect_arguments(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise a UserError if the function to trace can't be called with these arguments."""
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # a builtin, such as torch.sin, has none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise UserError(f"the traced function, {name}{signature}, can't be called so: {error}") from None
