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
