"""A node's place in the model's call hierarchy: modules and functions, interleaved.

Note [Call hierarchy]
A scope is one call of a module, or of a user's function. A node's place is the scopes that it was made in, the
outermost first. `count` is how many earlier calls of the same module, or of the same function, had the same parent
scope and made at least one node. Nothing outside the parent matters. So a block that is copied from another, or is
recomputed, has the counts that it had; a call that makes no node is not counted; and a new trace's graph begins at
0. A generator's resumptions are one call.

A backward node has a forward origin, the place of the node whose gradient it computes (`fwd_call_hierarchy`). Its own
place is the same, and below it the calls inside autograd's engine: a function's backward, or recomputation; a call by
the engine itself has the count of its origin, or 0.

Left out are functions of torch, of the standard library, of this project's tracer (`graph/`, `parallel/`) and of
generated code; comprehensions, which have no frame from Python 3.12 on; decorators' closures, which take (*args,
**kwargs); and a module's own `forward` and `__call__`, which are the module, with what decorates them.

Method: when a node is made, Python's frames are walked from the innermost outwards, to the first that the last node had
too; not to a generator's, which may have another caller now. References to the last node's frames are kept, so that no
other frame has their `id`, and also to the callables that are counted. The k-th frame of the wrapper of a module's call
belongs to the k-th module that runs.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import nn
from torch.fx import Node

from torchtitan_graph.errors import UserError
from torchtitan_graph.torch_private.tracing import TRACERS

_PARALLEL = os.path.join(Path(__file__).parents[1] / "parallel", "")
_LEFT_OUT = (*TRACERS, _PARALLEL, "<eval_with_key>", "<frozen")  # the latter two: generated code
_STANDARD = os.path.join(sysconfig.get_path("stdlib"), "")
_TAKES_ANYTHING = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


class Entry(NamedTuple):
    """One scope of a place. `type`, `qualname`, `path` of a module, and `count` are a contract; the rest is for
    display.

    type      "module" | "function"
    name      a module's attribute, "" for the model; a function's name
    qualname  of a module's class, or of a function: its Python module and qualified name
    path      a module's full path in the model; a function's file and line
    count     see Note [Call hierarchy]
    """

    type: str
    name: str
    qualname: str
    path: str
    count: int  # type: ignore[assignment]  # a tuple's method has that name

    def __str__(self) -> str:
        last = self.qualname.rpartition(".")[2]
        text = f"{self.name}:{last}" if self.type == "module" else f"{last}()"
        return f"{text}#{self.count}" if self.count else text


Place = tuple[Entry, ...]


def shown(place: Place | tuple[Place, ...]) -> str:
    """Return a place as text: `layers.0:Block > attention:Attention > apply_rope()#1`; several, as
    `call_hierarchy(node)` returns, with semicolons between them."""
    if isinstance(place, (Node, Entry)):
        raise UserError(f"a {type(place).__name__} is not a place: write shown(call_hierarchy(node))")
    if not all(isinstance(entry, Entry) for entry in place):
        return "; ".join(shown(each) for each in place)  # type: ignore[arg-type]
    return " > ".join(map(str, place))


class OpenScope:
    """A running call. All nodes that are made in it share its `place`. Calls in autograd's engine are not counted: each
    belongs to another forward node."""

    def __init__(self, place: Place, counts: bool = True) -> None:
        self.place, self._is_counting = place, counts
        self._counts: dict[int, tuple[object, int]] = {}  # by the callable's `id`: the callable, its number of calls
        self._generators: dict[int, tuple[FrameType, OpenScope]] = {}  # started in this scope: they are resumed

    def module(self, name: str, module: nn.Module) -> OpenScope:
        """Return the scope of a module's call."""
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        return self._child(module, Entry("module", name.rpartition(".")[2], kind, name, 0))

    def function(self, frame: FrameType) -> OpenScope:
        """Return the scope of a function's call, or a running generator's scope."""
        if id(frame) in self._generators:
            return self._generators[id(frame)][1]
        code = frame.f_code
        # Python 3.10 has no `co_qualname`.
        qualname = f"{frame.f_globals.get('__name__')}.{getattr(code, 'co_qualname', code.co_name)}"
        place = f"{code.co_filename}:{code.co_firstlineno}"
        scope = self._child(code, Entry("function", code.co_name, qualname, place, 0))
        if code.co_flags & inspect.CO_GENERATOR:
            self._generators[id(frame)] = frame, scope
        return scope

    def _child(self, called: object, entry: Entry) -> OpenScope:
        _, count = self._counts.get(id(called), (called, 0)) if self._is_counting else (called, 0)
        self._counts[id(called)] = called, count + 1
        return OpenScope((*self.place, entry._replace(count=count)))


