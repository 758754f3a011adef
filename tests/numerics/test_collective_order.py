"""Every rank runs one and the same program: collectives meet in the same order, else a job hangs or mixes tensors.

Of each layout the first rank is compared with the last, whose coordinates differ on every axis; nothing is sent.
"""

import re
from collections.abc import Callable

import pytest
from matrix import BF16, FSDP2, LAYOUTS, ONE_LAYER, TP2, Cell, fake_layout
from torch.fx import GraphModule

from torchtitan_graph.check.matrix import final_graphs
from torchtitan_graph.formats.show import name_of_group, readable, without_bytes
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.parallel.pipeline import StageGraph
from torchtitan_graph.parallel.recompute import Recompute

SHARED = {"recompute": Recompute(every=1), "num_microbatches": 4, "once": "all", "pairs": True}
PP2_FSDP2 = ParallelDims(pp=2, dp_shard=2)


def program(cell: Cell, rank: int, then: Callable[[GraphModule], object] | None = None) -> list[str]:
    """Return the lines of a rank's final graph, each group called by its axis: ranks know it by names of their own."""
    layout, train = fake_layout(cell.dims, rank), final_graphs(cell)[1].train
    if isinstance(train, StageGraph):
        text = "".join(readable(part.gm) for part in train.all_parts.values())
    elif isinstance(train, dict):  # of a pipeline's stages all parts, in order
        text = "".join(readable(part.gm) for stage in train.values() for part in stage.parts.by_name.values())
    else:
        if then is not None:
            then(train.gm)
        text = readable(train.gm)
    for group, (axis, _) in layout.axes_by_group.items():
        text = text.replace(repr(name_of_group(group)), axis)
    return [line for line in without_bytes(text) if " = " in line and not line.startswith(("RANK", "GROUPS"))]


def collectives(lines: list[str]) -> list[str]:
    """Keep collectives and waits, without the nodes' names."""
    sent = [line for line in lines if "_c10d_functional" in line or "exchange" in line.partition("(")[0]]
    return [re.sub(r"\w+ = (\S+)\(\w+(, row_splits\w*)?", r"\1(", line) for line in sent]


@pytest.mark.parametrize(
    "cell",
    [
        *[
            pytest.param(Cell(dims, BF16), id=name, marks=pytest.mark.slow)
            for name, dims in LAYOUTS.items()
            if dims.tp == 1 < dims.num_ranks
        ],
        pytest.param(
            Cell(FSDP2, BF16, recompute=Recompute(every=1)), id="FSDP-2-recompute-full", marks=pytest.mark.slow
        ),
        pytest.param(Cell(ParallelDims(dp_shard=2, cp=2), BF16), id="FSDP-2-x-CP-2", marks=pytest.mark.slow),
        pytest.param(Cell(ParallelDims(dp_shard=4, ep=2), BF16, "gpt_oss"), id="FSDP-4-EP-2", marks=pytest.mark.slow),
        pytest.param(Cell(PP2_FSDP2, BF16, num_microbatches=4, changes=(("num_layers", 4),)), id="PP-2-x-FSDP-2"),
        pytest.param(
            Cell(ParallelDims(dp_shard=4, ep=2), BF16, "gpt_oss", **SHARED), id="in pairs", marks=pytest.mark.slow
        ),
    ],
)
def test_data_parallel_ranks_have_the_same_graph(cell):
    """In a pipeline those of one stage."""
    of_stage = cell.dims.num_ranks // cell.dims.pp
    for rank in range(0, cell.dims.num_ranks, of_stage):
        first = program(cell, rank)
        assert program(cell, rank + of_stage - 1) == first and collectives(first) != []


@pytest.mark.parametrize(
    "cell",
    [
        *[
            pytest.param(Cell(dims, BF16), id=layout, marks=pytest.mark.slow)
            for layout, dims in LAYOUTS.items()
            if dims.tp > 1
        ],
        pytest.param(Cell(TP2, BF16, loss_parallel=False), id="TP-2-gathered-logits", marks=pytest.mark.slow),
        pytest.param(Cell(TP2, BF16, **ONE_LAYER), id="TP-2-one-layer"),
        pytest.param(
            Cell(ParallelDims(tp=2, ep=2), BF16, "deepseek_v3", recompute=Recompute(every=1)),
            id="TP-2-EP-2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Cell(ParallelDims(tp=2, ep=2), BF16, "deepseek_v3", **SHARED),
            id="TP-2-EP-2 in pairs",
            marks=pytest.mark.slow,
        ),
        pytest.param(Cell(ParallelDims(cp=2, tp=2), BF16, "gpt_oss"), id="CP-2-x-TP-2", marks=pytest.mark.slow),
        pytest.param(Cell(ParallelDims(cp=2, ep=2), BF16, "deepseek_v3"), id="CP-2-EP-2", marks=pytest.mark.slow),
    ],
)
def test_tensor_parallel_ranks_have_the_same_collectives(cell):
    """The graphs differ in the rows that a rank takes of what it has whole, and in its first row of the vocabulary."""
    programs = [program(cell, rank) for rank in (0, cell.dims.num_ranks - 1)]
    first, last = map(collectives, programs)
    assert last == first != []
    # Orders are chosen by an estimate: it is one only where nodes are as many.
    assert len(programs[0]) == len(programs[1])


def swap_two_collectives(gm: GraphModule) -> None:
    first, second, *_ = (n for n in gm.graph.nodes if "all_gather_into_tensor" in str(n.target))
    second.append(first)


def test_another_order_on_one_rank_is_seen():
    cell = Cell(FSDP2, BF16)
    first, second = program(cell, 0), program(cell, 1, swap_two_collectives)
    assert sorted(first) == sorted(second)
    assert first != second
    assert collectives(first) != collectives(second)
