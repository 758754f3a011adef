"""What a stage holds between the parts of its graph: only what a later one reads, and nothing once a step is done."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist

from torchtitan_graph.check.matrix import Cell, build_graph, layout_of, microbatches
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.pipeline import Pipeline, Stage
from torchtitan_graph.steps import Steps
from torchtitan_graph.torch_private.distributed import init_fake_process_group

CELL = Cell(ParallelDims(pp=2), num_microbatches=2, pipeline=(("pipeline_parallel_schedule", "ZBVZeroBubble"),))
TOTALS = torch.ones(2, dtype=torch.int64)


@pytest.fixture(scope="module")
def steps() -> Iterator[Steps]:
    """Rank 0's, which has the first and the last of four stages; nothing is sent."""
    init_fake_process_group(CELL.dims.num_ranks)
    yield build_graph(CELL)
    layout_of.cache_clear()
    dist.destroy_process_group()


def stage_of(steps: Steps, number: int) -> Stage:
    assert isinstance(steps.step, Pipeline)
    return steps.step.stages[number]


@pytest.mark.parametrize("number", [0, 3])
def test_a_stage_holds_what_a_later_part_reads(steps: Steps, number: int) -> None:
    stage = stage_of(steps, number)
    batches, num_tokens = microbatches(CELL, 0, 1)
    reads = {name: set(part.reads) for name, part in stage.parts.items()}
    passed = torch.ones(stage.graph.passed.shape)
    stage.begin()
    for i, batch in enumerate(batches):
        stage.forward(i, partial(steps._inputs, batch, None, num_tokens, TOTALS), passed if number else None)
        assert stage._held[i].keys() <= reads["input"] | reads["weight"]
    sums, first, places = {*stage.graph.parts.sums}, {stage.graph.parts.outputs["output"].get("dx")}, []
    for i in range(len(batches)):
        stage.backward_input(i, None if number else passed)
        assert stage._held[i].keys() <= reads["weight"] | sums | (first if i == 0 else set())
        stage.backward_weight(i)
        places.append({name: x.data_ptr() for name, x in stage._sums.items()})
    assert places[0] == places[1]  # what comes later is added in place
    assert stage._held == {} and stage._sums.keys() == sums
    stage.reduce()
    assert stage._sums == {} and stage._common == {}


def test_inputs_that_are_not_those_traced_are_refused(steps: Steps) -> None:
    """Values are told apart by their place alone."""
    batches, num_tokens = microbatches(CELL, 0, 1)
    batch, masks, _ = steps._inputs(batches[0], None, num_tokens, TOTALS)
    with pytest.raises(ValueError, match="shorter|longer"):
        stage_of(steps, 0).forward(0, lambda: (batch, {}, num_tokens), None)
    with pytest.raises(ValueError, match="shorter|longer"):
        stage_of(steps, 0).forward(0, lambda: (batch, masks | {"more": batch.tokens_BL}, num_tokens), None)
