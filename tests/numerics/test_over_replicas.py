"""The messages in which gradients are summed over replica groups, as a forecast counts them: those of a run."""

import dataclasses
from collections import Counter

import pytest
import torch
from matrix import (
    BF16,
    DDP2,
    FSDP2,
    FSDP2_TP2,
    ONE_LAYER,
    Cell,
    build_graph,
    final_graphs,
    layout_of,
    microbatches,
)
from torch import Tensor

from pool import run_on
from torchtitan_graph.capture.state import local_part
from torchtitan_graph.forecast import gradient_messages
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.storage import Precision
from torchtitan_graph.runtime.gradients import taking

TWO = {"num_microbatches": 2}


def messages(cell: Cell, early: bool) -> tuple[list[int], list[int]]:
    """Return the bytes of each message of gradients, as counted before a step, and as that step sends them."""
    from torchtitan_graph.replicas.replicas import Replicas

    sent: list[Tensor] = []

    class ToList(Replicas):
        def __init__(self) -> None:
            """Meet nobody."""
            self._begun = {}
            self.living = (0, 1)

        def _error(self) -> None:
            return None

        def _launch(self, tensor: Tensor) -> None:
            sent.append(tensor)

    _, graphs = final_graphs(cell)
    steps = build_graph(cell)
    replicas, given = ToList(), microbatches(cell, layout_of(cell.dims).data_rank, 0)
    if early:
        with taking(replicas.begin_sum, cell.num_microbatches):
            output = steps.train(*given)
        assert steps.is_one_graph and len(sent) == len(gradient_messages(graphs)), "all begin while the graph runs"
    else:
        output = steps.train(*given)
    replicas.sum(steps.model, output)
    *grads, loss = sent
    assert loss.shape == ()
    return sorted(gradient_messages(graphs)), sorted(x.nbytes for x in grads)


def slow_cell(*given, **named):
    return pytest.param(Cell(*given, **named), marks=pytest.mark.slow)


def slow(early, cell):
    return pytest.param(early, cell, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("early", "cell"),
    [
        (False, Cell(FSDP2, BF16, **TWO, **ONE_LAYER)),
        (True, Cell(FSDP2, BF16, **ONE_LAYER)),
        slow(True, Cell(FSDP2, BF16, **TWO)),
        slow(False, Cell(FSDP2, BF16, once="all", **TWO)),
        slow(False, Cell(DDP2, **TWO)),
        slow(True, Cell(DDP2)),
        slow(False, Cell(FSDP2_TP2, BF16, tied=True, **TWO)),
        slow(True, Cell(FSDP2_TP2, BF16, tied=True)),
        slow(False, Cell(ParallelDims(pp=2, dp_shard=2), BF16, num_microbatches=4)),
    ],
)
def test_messages_are_those_of_a_run(early, cell):
    pytest.importorskip("torchft")
    for told, sent in run_on(cell.dims.num_ranks, messages, cell, early):
        assert told == sent and sum(told) > 0


def with_and_without(cell: Cell) -> dict[str, tuple[int, bool]]:
    """Return for each parameter the number of gradients in its gradient's block of memory, and whether it has the same
    bits as where nothing is packed."""
    found = []
    for sums in (False, True):
        steps = build_graph(dataclasses.replace(cell, sums_over_replicas=sums))
        steps.train(*microbatches(cell, layout_of(cell.dims).data_rank, 0))
        named = steps.model.named_parameters()
        found.append({name: local_part(p.grad) for name, p in named if p.grad is not None})
    plain, packed = found
    blocks = Counter(grad.untyped_storage().data_ptr() for grad in packed.values())
    return {
        name: (blocks[grad.untyped_storage().data_ptr()], torch.equal(grad, plain[name]))
        for name, grad in packed.items()
    }


BF16_AT_REST = Precision(torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(
    "cell",
    [
        Cell(ParallelDims(), BF16_AT_REST, once="all", **TWO, **ONE_LAYER),
        Cell(ParallelDims(), BF16, family="deepseek_v3", **ONE_LAYER),
        slow_cell(ParallelDims(pp=2), BF16_AT_REST, num_microbatches=4),
        slow_cell(ParallelDims(), BF16, family="deepseek_v3", once="all", **TWO),
        slow_cell(ParallelDims(tp=2), BF16_AT_REST, **TWO),
    ],
)
def test_gradients_that_are_packed_for_the_sum_are_the_same(cell):
    for of_rank in run_on(cell.dims.num_ranks, with_and_without, cell):
        assert all(is_equal for _, is_equal in of_rank.values())
        assert sum(number > 1 for number, _ in of_rank.values()) > len(of_rank) / 2, "most share memory"
