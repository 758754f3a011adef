"""A call's arguments and result as pytree leaves: their names, and checks that a graph can take them."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.optim import Optimizer

from torchtitan_graph.errors import UserError, listed
from torchtitan_graph.ops import flex_strips  # noqa: F401 (uncompiled flex attention, for masks as arguments)
from torchtitan_graph.torch_private.flex import mask_parts, mask_whole

_CONSTANT_TYPES = (int, float, bool, str, type(None))


def _mask_with_keys(mask: BlockMask) -> tuple[list[tuple[pytree.KeyEntry, Any]], tuple]:
    parts, remainder = mask_parts(mask)
    return [(pytree.GetAttrKey(name), x) for name, x in parts.items()], remainder


def _mask_leaves(mask: BlockMask) -> tuple[list[Any], tuple]:
    parts, remainder = mask_parts(mask)
    return list(parts.values()), remainder


if BlockMask not in pytree.SUPPORTED_NODES:
    # A mask is an input like any other: a batch with other documents then runs through the same graph.
    pytree.register_pytree_node(BlockMask, _mask_leaves, mask_whole, flatten_with_keys_fn=_mask_with_keys)


class Given(NamedTuple):
    """The arguments that a function is traced for; `owners` are the names of the leaves' arguments, all but these and
    `leaves` as in `TracedResult`."""

    leaves: list[Any]
    in_spec: pytree.TreeSpec
    arguments: dict[str, pytree.TreeSpec]
    parameters: tuple[str, ...]
    names: tuple[str, ...]
    constants: dict[int, Any]
    owners: list[str]

    @property
    def by_name(self) -> dict[str, Any]:
        return dict(zip(self.names, self.leaves, strict=True))


def take_call(parameters: tuple[str, ...], args: tuple, kwargs: dict[str, Any]) -> Given:
    """Flatten a call's arguments; raise a UserError for those that a graph can't take."""
    paths, in_spec = flatten_with_path(ordered(args, kwargs))
    leaves = [leaf for _, leaf in paths]
    names = tuple(_leaf_name(path, parameters) for path, _ in paths)
    arguments = {name: pytree.tree_structure(x) for name, x in _by_name(args, kwargs, parameters).items()}
    constants = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
    for name, leaf in zip(names, leaves, strict=True):
        _check_argument(name, leaf)
    owners = [name for name, spec in arguments.items() for _ in range(spec.num_leaves)]
    return Given(leaves, in_spec, arguments, parameters, names, constants, owners)


def ordered(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return a call's arguments with sorted keywords."""
    return args, dict(sorted(kwargs.items()))


