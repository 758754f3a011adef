"""A graph that is watched does what it does otherwise, and shows where its time goes."""

import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.profiler import profile

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.graph import meta
from torchtitan_graph.runtime import observe
from torchtitan_graph.runtime.observe import Watchable, stopwatch
from torchtitan_graph.torch_private.tracing import boxed

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@pytest.fixture
def traced() -> tuple[GraphModule, list[Tensor]]:
    torch.manual_seed(0)
    model = Model()

    def step(x: Tensor) -> list[Tensor]:
        return [*torch.autograd.grad(model(x), list(model.parameters()))]

    x = torch.randn(2, 4)
    return minimal_fx_tracer(step, module=model)(x).gm, [*(p.detach() for p in model.parameters()), x]


def spans(gm: GraphModule, inputs: list[Tensor]) -> list[tuple[str, int, int]]:
    """Run under a profiler; give name, begin and end of what it saw."""
    graph = Watchable(gm)
    with profile() as profiler:
        graph(list(inputs))
    return [(e.name, e.time_range.start, e.time_range.end) for e in profiler.events()]


def test_a_graph_that_nobody_watches_is_not_copied_and_stays_as_it_is(traced: tuple[GraphModule, list[Tensor]]) -> None:
    gm, inputs = traced
    run = boxed(gm)
    assert isinstance(run, GraphModule) and run.graph is gm.graph
    found, given = run(list(inputs)), list(inputs)
    gm.recompile()  # as a pass does: it takes its inputs one by one, as before
    assert all(map(torch.equal, gm(*inputs), found))
    run(given)
    assert given == []


def test_a_profiler_sees_every_module_around_its_operators(traced: tuple[GraphModule, list[Tensor]]) -> None:
    found = spans(*traced)
    (tanh, *_), (layer,) = ([each for each in found if each[0] == name] for name in ("aten::tanh", "forward layers.0"))
    around = [name for name, begin, end in found if begin <= tanh[1] and tanh[2] <= end and name != "aten::tanh"]
    assert around == ["forward", "forward layers.0", "forward layers.0.1", "tanh"], "the last is the node"
    assert layer[2] > tanh[2]
    backward = [name for name, *_ in found if name.startswith("backward")]
    assert backward[0] == "backward"
    assert {"backward layers.1.0", "backward layers.0.1"} <= set(backward)
    assert backward.index("backward layers.1") < backward.index("backward layers.0")


def test_every_span_that_begins_ends(traced: tuple[GraphModule, list[Tensor]]) -> None:
    graph = traced[0].graph
    observe.add_spans(graph, "graph")
    begins = (observe._begin_span, observe.begin_range)
    begun = [node for begin in begins for node in graph.find_nodes(op="call_function", target=begin)]
    ended = [node.args[0] for node in graph.find_nodes(op="call_function", target=observe._end_span)]
    assert begun and sorted(begun) == sorted(ended)  # type: ignore[type-var]


@pytest.mark.parametrize("watch", [profile, lambda: stopwatch(CPU)])
def test_a_watched_graph_gives_the_same_bits(traced: tuple[GraphModule, list[Tensor]], watch: object) -> None:
    gm, inputs = traced
    graph = Watchable(gm)
    plain = graph(list(inputs))
    with watch():  # type: ignore[operator]
        watched = graph(list(inputs))
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_nobody_watching_runs_the_graph_as_it_is(traced: tuple[GraphModule, list[Tensor]]) -> None:
    """Before it was watched, and after: by one and the same code, without a word of spans."""
    gm, inputs = traced
    graph = Watchable(gm)
    graph(list(inputs))
    assert list(graph._copies) == [()]
    plain = graph._copies[()]
    with profile():
        graph(list(inputs))
    graph(list(inputs))
    assert graph._copies[()] is plain and len(graph._copies) == 2
    codes = ["begin_range" in each.code for each in graph._copies.values()]  # type: ignore[attr-defined]
    assert codes == [False, True]


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the clock show one second more each time that it is read."""
    seconds = iter(range(1000))
    monkeypatch.setattr(observe, "time", types.SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    yield


def with_waits(num_waits: int) -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    for _ in range(num_waits):
        x = graph.call_function(observe.WAIT, (graph.call_function(torch.ops.aten.neg.default, (x,)),))
    graph.output([x])
    for node in graph.nodes:
        meta.write(node, phase="forward", module="")
    return GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("num_waits", [0, 1, 3])
def test_the_stopwatch_stands_still_while_a_graph_waits(ticks: None, num_waits: int) -> None:
    graph = Watchable(with_waits(num_waits))
    with stopwatch(CPU) as watch:
        graph([torch.ones(1)])
    assert watch.seconds() == num_waits + 1  # a second from each mark to the next; those of the waits don't count


def test_the_stopwatch_sums_several_runs_and_only_those_inside(ticks: None) -> None:
    graph = Watchable(with_waits(1))
    graph([torch.ones(1)])
    with stopwatch(CPU) as watch:
        graph([torch.ones(1)])
        graph([torch.ones(1)])
    graph([torch.ones(1)])
    assert watch.seconds() == 4


def test_the_stopwatch_works_under_a_profiler(ticks: None) -> None:
    graph = Watchable(with_waits(2))
    with profile(), stopwatch(CPU) as watch:
        graph([torch.ones(1)])
    assert watch.seconds() == 3
