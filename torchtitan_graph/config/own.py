"""Import of the user's own classes and functions, which options give by dotted names."""

import importlib
import inspect
import sys
from typing import Any

from torchtitan_graph.config.nearest import did_you_mean
from torchtitan_graph.errors import UserError


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
