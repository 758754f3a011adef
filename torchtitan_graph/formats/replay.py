"""Run a graph that formats/show.py wrote to a file, or read it back."""

from __future__ import annotations

import ast
import operator
import os
import re
import runpy
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

# Registers operators that may be in a file.
import torchtitan_graph.ops  # noqa: F401 (registers the operators)
from torchtitan_graph.errors import UserError
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.signature import Plain, Signature, Slot
from torchtitan_graph.small_files import read_text
from torchtitan_graph.torch_private.distributed import init_fake_process_group, name_group
from torchtitan_graph.torch_private.fake import FakeTensorMode

_INPUT = re.compile(r"(\w+) (\w+)\[([\d, ]*)\] (.*)")
_WORDS = re.compile(r"  # .*?\b(forward|backward)\b(?: (?!at )([\w.]+)(?= |$))?(.*)$")
_MARK = re.compile(r"(\w+)='([^']*)'")


def not_kept(what: str) -> Callable[..., NoReturn]:
    """Return a function that raises a UserError, in place of a value that a file can't store."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UserError(f"{what}, is not kept in this file: a graph runs from a file without it")

    return refuse


class _Python:
    """Placeholder for the Python functions of a graph, such as Inductor's."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        return not_kept(f"{name}, a Python function")


python = _Python()


@torch.no_grad()
def run_file(path: str) -> None:
    """Run a file's graph on random inputs, and print its outputs: one of its ranks alone, whose collectives return
    uninitialized memory; or under torchrun, with as many processes, all of them."""
    names = runpy.run_path(path)
    join_ranks(names)
    inputs = random_inputs({name: _input(words) for name, words in names["graph"].__annotations__.items()})
    for name, x in names["graph"](**inputs).items():
        norm = f", norm {x.double().norm():.6g}" if isinstance(x, Tensor) else ""
        print(f"{name}: {str(x.dtype).removeprefix('torch.')}{list(x.shape)}{norm}")
    dist.destroy_process_group()


def join_ranks(names: Mapping[str, Any]) -> None:
    """Initialize the process group of a file's graph, with its groups' names.

    Raises:
        UserError: the file's groups can't be made of torchrun's ranks.
    """
    size, rank = names["NUM_RANKS"], names["RANK"]
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started == 1:
        init_fake_process_group(size, rank)
    elif started != size or any(ranks != list(range(size)) for ranks in names["GROUPS"].values()):
        raise UserError(f"{started} processes: this graph is rank {rank}'s of {size}, so that only one can run it")
    else:
        dist.init_process_group("gloo")
    for name, ranks in names["GROUPS"].items():
        name_group(name, dist.new_group(ranks))


def random_inputs(layouts: Mapping[str, Plain], rank: int = 0) -> dict[str, Tensor]:
    """Return random inputs by name: small floats, different on each rank; integers 0 and 1, the same on all; a scalar
    integer is 8, and booleans are true, so that a mask hides nothing."""
    return {name: _random(name, layout, rank) for name, layout in layouts.items()}


def _random(name: str, layout: Plain, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if layout.dtype == torch.bool:
        return torch.ones(layout.shape, dtype=torch.bool)
    if not layout.dtype.is_floating_point:
        few = torch.randint(2, layout.shape, generator=generator) if layout.shape else torch.tensor(8)
        return few.to(layout.dtype)
    generator.manual_seed(generator.initial_seed() + rank)
    return (torch.randn(layout.shape, generator=generator) * 0.05).to(layout.dtype)


def _input(words: str) -> Plain:
    return _slot(words).layout  # type: ignore[return-value]


def _slot(words: str) -> Slot:
    kind, dtype, sizes, name = _INPUT.fullmatch(words).groups()  # type: ignore[union-attr]
    shape = tuple(int(size) for size in sizes.split(",") if size.strip())
    return Slot(name, kind, Plain(shape, getattr(torch, dtype)))


def read(path: Path) -> GraphModule:
    """Return the graph in a file: nodes, their values' layouts, their metadata, the signature. A file is Python, and is
    run: read only files that you trust.

    Raises:
        UserError: the file contains no graph, or one with a call that can't be stored in a file.
    """
    try:
        text, names = read_text(path), runpy.run_path(str(path))
        function = next(x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef) and x.name == "graph")
    except (OSError, SyntaxError, ValueError, RecursionError, StopIteration) as error:
        raise UserError(f"{path}: is no graph that debug.dump_graphs wrote: {error!r}") from error
    lines, root, graph = text.splitlines(), nn.Module(), Graph()
    known: dict[str, Any] = dict(names)
    fake_mode, inputs = FakeTensorMode(), []
    for name, words in names["graph"].__annotations__.items():
        inputs.append(_slot(words))
        layout = _input(words)
        known[name] = graph.create_node("placeholder", name, name=name)
        meta.write(known[name], phase="forward", module="")
        with fake_mode:
            known[name].meta["val"] = torch.empty(layout.shape, dtype=layout.dtype)
    for name, constant in names.items():
        if isinstance(constant, Tensor):
            root.register_buffer(name, constant)
            known[name] = graph.get_attr(name)
            known[name].meta["val"] = fake_mode.from_tensor(constant)
    *calls, returned = function.body
    for statement in calls:
        assert isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        name, call = statement.targets[0].id, statement.value
        known[name] = _call(graph, name, call, known, fake_mode)  # type: ignore[arg-type]
        _write_words(known[name], lines[statement.end_lineno - 1])  # type: ignore[operator]
    assert isinstance(returned, ast.Return) and isinstance(returned.value, ast.Dict)
    pairs = zip(returned.value.keys, returned.value.values, strict=True)
    results = {ast.literal_eval(key or ""): _eval(x, known) for key, x in pairs}
    graph.output(list(results.values()))
    gm = GraphModule(root, graph)
    gm.meta["signature"] = Signature(tuple(inputs), tuple(plain_slot(name, x) for name, x in results.items()))
    return gm


def plain_slot(words: str, node: Node) -> Slot:
    """Return the slot of an output, or an input, that is a plain tensor: `words` are its kind and its name."""
    kind, name = words.split(" ", 1)
    return Slot(name, kind, Plain(tuple(_value(node).shape), _value(node).dtype))


def _eval(expression: ast.expr, known: dict[str, Any]) -> Any:
    return eval(ast.unparse(expression), known)


def _call(graph: Graph, name: str, call: Any, known: dict[str, Any], fake_mode: FakeTensorMode) -> Node:
    kwargs: dict[str, Any] = {}
    if isinstance(call, ast.Subscript):
        target, args = operator.getitem, (_eval(call.value, known), _eval(call.slice, known))
    else:
        target, args = _eval(call.func, known), tuple(_eval(x, known) for x in call.args)
        kwargs = {str(x.arg): _eval(x.value, known) for x in call.keywords}
    if any(callable(x) for x in pytree.tree_leaves((args, kwargs)) if not isinstance(x, torch.dtype)):
        raise UserError(f"{name} takes a function: a graph with flex attention can be run from a file, but not read")
    node = graph.create_node("call_function", target, args, kwargs, name)
    with fake_mode:
        node.meta["val"] = target(*map_arg(args, _value), **map_arg(kwargs, _value))
    return node


def _value(node: Node) -> Any:
    return node.meta["val"]


def _write_words(node: Node, line: str) -> None:
    found = _WORDS.search(line.rpartition(" | ")[0] or line)
    if found:
        meta.write(node, phase=found[1], module=found[2] or "", **dict(_MARK.findall(found[3])))