class ScopeRecorder:
    """Records the stack of scopes during a trace.

    Args:
        names: the modules' names, by their identity.
        place, module: the scope that the traced function runs in, and its module, for a block that is traced alone.
    """

    def __init__(self, names: dict[int, str], place: Place = (), module: nn.Module | None = None) -> None:
        self._names, self._root, self.module = names, OpenScope(place), module
        self._base: CodeType | None = None
        self._engine: CodeType | None = None
        self._wrapper: CodeType | None = None
        self._running: list[nn.Module] = []
        self._held: list[tuple[FrameType, OpenScope]] = []  # frames of the last node, the outermost first
        self._depth: dict[int, int] = {}  # a held frame's index in the list, by its identity
        self._is_scope: dict[int, tuple[CodeType, bool]] = {}  # by identity: hashing a code object hashes all of it
        self._forwards: dict[type, list[CodeType]] = {}  # by class

    def of(self, module: nn.Module, place: Place) -> ScopeRecorder:
        """Return a recorder for tracing a module's call alone, at a place."""
        return ScopeRecorder(self._names, place, module)

    def wrap(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs a call of its first argument, a module, and keeps it on the stack of running
        modules."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._running.append(module)
            try:
                return inner(module, *args, **kwargs)
            finally:
                self._running.pop()

        self._wrapper = call.__code__
        return call

    @contextlib.contextmanager
    def running(self, base: CodeType, engine: CodeType) -> Iterator[None]:
        """Record scopes inside the function with the code `base`; `engine` is the code of the function that runs
        autograd's engine."""
        self._base, self._engine = base, engine
        try:
            yield
        finally:
            self._held.clear()  # frames hold their tensors
            self._depth.clear()

    def place(self) -> Place:
        """Return the place of a node made now; in autograd's engine, only the part inside it."""
        new: list[FrameType] = []
        frame: FrameType | None = sys._getframe(1)
        depth = -1
        while frame is not None and frame.f_code is not self._base:
            depth = -1 if frame.f_code.co_flags & inspect.CO_GENERATOR else self._depth.get(id(frame), -1)
            if depth >= 0:
                break
            if self._makes_scope(frame.f_code):
                new.append(frame)
            frame = frame.f_back
        for old, _ in self._held[depth + 1 :]:
            del self._depth[id(old)]
        del self._held[depth + 1 :]
        number = len(self._running) - sum(each.f_code is self._wrapper for each in new)
        for each in reversed(new):
            parent = self._held[-1][1] if self._held else self._root
            owner = self._running[number - 1] if number else self.module
            if each.f_code is self._engine:
                scope = OpenScope((), counts=False)
            elif each.f_code is self._wrapper:
                module = self._running[number]
                scope, number = parent.module(self._names.get(id(module), ""), module), number + 1
            elif owner is not None and any(each.f_code is code for code in self._forward_of(type(owner))):
                scope = parent
            else:
                scope = parent.function(each)
            self._depth[id(each)] = len(self._held)
            self._held.append((each, scope))
        return self._held[-1][1].place if self._held else self._root.place

    def _forward_of(self, kind: type[nn.Module]) -> list[CodeType]:
        """Return the code of a class' `forward` and `__call__`, and of the functions that they wrap."""
        if kind not in self._forwards:
            found: list[CodeType] = []
            for called in (kind.forward, kind.__call__):
                function: Any = called
                while function is not None:
                    found += [code] if (code := getattr(function, "__code__", None)) is not None else []
                    function = getattr(function, "__wrapped__", None)
            self._forwards[kind] = found
        return self._forwards[kind]

    def _makes_scope(self, code: CodeType) -> bool:
        if id(code) not in self._is_scope:
            file = code.co_filename
            left_out = (
                file.startswith(_LEFT_OUT)
                or (file.startswith(_STANDARD) and "site-packages" not in file)
                or (file == "<string>" and code.co_name.startswith(("<", "__")))  # generated by a dataclass or FX
                or (bool(code.co_freevars) and code.co_flags & _TAKES_ANYTHING == _TAKES_ANYTHING)
                or code.co_name in ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
            )
            self._is_scope[id(code)] = code, code is self._wrapper or code is self._engine or not left_out
        return self._is_scope[id(code)][1]


def below(origin: Place, inside: Place) -> Place:
    """Append the scopes inside autograd's engine to a forward origin; a recomputed module replaces its own scope."""
    at = next((i for i in reversed(range(len(origin))) if inside and origin[i][:4] == inside[0][:4]), None)
    return (*origin, *inside) if at is None else (*origin[: at + 1], *inside[1:])


def call_hierarchy(node: Node) -> tuple[Place, ...]:
    """Return a node's places: one, or several for a node that a pass merged from several; none where they were not
    recorded, and for the graph's inputs and output."""
    return meta_of(node).get("call_hierarchy", ())


def fwd_call_hierarchy(node: Node) -> tuple[Place, ...]:
    """Return the forward origin of a backward node: the places of the forward nodes whose gradient it computes."""
    return meta_of(node).get("fwd_call_hierarchy", ())


def meta_of(node: Node) -> dict[str, Any]:
    """Return a node's metadata; check that it is a node, as a graph also has a `meta`."""
    if not isinstance(node, Node):
        raise UserError(f"a {type(node).__name__} is not a node of a graph: write it for node in traced.gm.graph.nodes")
    return node.meta