def positional_parameters(fn: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin, such as torch.sin, has no signature
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def _by_name(args: tuple, kwargs: dict[str, Any], parameters: tuple[str, ...]) -> dict[str, Any]:
    """Return a call's arguments by the function's parameter names, in flattening order."""
    names = (*parameters[: len(args)], *(f"args[{i}]" for i in range(len(parameters), len(args))))
    return dict(zip(names, args, strict=True)) | dict(sorted(kwargs.items()))


def _leaf_name(path: tuple, parameters: tuple[str, ...]) -> str:
    """Return the name of a leaf of (args, kwargs): `batch.tokens_BL`, not `args[0].tokens_BL`."""
    kind, first, *rest = path
    if kind.idx == 1:
        return f"{first.key}{pytree.keystr(tuple(rest))}"
    name = parameters[first.idx] if first.idx < len(parameters) else f"args[{first.idx}]"
    return name + pytree.keystr(tuple(rest))


def leaves_by_name(
    args: tuple,
    kwargs: dict[str, Any],
    parameters: tuple[str, ...],
    arguments: Mapping[str, pytree.TreeSpec],
    names: tuple[str, ...],
) -> list[Any]:
    """Return the leaves of a call in the traced order, where its arguments have another form: by keyword, not by
    position, or the reverse. The traced arguments are those of `Given`.

    Raises:
        UserError: names the arguments, or leaves, that differ.
    """
    given, traced_leaves = _by_name(args, kwargs, parameters), set(names)
    found: dict[str, Any] = {}
    words = []
    for name, value in given.items():
        if name not in arguments:
            words.append(f"{name} was not traced{_nearest(name, arguments)}")
            continue
        leaves = {name + pytree.keystr(path): leaf for path, leaf in flatten_with_path(value)[0]}
        own = {leaf for leaf in traced_leaves if leaf == name or leaf.startswith((f"{name}[", f"{name}."))}
        words += [f"{leaf} is missing" for leaf in names if leaf in own and leaf not in leaves]
        words += [f"{leaf} was not traced{_nearest(leaf, own)}" for leaf in leaves if leaf not in own]
        if own == leaves.keys() and pytree.tree_structure(value) != arguments[name]:
            words.append(f"{name} has another structure: its keys in another order, or other containers or constants")
        found |= leaves
    words = [f"{name} is missing" for name in arguments if name not in given] + words
    if words:
        raise UserError(
            f"the call's arguments are not those traced: {listed(words, separator='; ')}. Trace again for others"
        )
    return [found[name] for name in names]


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _check_argument(name: str, leaf: Any) -> None:
    if isinstance(leaf, nn.Module):
        raise UserError(f"{name} is an nn.Module: pass it as module=, then its parameters become inputs of the graph")
    if isinstance(leaf, Optimizer):
        raise UserError(f"{name} is an optimizer: pass it as optimizer=, then its state becomes inputs of the graph")
    if isinstance(leaf, Tensor):
        _check_dense(name, leaf)
    elif not isinstance(leaf, _CONSTANT_TYPES):
        raise UserError(
            f"{name} is a {type(leaf).__name__}; a traced function takes tensors and int, float, bool, str or None: "
            f"capture it in the function's closure{_how_to_register(type(leaf))}"
        )


def check_result(name: str, leaf: Any) -> None:
    if isinstance(leaf, Tensor):
        _check_dense(name, leaf)
    elif isinstance(leaf, torch.SymFloat | torch.SymBool):
        raise UserError(f"{name} is {leaf}, a number that only a run knows: return the tensor that it is read from")
    elif not isinstance(leaf, (*_CONSTANT_TYPES, torch.SymInt)):
        raise UserError(
            f"{name} is a {type(leaf).__name__}; a traced function gives tensors and int, float, bool, str or None: "
            f"return what it holds{_how_to_register(type(leaf))}"
        )


def _how_to_register(kind: type) -> str:
    """Return a hint how to register a user's class as a pytree node; "" for other classes."""
    if kind.__module__.partition(".")[0] in ("builtins", "numpy", "torch"):
        return ""
    if dataclasses.is_dataclass(kind):
        return f", or register its class: torch.export.register_dataclass({kind.__name__})"
    return (
        f", or register its class: torch.utils._pytree.register_pytree_node({kind.__name__}, flatten, unflatten) "
        "if it holds tensors, "
        f"torch.utils._pytree.register_constant({kind.__name__}) if it holds none and has __eq__"
    )


def flatten_with_path(tree: Any) -> tuple[list[tuple[Any, Any]], pytree.TreeSpec]:
    """Return the leaves of a tree, each with its path, and the structure. Leaves of a class that was registered without
    names are numbered."""
    try:
        return pytree.tree_flatten_with_path(tree)
    except ValueError as error:
        if "flatten_with_keys_fn" not in str(error):
            raise
    return list(_numbered((), tree)), pytree.tree_structure(tree)


def _numbered(path: tuple[pytree.KeyEntry, ...], tree: Any) -> Iterator[tuple[tuple[pytree.KeyEntry, ...], Any]]:
    children, spec = pytree.tree_flatten(tree, is_leaf=lambda x: x is not tree)
    if spec.is_leaf():
        yield path, tree
        return
    keys: list[tuple[pytree.KeyEntry, ...]] = [(pytree.SequenceKey(i),) for i in range(len(children))]
    with contextlib.suppress(ValueError):  # of a class without names
        keys = [key for key, _ in pytree.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]]
    for key, child in zip(keys, children, strict=True):
        yield from _numbered((*path, *key), child)


def _check_dense(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise UserError(f"{name} is a {kind} tensor: a traced function takes and gives dense ones")
