"""A traced step as plain data (what JSON has), and plain data as a traced step.

The data may come from an untrusted file, and FX generates Python code from a graph's names and constants. So reading
runs nothing and imports nothing: operators are looked up in the namespaces below, functions in a list, and each name
and string is checked. Note [What is stored of a graph]: of each node its name, operator, arguments, fake value (shape,
strides, offset, dtype, device, memory) and the metadata of graph/meta.py; neither source lines, nor other metadata of
the tracer. Groups are stored by axis, since their names differ between worlds; the device by its kind.
"""

from __future__ import annotations

import functools
import keyword
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

import torchtitan_graph.ops  # noqa: F401 (registers the operators)
from torchtitan_graph.capture.arguments import take_call
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.errors import UserError
from torchtitan_graph.formats.malformed import check, size
from torchtitan_graph.formats.origins import Origins, read_origins
from torchtitan_graph.graph.signature import Plain, Signature, Slot, TensorLayout, signature_of
from torchtitan_graph.ops.operator import GROUP_ARGUMENTS
from torchtitan_graph.torch_private.fake import FakeTensorMode
from torchtitan_graph.torch_private.tracing import FakeTensor, lazy_graph_module

NAMESPACES = ("aten", "prims", "_c10d_functional", "_dtensor", "symm_mem", "torchtitan_graph")
_FUNCTIONS: dict[str, Any] = {
    "getitem": operator.getitem,
    "flex_attention": torch.ops.higher_order.flex_attention,
    "flex_attention_backward": torch.ops.higher_order.flex_attention_backward,
}
# Strings among operators' arguments, besides groups' names: no file name is among them.
_WORDS = {"sum", "avg", "max", "min", "product", "mean", "amax", "amin", "floor", "trunc", "none", "tanh", "AUTO"}
_WORDS |= {"cpu", "cuda"}  # the destination of a copy
_DTYPES = {str(x).removeprefix("torch."): x for x in vars(torch).values() if isinstance(x, torch.dtype)}
_LAYOUTS = {"strided": torch.strided}
_FORMATS = {
    str(x).removeprefix("torch."): x for x in (torch.contiguous_format, torch.preserve_format, torch.channels_last)
}
_CONSTANTS = (bool, int, float, type(None))

_MOST_CONSTANTS = 64  # numbers of a constant tensor in a graph
# Limits of a step: a node takes 2.5 KB, and a rank of 405B has 200,000. Tensors are counted by distinct layout.
_MOST_NODES, _MOST_TENSORS, _MOST_TARGETS = 250_000, 10_000, 10_000

Places = Mapping[str, str]  # a group's name -> its name in every world, such as "mesh.fsdp"


# --- a traced step as data ------------------------------------------------------------------------------------------


def traced_to_data(
    traced: TracedResult, groups: Places, device: torch.device, layouts: Mapping[str, TensorLayout]
) -> Any:
    """Return a traced step as data; its arguments, options and autocast are left to the reader.

    Args:
        groups: the places of this world's process groups.
        device: the step's device.
        layouts: those of slots that are not plain tensors, by name: the parameters' and their gradients'.

    Raises:
        NotStored: names a part of the step that can't be stored.
    """
    signature = signature_of(traced.gm)
    if traced.sizes:
        raise _cannot("a step with sizes that differ, or numbers that it reads")
    writer = _Writer(groups, device)

    def slot(each: Slot) -> list[Any]:
        if layouts.get(each.name) is each.layout:
            return [each.name, each.kind]
        if not isinstance(each.layout, Plain):
            raise _cannot(f"the {each.kind} {each.name}, laid out as {each.layout}")
        return [each.name, each.kind, list(each.layout.shape), _short(each.layout.dtype)]

    result = writer.write(pytree.tree_unflatten([0] * traced.out_spec.num_leaves, traced.out_spec))
    if pytree.tree_structure(_containers(result)) != traced.out_spec:
        raise _cannot(f"a result in other containers than tuples, lists and dictionaries, {traced.out_spec}")
    return {
        "graph": writer.graph(traced.gm),
        **writer.tables(),
        "inputs": [slot(each) for each in signature.inputs],
        "outputs": [slot(each) for each in signature.outputs],
        "parameters": list(traced.parameters),
        "result": result,
        "out_constants": [[i, writer.write(x)] for i, x in traced.out_constants.items()],
        "modes": traced.modes,
    }


