"""overlap_context: queries are made while keys and values are sent; bitwise, since only the order changes."""

from collections import Counter
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch.fx import GraphModule, Node
from toy import WAIT, aten, calls, place, text

from torchtitan_graph.check.matrix import Cell, build_model
from torchtitan_graph.device import Target
from torchtitan_graph.graph import meta
from torchtitan_graph.models import deepseek_v3, llama3
from torchtitan_graph.models.spec import tiny_config
from torchtitan_graph.parallel.layout import Layout, ParallelDims
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.steps import Assembly, StepOptions, build_graphs


def graph_on(layout: Layout, family: ModuleType, recompute: Recompute, disabled: tuple[str, ...] = ()) -> GraphModule:
    with torch.device("meta"):
        model = family.Model(tiny_config(family.FLAVORS["debugmodel"]))
    options = StepOptions(Target.here(), rows=(1, 16), recompute=recompute, disabled=disabled)
    return build_graphs(Assembly(model, family, layout, options)).train.gm


def is_query(node: Node) -> bool:
    return node.target is aten.mm.default and ".attention.wq" in meta.module(node)


@pytest.mark.parametrize(
    ("family", "recompute", "degrees"),
    [
        (llama3, Recompute(), {"cp": 2}),
        (llama3, Recompute(every=1), {"cp": 2}),
        pytest.param(*(deepseek_v3, Recompute(every=1), {"dp_shard": 2, "cp": 2, "tp": 2}), marks=pytest.mark.slow),
    ],
    ids=["llama3", "llama3-recomputed", "deepseek_v3-recomputed-FSDP-2-x-CP-2-x-TP-2"],
)
def test_queries_are_made_while_keys_and_values_are_sent(
    layout_of: Callable, family: ModuleType, recompute: Recompute, degrees: dict[str, int]
) -> None:
    gm = graph_on(layout_of(**degrees), family, recompute)
    order, nodes = place(gm), list(gm.graph.nodes)
    sent = [wait for wait in calls(gm, WAIT) if meta.module(wait).endswith(".attention.seen")]
    assert len(sent) == 3 * (2 if recompute == Recompute() else 3)
    for wait in sent:
        assert any(map(is_query, nodes[order[wait.args[0]] : order[wait]])), wait  # type: ignore[index]


def test_queries_of_a_pipelines_stage_are_too(layout_of: Callable) -> None:
    cell = Cell(ParallelDims(pp=2, cp=2), num_microbatches=2)
    (stage,) = build_graphs(
        Assembly(build_model(cell), llama3, layout_of(pp=2, cp=2), cell.options("graph"))
    ).train.values()
    for part in ("forward", "backward"):
        gm = stage.parts.by_name[part].gm
        order, nodes = place(gm), list(gm.graph.nodes)
        sent = [wait for wait in calls(gm, WAIT) if meta.module(wait).endswith(".attention.seen")]
        assert sent and all(any(map(is_query, nodes[order[wait.args[0]] : order[wait]])) for wait in sent)


def test_the_same_nodes_stand_in_another_order(layout_of: Callable) -> None:
    layout = layout_of(cp=2)
    without, found = (text(graph_on(layout, llama3, Recompute(), disabled)) for disabled in (("overlap_context",), ()))
    assert found != without
    assert Counter(found) == Counter(without)


@pytest.mark.slow
def test_nothing_sent_nothing_changed(layout_of: Callable) -> None:
    layout = layout_of(dp_shard=2)
    without, found = (text(graph_on(layout, llama3, Recompute(), disabled)) for disabled in (("overlap_context",), ()))
    assert found == without
