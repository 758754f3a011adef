"""After each pass, each node has its places in the call hierarchy, and what was made of several has those of all."""

import dataclasses
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from torchtitan_graph.capture.trace import make_fx_capture
from torchtitan_graph.check.matrix import BF16, NUM_ROWS, SEQ_LEN, Cell, build_model
from torchtitan_graph.compiler import Extra, Pass, PassPlan, passes
from torchtitan_graph.graph import meta
from torchtitan_graph.graph.hierarchy import call_hierarchy, fwd_call_hierarchy
from torchtitan_graph.models.spec import load_family
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.steps import Assembly, build_graphs
from torchtitan_graph.torch_private.distributed import init_fake_process_group

ORDERED = [each.name for each in passes(PassPlan({}, (), ()))]
FULL = Recompute.from_option("full", "op")
CELLS = {
    "llama3": Cell(ParallelDims(dp_shard=2, tp=2), recompute=FULL),
    "equal blocks": Cell(ParallelDims(dp_replicate=2), dedupe=True),
    "away": Cell(ParallelDims(dp_shard=2), offload=("layers.0",), cpu_offload=True),
    "async TP": Cell(ParallelDims(tp=2), async_tp=True),
    "llama4": Cell(family="llama4", precision=BF16),
    "qwen3": Cell(ParallelDims(dp_shard=2, ep=2), family="qwen3", flavor="debugmodel_moe"),
    "deepseek_v3": Cell(ParallelDims(cp=2), family="deepseek_v3"),
    "gpt_oss": Cell(ParallelDims(pp=2), family="gpt_oss", attn="flex", num_microbatches=4),
}


@pytest.fixture(autouse=True)
def nothing_is_sent() -> Iterator[None]:
    yield
    dist.destroy_process_group()


def graphs_of(cell: Cell) -> list[tuple[str, dict[Node, tuple]]]:
    """Build a cell's graphs; give of each node what it says of itself after each pass."""
    init_fake_process_group(cell.dims.num_ranks)
    found = []

    def look(name: str, gm: GraphModule) -> GraphModule:
        real = [node for node in gm.graph.nodes if node.op in ("call_function", "call_module")]
        found.append(
            (name, {n: (meta.phase(n), meta.origin(n), call_hierarchy(n), fwd_call_hierarchy(n)) for n in real})
        )
        return gm

    last = ("compile_regions",)
    extra = tuple(Extra(each, Pass(f"after {each}", partial(look, each), cut=each in last)) for each in ORDERED)
    options = dataclasses.replace(cell.options("graph"), extra=extra, eval_rows=(NUM_ROWS, SEQ_LEN))
    capture = partial(make_fx_capture, call_hierarchy=True)
    build_graphs(Assembly(build_model(cell), load_family(cell.family), cell.dims.layout("cpu"), options, capture))
    return found


FAST = ("llama3", "gpt_oss")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in CELLS]
)
def test_no_node_is_left_without(name: str) -> None:
    known: set[str] = {"forward", "backward", meta.RECOMPUTED}
    for passed, nodes in graphs_of(CELLS[name]):
        known.add(passed)
        for node, (phase, origin, places, origins) in nodes.items():
            assert places and (origins or phase == "forward"), (passed, node)
            assert origin in known, (passed, node, origin)


def test_what_is_made_of_several_has_the_places_of_all() -> None:
    *_, (_, nodes) = graphs_of(Cell(ParallelDims(dp_shard=2)))
    gathers = [node for node in nodes if node.target is torch.ops._c10d_functional.all_gather_into_tensor.default]
    block = next(node for node in gathers if "layers.0" in (meta.param(node) or ""))
    modules = {place[-1].path for place in call_hierarchy(block)}
    assert {"layers.0.attention.wq", "layers.0.feed_forward.w2", "layers.0.ffn_norm"} <= modules