class NotStored(UserError):
    """A part of a step that can't be stored."""


def _cannot(what: str) -> NotStored:
    return NotStored(f"{what}, can't be stored")


def _short(x: Any) -> str:
    return str(x).removeprefix("torch.")


class _Writer:
    """Writes graphs as data, with shared values in tables."""

    def __init__(self, groups: Places, device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._tensors: dict[tuple, int] = {}
        self._origins = Origins()
        self._targets: dict[str, int] = {}
        self._modules: dict[GraphModule, int] = {}
        self._graphs: list[Any] = []

    def tables(self) -> dict[str, Any]:
        return {
            "modules": self._graphs,
            "tensors": list(self._tensors),
            **self._origins.tables(),
            "targets": list(self._targets),
        }

    def graph(self, gm: GraphModule) -> Any:
        held: dict[str, Any] = {}
        place: dict[Node, int] = {}
        nodes = []
        for node in gm.graph.nodes:
            place[node] = len(place)
            if node.op == "get_attr":
                held[str(node.target)] = self._held(node, getattr(gm, str(node.target)))
            write = functools.partial(self.write, place=place)
            target = self._target(node) if node.op == "call_function" else str(node.target)
            args, kwargs = self._arguments(node, write)
            nodes.append(
                [node.op, node.name, target, args, kwargs, write(node.meta.get("val")), self._origins.number(node)]
            )
        return {"nodes": nodes, "held": held}

    def _held(self, node: Node, x: Any) -> Any:
        if isinstance(x, GraphModule):
            if x not in self._modules:
                data = self.graph(x)
                self._modules[x] = len(self._graphs)
                self._graphs.append(data)
            return self._modules[x]
        is_plain = isinstance(x, Tensor) and not isinstance(x, FakeTensor) and not x.is_complex()
        if not is_plain or x.numel() > _MOST_CONSTANTS:
            raise _cannot(f"{node.target}, a {type(x).__name__} that the model closes over")
        return [list(x.shape), _short(x.dtype), self._device_of(x.device), x.flatten().tolist()]

    def _arguments(self, node: Node, write: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Write arguments, names of process groups as their places."""
        names = (
            [a.name for a in node.target._schema.arguments] if isinstance(node.target, torch._ops.OpOverload) else []
        )

        def argument(name: str, x: Any) -> Any:
            if name not in GROUP_ARGUMENTS or not isinstance(x, str):
                return write(x)
            if x not in self._groups:
                raise _cannot(f"{node}, which sends over a process group of its own")
            return {"group": self._groups[x]}

        args = [argument(names[i] if i < len(names) else "", x) for i, x in enumerate(node.args)]
        return args, {name: argument(name, x) for name, x in node.kwargs.items()}

    def _target(self, node: Node) -> int:
        target = node.target
        text = next((name for name, function in _FUNCTIONS.items() if target is function), "")
        if isinstance(target, torch._ops.OpOverload) and target.namespace in NAMESPACES:
            text = f"{target._schema.name}.{target._overloadname}"
        if not text and getattr(target, "namespace", "") == "profiler":
            raise _cannot(f"{node}, a mark for profilers, which the pass cleanup_update drops")
        if not text:
            raise _cannot(f"{node}, which calls {target}: legal are operators of {', '.join(NAMESPACES)}")
        return self._targets.setdefault(text, len(self._targets))

    def _device_of(self, device: torch.device) -> str:
        return "own" if device.type == self._device.type else device.type

    def write(self, x: Any, place: Mapping[Node, int] = {}) -> Any:  # noqa: B006 (only read)
        """Write a value: a constant as it is, a list as a list, all else as {kind: content}."""
        if isinstance(x, _CONSTANTS) or (isinstance(x, str) and x in _WORDS):
            return x
        if isinstance(x, Node):
            return {"node": place[x]}
        if isinstance(x, (tuple, list)):
            inside = [self.write(each, place) for each in x]
            return {"tuple": inside} if isinstance(x, tuple) else inside
        if isinstance(x, dict) and all(isinstance(key, str) for key in x):
            return {"dict": [[key, self.write(each, place)] for key, each in x.items()]}
        if isinstance(x, FakeTensor):
            if x.layout != torch.strided:
                raise _cannot(f"a tensor of layout {_short(x.layout)}")
            nbytes = x.untyped_storage().nbytes()
            key = (*map(tuple, (x.shape, x.stride())), x.storage_offset(), _short(x.dtype), self._device_of(x.device))
            return {"tensor": self._tensors.setdefault((*key, nbytes), len(self._tensors))}
        if isinstance(x, torch.device):
            return {"device": self._device_of(x)}
        for kind, known in (("dtype", _DTYPES), ("layout", _LAYOUTS), ("memory_format", _FORMATS)):
            if type(x).__name__ == kind and known.get(_short(x)) is x:
                return {kind: _short(x)}
        raise _cannot(f"{x!r}, a {type(x).__name__} among a graph's constants")


# --- data as a traced step --------------------------------------------------------------------------------------------


def traced_from_data(
    data: Any,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    groups: Mapping[str, str],
    device: torch.device,
    layouts: Mapping[str, TensorLayout],
) -> TracedResult:
    """Return the stored step.

    Args:
        arguments, keywords: like those of its trace and its calls.
        groups: the names of this world's process groups, by place.
        device, layouts: as in `traced_to_data`.

    Raises:
        Malformed, or another exception: the data is not a stored step.
    """
    reader = _Reader(data, groups, device)
    gm = reader.graph(data["graph"])

    def slot(name: str, kind: str, *plain: Any) -> Slot:
        check(isinstance(name, str) and isinstance(kind, str), "a slot's name")
        if not plain:
            return Slot(name, kind, layouts[name])
        shape, dtype = plain
        return Slot(name, kind, Plain(tuple(map(size, shape)), _DTYPES[dtype]))

    signature = Signature(tuple(slot(*each) for each in data["inputs"]), tuple(slot(*each) for each in data["outputs"]))
    found = len(gm.graph.find_nodes(op="placeholder")), len(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    said = tuple(sum(each.layout.num_tensors for each in slots) for slots in (signature.inputs, signature.outputs))
    check(found == said, "a graph's inputs and outputs")
    gm.meta["signature"] = signature
    given = take_call(tuple(map(_identifier, data["parameters"])), arguments, keywords)
    names = [name for i, name in enumerate(given.names) if i not in given.constants]
    check([each.name for each in signature.inputs if each.kind == "input"] == names, "a step's arguments")
    out_spec = pytree.tree_structure(_containers(data["result"]))
    out_constants = {size(i): reader.read(x, []) for i, x in data["out_constants"]}
    check(out_spec.num_leaves == len(signature.outputs) + len(out_constants), "a step's result")
    check(all(type(x) is bool for x in data["modes"].values()), "modes")
    return TracedResult(
        gm,
        given.in_spec,
        given.arguments,
        given.parameters,
        given.names,
        given.constants,
        out_spec,
        out_constants,
        {},
        dict(data["modes"]),
        {},
    )


def _identifier(x: Any) -> str:
    """Return the name, after a check that it may be in Python code."""
    check(isinstance(x, str) and x.isascii() and x.isidentifier() and not keyword.iskeyword(x), f"the name {x!r}")
    return x


class _Reader:
    def __init__(self, data: Any, groups: Mapping[str, str], device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._num_nodes = 0
        check(len(data["tensors"]) <= _MOST_TENSORS and len(data["targets"]) <= _MOST_TARGETS, "too many values")
        with self._fake_mode:
            self._tensors = [self._tensor(*each) for each in data["tensors"]]
        self._targets = [_find_target(each) for each in data["targets"]]
        self._origins = read_origins(data)
        self._modules: list[GraphModule] = []
        for each in data["modules"]:  # a module comes after those that it contains
            self._modules.append(self.graph(each))

    def graph(self, data: Any) -> GraphModule:
        root, graph, nodes = torch.nn.Module(), Graph(), list[Node]()
        for name, x in data["held"].items():
            check(not hasattr(root, _identifier(name)), f"the name {name!r}")
            if isinstance(x, int):
                root.add_module(name, self._modules[size(x)])
            else:
                root.register_buffer(name, self._constant(*x), persistent=False)
        self._num_nodes += len(data["nodes"])
        check(self._num_nodes <= _MOST_NODES, "too many nodes")
        for op, name, target, args, kwargs, val, origin in data["nodes"]:
            if op == "call_function":
                found = self._targets[size(target)]
            else:
                found = _identifier(target)
                legal = {"placeholder": not args, "get_attr": target in data["held"], "output": target == "output"}
                check(legal.get(op, False), f"the operation {op!r} of {target!r}")
            inputs = tuple(self.read(each, nodes) for each in args)
            named = {_identifier(key): self.read(each, nodes) for key, each in kwargs.items()}
            node = graph.create_node(op, found, inputs, named, name=_identifier(name))
            check(node.name == name, f"the name {name!r}, which is taken")
            if op != "output":
                node.meta["val"] = self.read(val, [])
            node.meta |= self._origins[size(origin)]
            nodes.append(node)
        check(bool(nodes) and nodes[-1].op == "output", "a graph without an end")
        return lazy_graph_module(root, graph)

    def _tensor(self, shape: Any, stride: Any, offset: Any, dtype: Any, device: Any, nbytes: Any) -> Tensor:
        sizes, strides = [size(x) for x in shape], [size(x) for x in stride]
        check(len(sizes) == len(strides), "strides")
        kind, where = _DTYPES[dtype], self._read_device(device)
        reach = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) + 1 if 0 not in sizes else 0
        check((size(offset) + reach) * kind.itemsize <= size(nbytes), "a tensor's memory")
        whole = torch.empty(nbytes // kind.itemsize, dtype=kind, device=where)
        return whole.as_strided(sizes, strides, offset)

    def _constant(self, shape: Any, dtype: Any, device: Any, values: Any) -> Tensor:
        check(len(values) <= _MOST_CONSTANTS and all(type(x) in _CONSTANTS for x in values), "a constant")
        return (
            torch.tensor(values, dtype=_DTYPES[dtype]).reshape([size(x) for x in shape]).to(self._read_device(device))
        )

    def _read_device(self, kind: Any) -> torch.device:
        check(kind in ("own", "cpu", "meta"), f"the device {kind!r}")
        return self._device if kind == "own" else torch.device(kind)

    def read(self, x: Any, nodes: list[Node]) -> Any:
        if isinstance(x, _CONSTANTS) or (isinstance(x, str) and x in _WORDS):
            return x
        if isinstance(x, list):
            return [self.read(each, nodes) for each in x]
        kind, held = _only(x)
        if kind == "node":
            return nodes[size(held)]
        if kind == "tensor":
            return self._tensors[size(held)]
        if kind == "tuple":
            return tuple(self.read(each, nodes) for each in held)
        if kind == "dict":
            return {_identifier(key): self.read(each, nodes) for key, each in held}
        if kind == "group":
            return self._groups[held]
        if kind == "device":
            return self._read_device(held)
        words: dict[str, Mapping[str, Any]] = {"dtype": _DTYPES, "layout": _LAYOUTS, "memory_format": _FORMATS}
        return words[kind][held]


def _only(x: Any) -> tuple[str, Any]:
    """Return a value's kind and content."""
    check(isinstance(x, dict) and len(x) == 1, f"the value {x!r:.80}")
    return next(iter(x.items()))


def _containers(x: Any) -> Any:
    """Return the nested tuples, lists and dictionaries of a result, with 0 for each tensor. Keys are parameters' names:
    they are in no code."""
    if isinstance(x, list):
        return list(map(_containers, x))
    if not isinstance(x, dict):
        check(x == 0, "a step's result")
        return x
    kind, held = _only(x)
    if kind == "tuple":
        return tuple(map(_containers, held))
    check(kind == "dict" and all(isinstance(key, str) for key, _ in held), "a step's result")
    return {key: _containers(each) for key, each in held}


def _find_target(text: str) -> Any:
    if text in _FUNCTIONS:
        return _FUNCTIONS[text]
    namespace, _, rest = text.partition("::")
    name, _, overload = rest.partition(".")
    check(namespace in NAMESPACES, f"the operator {text!r:.80}")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    check(isinstance(packet, torch._ops.OpOverloadPacket) and overload in packet.overloads(), f"the operator {text!r}")
    return getattr(packet, overload)
