"""The table of passes says what each changed, against counts by hand."""

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from torchtitan_graph.analysis import changes
from torchtitan_graph.analysis.changes import PassTable, Written
from torchtitan_graph.analysis.cost import Costs
from torchtitan_graph.torch_private.fake import FakeTensorMode

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


def test_a_pass_that_only_tags_leaves_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = graph_of(lambda x: (x.sin() * x.cos()).sin())
    table = PassTable(gm, Costs())
    monkeypatch.setattr(PassTable, "_measure", None)  # to measure the same again would take as long as the passes
    next(iter(gm.graph.nodes)).meta["tag"] = "save"
    table.add("tags", 0.25, gm)


def swap_operands(gm: GraphModule) -> None:
    (mul,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    mul.args = mul.args[::-1]


def call_another(gm: GraphModule) -> None:
    (cos,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default)
    cos.target = torch.ops.aten.tan.default


def reorder(gm: GraphModule) -> None:
    x, sin, cos, *_ = gm.graph.nodes
    x.append(cos)


def give_another_value(gm: GraphModule) -> None:
    x, sin, *_ = gm.graph.nodes
    sin.meta["val"] = sin.meta["val"].bfloat16()


@pytest.mark.parametrize("edit", [swap_operands, call_another, reorder, give_another_value])
def test_an_edit_in_place_is_seen(edit) -> None:
    gm = graph_of(lambda x: (x.sin() * x.cos()).sin())
    written = Written(gm)
    assert written.is_still_in(gm) and not written.holds_more
    edit(gm)
    assert not written.is_still_in(gm)


def test_a_constant_is_said_not_to_be_compared() -> None:
    constant = torch.ones(MIB)
    assert Written(make_fx(lambda x: x + constant)(torch.empty(MIB))).holds_more
