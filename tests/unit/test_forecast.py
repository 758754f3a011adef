"""What a dry run says of a rank, against sums by hand and between layouts."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from torchtitan_graph.check.matrix import Cell, build_model
from torchtitan_graph.config import job
from torchtitan_graph.forecast import OPTIMIZER, STEP, Forecast, forecast
from torchtitan_graph.graph.torch_private import init_fake_process_group
from torchtitan_graph.models.spec import load_family
from torchtitan_graph.parallel.layout import FSDP, PP, TP, ParallelDims
from torchtitan_graph.steps import build_graphs


@pytest.fixture(autouse=True)
def nothing_is_sent() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def of(cell: Cell, rank: int = 0, optimizer: str = "AdamW") -> Forecast:
    """Forecast a rank of a cell."""
    if dist.is_initialized():
        dist.destroy_process_group()
    init_fake_process_group(cell.dims.num_ranks, rank)
    layout, model = cell.dims.layout("cpu"), build_model(cell)
    options = cell.options("graph")
    graphs = build_graphs(model, load_family(cell.family), layout, options)
    return forecast(model, graphs, layout, options, job.Optimizer(name=optimizer))


def test_shards_and_moments_are_counted_and_what_is_unknown_is_said() -> None:
    cell = Cell(ParallelDims(dp_shard=4), vocab_size=512, ffn_dim=128)
    whole = sum(p.numel() for p in build_model(cell).parameters()) * 4
    found = of(cell)
    assert found.held["parameters"] == whole // 4
    assert found.held[OPTIMIZER] == 2 * whole // 4
    assert found.sent[FSDP, "reduce_scatter_tensor"].num_bytes == 3 * whole // 4
    own = of(cell, optimizer="my.Own")
    assert OPTIMIZER not in own.held and "and what my.Own keeps" in "\n".join(own.lines())
    assert of(dataclasses.replace(cell, num_microbatches=2)).held["gradients of earlier microbatches"] == whole // 4


def test_every_axis_takes_its_part() -> None:
    alone = of(Cell(vocab_size=512, ffn_dim=128))
    split = of(Cell(ParallelDims(tp=2), vocab_size=512, ffn_dim=128))
    assert split.operations == pytest.approx(alone.operations / 2)
    assert {axis for axis, _ in split.sent} == {TP}
    assert split.held[STEP] < alone.held[STEP]


@pytest.mark.parametrize("family", ["llama3", "deepseek_v3"])
def test_what_ranks_of_context_parallel_compute_alike_counts_once(family: str) -> None:
    """Latent attention expands the whole row's latent on every rank."""
    alone, split = (of(Cell(ParallelDims(cp=cp), family=family, vocab_size=512)) for cp in (1, 2))
    assert split.operations == pytest.approx(alone.operations / 2)


def test_a_stage_holds_what_its_schedule_keeps() -> None:
    pipeline = ParallelDims(pp=2)
    cell = Cell(pipeline, num_microbatches=4, vocab_size=512, changes=(("num_layers", 8),))
    all_at_once = dataclasses.replace(cell, pipeline=(("pipeline_parallel_schedule", "GPipe"),))
    one_by_one = dataclasses.replace(cell, pipeline=(("pipeline_parallel_schedule", "1F1B"),))
    assert of(all_at_once).held[STEP] > of(one_by_one).held[STEP]
    assert "stage 1" in of(one_by_one, rank=1).where
    assert PP not in {axis for axis, _ in of(one_by_one).sent}
