"""Import of the user's own classes and functions, which options give by dotted names."""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torchtitan_graph.errors import UserError
from torchtitan_graph.nearest import did_you_mean


def find_own(option: str, dotted_name: str) -> Any:
    """Return the object at `dotted_name`, the value of `option`, after importing its module.

    Raises:
        UserError: it is not a dotted name, there is no such module, or nothing of that name in it.
    """
    module, _, name = dotted_name.rpartition(".")
    if not module or not all(part.isidentifier() for part in dotted_name.split(".")):
        raise UserError(f"{option} = {dotted_name!r}: is not a dotted name, such as my_package.my_name")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise UserError(
            f"{option} = {dotted_name!r}: {module} can't be imported: {error}; is it on PYTHONPATH?"
        ) from error
    except AttributeError as error:
        hint = did_you_mean(name, vars(sys.modules[module]))
        raise UserError(f"{option} = {dotted_name!r}: {module} has no {name}{hint}") from error


def find_own_function(option: str, dotted_name: str, num_arguments: int) -> Any:
    """Return the user's function at `dotted_name`.

    Raises:
        UserError: as `find_own`, or it can't be called with that number of arguments.
    """
    function = find_own(option, dotted_name)
    try:
        inspect.signature(function).bind(*range(num_arguments))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{option} = {dotted_name!r}: can't be called with {num_arguments} arguments: {error}"
        ) from error
    return function


def find_own_step(dotted_name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function of `training.step` with its `training.step_options`.

    Raises:
        UserError: as `find_own_function` for (model, batch), or an option that it does not take, or lacks.
    """
    option, table = f"training.step = {dotted_name!r}", "training.step_options"
    function = find_own("training.step", dotted_name)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise UserError(f"{option}: is no function: {error}") from error
    kinds = {name: parameter.kind for name, parameter in parameters.items()}
    taken = [name for name, kind in kinds.items() if kind in (inspect.Parameter.POSITIONAL_ONLY, _BOTH)][:2]
    if len(taken) < 2:
        raise UserError(f"{option}: must be called with (model, batch), and has ({', '.join(parameters)})")
    legal = [n for n, kind in kinds.items() if n not in taken and kind in (_BOTH, inspect.Parameter.KEYWORD_ONLY)]
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds.values()
    for name in options:
        if name not in legal and not takes_all:
            hint = did_you_mean(name, legal, f"; its options are {', '.join(legal)}" if legal else "; it has none")
            raise UserError(f"{table}: {name} is no option of {dotted_name}{hint}")
    if lacking := [n for n in legal if parameters[n].default is inspect.Parameter.empty and n not in options]:
        raise UserError(f"{table}: {dotted_name} needs {', '.join(lacking)}; set {lacking[0]} there")
    return functools.partial(function, **options)


_BOTH = inspect.Parameter.POSITIONAL_OR_KEYWORD
