"""Tracing each kind of block once gives, in every family and layout, the graph that tracing every block gives. It is
what the other tests of this folder run."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
from matrix import BF16, Cell, assemble, fake_layout

from torchtitan_graph.capture.stamp import described
from torchtitan_graph.capture.trace import make_fx_capture
from torchtitan_graph.capture.traced import TracedResult
from torchtitan_graph.graph.hierarchy import call_hierarchy, fwd_call_hierarchy
from torchtitan_graph.models.layers.moe import AuxiliaryLoss
from torchtitan_graph.models.spec import family_names, load_family
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Recompute
from torchtitan_graph.passes.cleanup import cleanup
from torchtitan_graph.steps import build_graphs, trace_steps

MTP = (("q_lora_rank", 20), ("num_groups", 3), ("num_chosen_groups", 2), ("num_mtp_layers", 2))
LOSSES = AuxiliaryLoss(load_balance=0.1, by_sequence=True, router_z=0.01)
WHOLE_BATCH = dataclasses.replace(LOSSES, by_sequence=False)


def cell(layers: int = 3, *changes: tuple[str, object], **given: Any) -> Cell:
    return Cell(changes=(("num_layers", layers), *changes), **given)


DIMS = ParallelDims
CELLS = {
    "llama3, TP, tied": cell(dims=DIMS(tp=2), tied=True),
}
SLOW = {
    "gpt_oss, flex, EP": cell(4, family="gpt_oss", attn="flex", dims=DIMS(dp_shard=2, ep=2)),
    "qwen3 with experts, EP over TP, losses": cell(
        family="qwen3", flavor="debugmodel_moe", dims=DIMS(dp_shard=2, tp=2, ep=2), auxiliary=WHOLE_BATCH
    ),
    "deepseek_v3, tokens ahead, TP, bf16": cell(4, *MTP, family="deepseek_v3", dims=DIMS(tp=2), precision=BF16),
    "qwen3, CP, flex": cell(family="qwen3", dims=DIMS(cp=2), attn="flex"),
    "llama4": cell(8, family="llama4"),
    "llama3, DDP, CP and TP, bf16": cell(dims=DIMS(dp_replicate=2, cp=2, tp=2), precision=BF16),
    "deepseek_v3, EP, losses": cell(4, family="deepseek_v3", dims=DIMS(dp_shard=2, ep=2), auxiliary=LOSSES),
    "deepseek_v3, tokens ahead, CP and TP": cell(4, *MTP, family="deepseek_v3", dims=DIMS(cp=2, tp=2)),
    "gpt_oss, CP, EP and expert TP, bf16": cell(
        4, family="gpt_oss", dims=DIMS(dp_shard=2, cp=2, tp=2, ep=2, etp=2), precision=BF16
    ),
    "llama4, flex, TP, bf16": cell(8, family="llama4", attn="flex", dims=DIMS(tp=2), precision=BF16),
} | {
    f"{family} {flavor}, {attn}": cell(8, family=family, flavor=flavor, attn=attn)
    for family in family_names()
    for flavor in load_family(family).FLAVORS
    if flavor.startswith("debugmodel")
    for attn in ("sdpa", "flex")
}


def traces(cell: Cell, trace_every_block: bool) -> list[list[tuple]]:
    """Give the steps of a cell, for training and evaluation, as they are traced, with each node's place in the call
    hierarchy; of a pipeline, of each stage."""
    options, found = cell.options("graph"), []
    fake_layout(cell.dims)
    options = dataclasses.replace(options, trace_every_block=trace_every_block, eval_rows=options.rows)

    def capture(*args: Any, **kwargs: Any) -> Callable[..., TracedResult]:
        def trace(*arguments: Any) -> TracedResult:
            traced = make_fx_capture(*args, **kwargs, call_hierarchy=True)(*arguments)
            places = [(call_hierarchy(node), fwd_call_hierarchy(node)) for node in cleanup(traced.gm).graph.nodes]
            found.append(list(zip(described(traced.gm), places, strict=True)))
            return traced

        return trace

    build = trace_steps if cell.dims.pp == 1 else build_graphs
    build(assemble(cell, options, capture))
    return found


@pytest.mark.parametrize("name", [*CELLS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_graph_is_that_of_every_block(name: str, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(logging.getLogger("torchtitan_graph"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="torchtitan_graph"):
        stamped = traces((CELLS | SLOW)[name], trace_every_block=False)
    assert stamped == traces((CELLS | SLOW)[name], trace_every_block=True)
    assert "every block is traced" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_pipeline_stages_are_those_of_every_block(schedule: str) -> None:
    options = (("pipeline_parallel_schedule", schedule),)
    stages = cell(8, dims=DIMS(pp=2), num_microbatches=4, pipeline=options)
    assert traces(stages, trace_every_block=False) == traces(stages, trace_every_block=True)


def finished(cell: Cell, trace_every_block: bool) -> list[tuple]:
    """Give the training step after all passes."""
    fake_layout(cell.dims)
    options = dataclasses.replace(cell.options("graph"), trace_every_block=trace_every_block)
    graphs = build_graphs(assemble(cell, options))
    assert isinstance(graphs.train, TracedResult)
    return described(graphs.train.gm)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_passes_make_the_same_of_it(recompute: str) -> None:
    how = Recompute.from_option(recompute, "op")
    both = cell(family="gpt_oss", dims=DIMS(dp_shard=2, tp=2), precision=BF16, recompute=how)
    assert finished(both, trace_every_block=False) == finished(both, trace_every_block=True)


def test_the_comparison_sees_another_constant() -> None:
    """The control: one number in one operator of the same graph."""
    cells = [cell(2, ("norm_eps", eps)) for eps in (1e-5, 1e-6)]
    one, other = ([line for trace in traces(each, False) for line in trace] for each in cells)
    assert len(one) == len(other) and one != other
