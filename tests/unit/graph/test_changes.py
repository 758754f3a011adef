"""The table of passes says what each changed, against counts by hand."""

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from torchtitan_graph.graph import changes
from torchtitan_graph.graph.changes import PassTable
from torchtitan_graph.graph.cost import Costs
from torchtitan_graph.graph.torch_private.tracing import FakeTensorMode

MIB = 2**18  # numbers


def graph_of(fn) -> GraphModule:
    with FakeTensorMode():
        return make_fx(fn)(torch.empty(MIB))


def rows(*graphs: GraphModule) -> list[str]:
    """Give the table of the passes that make these graphs one from another, without its head and its spaces."""
    first, *others = graphs
    table = PassTable(first, Costs())
    for number, gm in enumerate(others):
        table.add(f"pass_{number}", 0.25, gm)
    return [" ".join(row.split()) for row in table.lines()[1:]]


def test_a_row_says_what_changed_and_only_that() -> None:
    kept, less = graph_of(lambda x: (x.sin() * x.cos()).sin()), graph_of(lambda x: x.sin().neg())
    assert rows(kept, kept, less) == [
        "traced 6 3.0 MiB 0.0 MiB 0.00 ms",
        "pass_0 0.25 s",
        "pass_1 0.25 s 6 -> 4 2.0 MiB -1 cos, -1 mul, +1 neg",
        "all 0.50 s 6 -> 4 2.0 MiB 0.0 MiB 0.00 ms",
    ]


def test_of_a_large_graph_only_the_first_and_the_last_peak_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_LARGE", 5)
    kept, less = graph_of(lambda x: (x.sin() * x.cos()).sin()), graph_of(lambda x: x.sin().neg())
    assert rows(kept, less) == [
        "traced 6 3.0 MiB 0.0 MiB 0.00 ms",
        "pass_0 0.25 s 6 -> 4 -1 cos, -1 mul, +1 neg",
        "all 0.25 s 6 -> 4 2.0 MiB 0.0 MiB 0.00 ms",
    ]
