"""The messages in which gradients are summed over replica groups, as a forecast counts them: those of a run."""

import pytest
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
from torchtitan_graph.forecast import gradient_messages
from torchtitan_graph.parallel.layout import ParallelDims

TWO = {"num_microbatches": 2}


def messages(cell: Cell) -> tuple[list[int], list[int]]:
    """Return the bytes of each message of gradients, as counted before a step, and as that step sends them."""
    from torchtitan_graph.replicas.replicas import Replicas

    sent: list[Tensor] = []

    class ToList(Replicas):
        def __init__(self) -> None:
            """Meet nobody."""

        def _sum(self, tensors: list[Tensor]) -> None:
            sent.extend(tensors)

    _, graphs = final_graphs(cell)
    steps = build_graph(cell)
    ToList().sum(steps.model, steps.train(*microbatches(cell, layout_of(cell.dims).data_rank, 0)))
    *grads, loss = sent
    assert loss.shape == ()
    return sorted(gradient_messages(graphs)), sorted(x.nbytes for x in grads)


def slow(*cell, **options):
    return pytest.param(Cell(*cell, **options), marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "cell",
    [
        Cell(FSDP2, BF16, **TWO, **ONE_LAYER),
        slow(FSDP2, BF16, once="all", **TWO),
        slow(DDP2, **TWO),
        slow(FSDP2_TP2, BF16, tied=True, **TWO),
        slow(ParallelDims(pp=2, dp_shard=2), BF16, num_microbatches=4),
    ],
)
def test_messages_are_those_of_a_run(cell):
    pytest.importorskip("torchft")
    for told, sent in run_on(cell.dims.num_ranks, messages, cell):
        assert told == sent and sum(told) > 0
