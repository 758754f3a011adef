"""Times of a graph's operators on this CPU: each different one is run once, on random inputs.

Note [Replay]
Operators are the same where target, shapes, strides, dtypes and constants are; a model has some hundred of them,
however deep it is. Each runs a few times with its inputs in the caches, and a few times with caches filled by other
data. A step is between the two: its inputs were computed some operators ago. How far between is one number, `COLDNESS`,
fitted once, on one model (docs/log/forecasts.md says which, and when). A process has mostly returned a step's memory to
the system after it, so the next step's peak also costs page faults, at a rate that is measured as well.

With one thread a call's time is that of its thread, which other processes on the machine don't lengthen much.

Ranks of one machine share its memory and its larger caches. So where a job has several, as many cores as it takes make
the same call at the same time, on numbers of their own.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from torchtitan_graph.analysis.cost import WAIT
from torchtitan_graph.analysis.traffic import group_of
from torchtitan_graph.ops.operator import operator_of

COLDNESS = 0.3  # coldness of a step's caches: 0 as right after the same call, 1 as after other work
_EVICTED_BYTES = 24 << 20  # more than a core's own caches
_BUFFER = 32 << 20  # bytes: more than any cache
_LEAST_S, _MOST_CALLS = 0.01, 9  # a call is repeated for at least so long, and at most so often

aten = torch.ops.aten
_FLEX = (torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward)


@dataclass(frozen=True)
class Times:
    """Seconds of one call: with its inputs in the caches, and without."""

    warm: float
    cold: float

    def at(self, coldness: float = COLDNESS) -> float:
        return self.warm + coldness * (self.cold - self.warm)


class Replay:
    """The measured times of operators on this CPU, shared by all graphs."""

    def __init__(self, num_threads: int = 1, num_beside: int = 0) -> None:
        """Set the number of threads of a call, and the number of other cores that make the same call meanwhile."""
        self.num_threads, self.num_beside = num_threads, num_beside
        self.clock = time.thread_time if num_threads == 1 else time.perf_counter
        self.known: dict[object, Times] = {}

    def times(self, node: Node) -> Times:
        """Return a node's time, run if no equal one was before; 0 for inputs, waits and collectives."""
        if not is_run(node):
            return Times(0.0, 0.0)
        key = key_of(node)
        if key not in self.known:
            self.known[key] = self._run(node)
        return self.known[key]

    def learn(self, graphs: Iterable[GraphModule], progress: Callable[[int, int], None] | None = None) -> int:
        """Run every different operator of some graphs; return the number of new ones. `progress` is called with the
        number done."""
        nodes = {key_of(node): node for gm in graphs for node in gm.graph.nodes if is_run(node)}
        new = {key: node for key, node in nodes.items() if key not in self.known}
        for done, (key, node) in enumerate(new.items(), start=1):
            self.known[key] = self._run(node)
            if progress is not None:
                progress(done, len(new))
        return len(new)

    def _run(self, node: Node) -> Times:
        threads, state = torch.get_num_threads(), torch.get_rng_state()
        torch.set_num_threads(self.num_threads)
        try:
            with torch.no_grad():
                call = _call_of(node)
                call()
                with self.company(lambda: _call_of(node)):
                    return Times(self._seconds(call, is_cold=False), self._seconds(call, is_cold=True))
        except Exception as error:
            raise RuntimeError(f"{node.name}, {node.target}, can't be run on made-up numbers") from error
        finally:
            torch.set_num_threads(threads)
            torch.set_rng_state(state)

    @contextlib.contextmanager
    def company(self, make: Callable[[], Callable[[], object]]) -> Iterator[None]:
        """Run the calls that `make` returns on other cores, each on its own data, over and over inside the context."""
        stop = threading.Event()

        def work(call: Callable[[], object]) -> None:
            torch.set_num_threads(self.num_threads)
            with torch.no_grad():
                while not stop.is_set():
                    call()

        threads = [threading.Thread(target=work, args=(make(),), daemon=True) for _ in range(self.num_beside)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def _seconds(self, call: Callable[[], object], is_cold: bool) -> float:
        times: list[float] = []
        least, most = (3, 3) if is_cold else (5, _MOST_CALLS)
        while len(times) < most and (len(times) < least or sum(times) < _LEAST_S):
            if is_cold:
                _evict()
            begin = self.clock()
            result = call()
            times.append(self.clock() - begin)
            del result
        # The lower quartile, since some calls wait for new pages from the system.
        return max(0.0, sorted(times)[len(times) // 4] - self._of_the_clock)

    @functools.cached_property
    def _of_the_clock(self) -> float:
        pairs = [(self.clock(), self.clock()) for _ in range(99)]
        return statistics.median(end - begin for begin, end in pairs)

    @functools.cached_property
    def seconds_per_new_byte(self) -> float:
        """Seconds per byte of new memory, which the system maps and clears on first use."""
        first = statistics.median(self._filled(torch.empty(2 * _BUFFER, dtype=torch.uint8)) for _ in range(5)) / 2
        return max(0.0, first - self._again) / _BUFFER

    @functools.cached_property
    def seconds_per_byte(self) -> float:
        """Seconds per byte of memory written or read."""
        return self._again / _BUFFER

    @functools.cached_property
    def _again(self) -> float:
        buffer = torch.ones(_BUFFER, dtype=torch.uint8)
        return statistics.median(self._filled(buffer) for _ in range(5))

    def _filled(self, buffer: torch.Tensor) -> float:
        begin = self.clock()
        buffer.fill_(1)
        return self.clock() - begin


def is_run(node: Node) -> bool:
    """Return whether a node computes by itself: it is neither an input, a tuple element, a wait nor a collective."""
    return (
        node.op == "call_function"
        and node.target not in (WAIT, operator.getitem)
        and group_of(node) is None
        and getattr(node.target, "__name__", "") != "_inputs"
    )


def key_of(node: Node) -> object:
    """Return a key that is equal for nodes with equal times."""
    constants = [x for x in pytree.tree_leaves((node.args, node.kwargs)) if not isinstance(x, Node)]
    return node.target, tuple(map(_layout, _tensors_in(node))), str(constants), *_bodies(node)


def _tensors_in(node: Node) -> Iterator[torch.Tensor]:
    for source in node.all_input_nodes:
        yield from (x for x in pytree.tree_leaves(source.meta.get("val")) if isinstance(x, torch.Tensor))


def _layout(x: torch.Tensor) -> tuple[object, ...]:
    return tuple(x.shape), x.stride(), x.dtype, x.storage_offset()


def _bodies(node: Node) -> list[str]:
    """Return the code of the subgraphs that a node calls, such as a mask's rule."""
    return [body.code for source in node.all_input_nodes if isinstance(body := _attribute(source), GraphModule)]


def _attribute(node: Node) -> object:
    """Return the attribute of a `get_attr` node; None for other nodes."""
    if node.op != "get_attr":
        return None
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


# --- random inputs --------------------------------------------------------------------------------------------------


def _call_of(node: Node) -> Callable[[], object]:
    """Return a call of the node's function on random inputs. A function that empties its list gets a new list each
    time."""
    made = {source: _made_up(node, source) for source in node.all_input_nodes}
    args, kwargs = map_arg(node.args, made.__getitem__), map_arg(node.kwargs, made.__getitem__)
    target: Any = node.target
    if any(isinstance(x, list) and isinstance(source, Node) for x, source in zip(args, node.args, strict=True)):
        return lambda: target(*(list(x) if isinstance(x, list) else x for x in args), **kwargs)
    return lambda: target(*args, **kwargs)


def _made_up(node: Node, source: Node) -> Any:
    if source.op == "get_attr":
        return _attribute(source)
    value = source.meta["val"]
    if isinstance(value, (tuple, list)):
        return [_tensor(node, source, x) if isinstance(x, torch.Tensor) else x for x in value]
    return _tensor(node, source, value) if isinstance(value, torch.Tensor) else value


def _tensor(node: Node, source: Node, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of that layout. Floats are normal; integers are legal for their use: an index, a group's end."""
    count = max(1, like.untyped_storage().nbytes() // like.element_size())
    if like.is_floating_point():
        wide = torch.float32 if like.element_size() == 1 else like.dtype  # torch has no random float8
        flat = torch.randn(count, dtype=wide).to(like.dtype)
    elif like.dtype == torch.bool:
        flat = torch.ones(count, dtype=torch.bool)
    else:
        flat = _integers(node, source, like, count).to(like.dtype)
    return torch.as_strided(flat, like.shape, like.stride(), like.storage_offset())


def _integers(node: Node, source: Node, like: torch.Tensor, count: int) -> torch.Tensor:
    tensors = list(_tensors_in(node))
    floats = [x for x in tensors if x.is_floating_point()]
    if node.target in _FLEX and like.dtype == torch.int32:  # the blocks that a query's block sees: all, in order
        width = max(x.shape[-1] for x in tensors if x.dtype == torch.int32)
        is_list = like.dim() == 4
        return torch.arange(count) % like.shape[-1] if is_list else torch.full((count,), width)
    if (examples := operator_of(node.target).examples) is not None:
        return examples(floats or tensors, count)
    return torch.randint(_num_places(node, source, floats, tensors), (count,))


def _num_places(node: Node, source: Node, floats: list[torch.Tensor], tensors: list[torch.Tensor]) -> int:
    """Return the number of legal values of an index: the size of the dim that the operator indexes, or of the smallest
    dim."""
    name, args = str(node.target), node.args
    if "embedding_dense_backward" in name:
        return int(args[2])  # type: ignore[arg-type]
    if "embedding" in name:
        return tensors[0].shape[0]
    if any(word in name for word in ("nll_loss", "cross_entropy")):
        return max(x.shape[1] for x in floats if x.dim() == 2)
    if any(word in name for word in ("gather", "scatter", "index_select", "index_add")) and isinstance(args[1], int):
        return tensors[0].shape[args[1]] if tensors[0].dim() else 1
    if "aten.index" in name and isinstance(args[1], (list, tuple)):
        return min(n for n, given in zip(tensors[0].shape, args[1], strict=False) if given is not None)
    sizes = [n for x in floats or tensors for n in x.shape]
    return max(1, min(sizes, default=2))


@functools.cache
def _other_work() -> torch.Tensor:
    return torch.zeros(_EVICTED_BYTES // 4)


def _evict() -> None:
    _other_work().add_(1)
