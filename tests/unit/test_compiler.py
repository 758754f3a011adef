"""The list of passes: what a pass returns is what runs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.fx import GraphModule, symbolic_trace

from torchtitan_graph.capture.trace import minimal_fx_tracer
from torchtitan_graph.compiler import Inspection, Pass, run_passes
from torchtitan_graph.errors import UserError

CPU = torch.device("cpu")


def run(*passes: Callable) -> GraphModule:
    gm = minimal_fx_tracer(lambda x: x.sin())(torch.ones(2)).gm
    return run_passes(gm, [Pass(each.__name__, each) for each in passes], (), CPU, Inspection())


def cosine(gm: GraphModule) -> GraphModule:
    """Return another graph than the one given."""
    new = minimal_fx_tracer(lambda x: x.cos())(torch.ones(2)).gm
    assert new is not gm
    return new


def nothing(gm: GraphModule) -> GraphModule:
    return gm


def test_the_graph_that_a_pass_returns_is_what_runs_and_what_the_next_one_is_given() -> None:
    given = []

    def look(gm: GraphModule) -> GraphModule:
        given.append(gm)
        return gm

    gm = run(nothing, cosine, look)
    assert given == [gm]
    assert torch.equal(gm(torch.ones(2))[0], torch.ones(2).cos())


def forgets(gm: GraphModule) -> GraphModule:
    return GraphModule(gm, gm.graph)


def returns_nothing(gm: GraphModule) -> None:
    pass


def uses_before(gm: GraphModule) -> GraphModule:
    (sin,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    gm.graph.output_node().append(sin)
    return gm


@pytest.mark.parametrize("broken", [forgets, returns_nothing, uses_before])
def test_a_pass_that_gives_no_graph_that_can_be_bound_is_named(broken: Callable) -> None:
    with pytest.raises(RuntimeError, match=f"pass {broken.__name__} gives "):
        run(broken)


def test_a_dump_that_can_not_be_written_is_told_by_its_option(tmp_path: Path) -> None:
    (tmp_path / "graphs").touch()
    gm = symbolic_trace(torch.nn.Identity())
    with pytest.raises(
        UserError, match="debug.dump_graphs = true: .*can't be written: .*graphs is there, and is not a folder"
    ):
        Inspection(dump_to=tmp_path / "graphs").dump(gm, 0, "traced")
