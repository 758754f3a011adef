"""A trace that is copied and rewritten gives the graph of a new trace: cells that differ in options of passes share
one."""

import dataclasses
from typing import Any

import pytest
from matrix import BF16, FSDP2_TP2, Cell, fake_layout, final_graphs, patched
from torch import nn

from torchtitan_graph.capture.stamp import described
from torchtitan_graph.check import matrix
from torchtitan_graph.graph.signature import signature_of
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.recompute import Budget, Recompute
from torchtitan_graph.parallel.storage import Reshard

VARIANTS: list[dict[str, Any]] = [
    {},
    {"recompute": Recompute(every=1)},
    {"recompute": Recompute(by_op=True), "offload": ("layers.0",), "num_steps": 1},
    {"recompute": Recompute(budget=Budget(0.0)), "cpu_offload": True},
    {"reshard": Reshard(blocks=False), "disabled": ("merge_equal", "bucket_collectives")},
    {"reshard": Reshard(root=True)},
]
SHARDED = Cell(FSDP2_TP2, BF16, changes=(("num_layers", 1),))
STAGES = Cell(ParallelDims(pp=2), num_microbatches=2, changes=(("num_layers", 2),))


def lines(graphs: matrix.Graphs) -> list[Any]:
    if isinstance(graphs.train, dict):
        gms = [part.gm for stage in graphs.train.values() for part in stage.parts.by_name.values()]
    else:
        gms = [graphs.train.gm]
    return [(described(gm), signature_of(gm), gm.code) for gm in gms]


@pytest.mark.parametrize(
    ("cell", "variants"),
    [
        (SHARDED, [VARIANTS[1], VARIANTS[3]]),
        pytest.param(SHARDED, VARIANTS, marks=pytest.mark.slow),
        pytest.param(STAGES, VARIANTS, marks=pytest.mark.slow),
    ],
    ids=["few", "FSDP-2-x-TP-2", "PP-2"],
)
def test_a_copy_of_a_trace_gives_the_graphs_of_a_new_one(cell: Cell, variants: list[dict[str, Any]]) -> None:
    fake_layout(cell.dims)
    found = []
    for variant in (*variants, {"async_tp": cell.dims.tp > 1}):
        each = dataclasses.replace(cell, **variant)
        found.append(lines(final_graphs(each)[1]))
        assert found[-1] == lines(matrix.final_graphs(each)[1]), variant
    assert sum(graph not in found[:i] for i, graph in enumerate(found)) > len(variants) / 2


def test_a_patched_model_is_traced_again() -> None:
    """Negative control: the comparison sees one operator, and `patched` leaves no trace."""
    fake_layout(SHARDED.dims)
    silu, before = nn.functional.silu, lines(final_graphs(SHARDED)[1])
    with patched(nn.functional, "silu", lambda x, **_: silu(x) * 2):
        assert lines(final_graphs(SHARDED)[1]) != before
    assert lines(final_graphs(SHARDED)[1]) == before
