"""Costs by scope as text: forward and backward side by side, folded, and of modules or functions alone."""

from typing import Any

import pytest
from torch.fx import Graph

from torchtitan_graph.analysis.scope_table import by_type, scope_table
from torchtitan_graph.analysis.scopes import BACKWARD, FORWARD, PASSES_FORWARD, RECOMPUTED, Charge, Cost
from torchtitan_graph.graph.hierarchy import Entry

MODEL = Entry("module", "", "m.Model", "", 0)
BLOCK = Entry("module", "0", "m.Block", "layers.0", 0)
ROPE = Entry("function", "rope", "m.rope", "m.py:1", 1)
LOSS = Entry("function", "loss", "m.loss", "m.py:9", 0)


def charge(place: tuple[Entry, ...], part: str, **cost: int) -> Charge:
    return Charge(Graph().placeholder("x"), place, part, Cost(calls=1, **cost), 0, 0)


CHARGES = [
    charge((MODEL,), PASSES_FORWARD, received=3 * 2**20),
    charge((MODEL, BLOCK), FORWARD, flops=12_000_000_000, moved=40 * 2**20, time=1_000_000),
    charge((MODEL, BLOCK, ROPE), FORWARD, moved=8 * 2**20, time=500_000),
    charge((MODEL, BLOCK), RECOMPUTED, flops=1_000_000_000, time=250_000),
    charge((MODEL, BLOCK), BACKWARD, flops=24_000_000_000, time=2_000_000),
    charge((LOSS,), BACKWARD, time=10_000),
]


def table(depth: int = 9, charges: Any = CHARGES) -> list[str]:
    return [" ".join(line.split()) for line in scope_table(charges, depth)]


def test_a_row_is_a_scope_with_all_below_it() -> None:
    """Recomputation and what passes make stand where they run; what costs nothing has no column, and no number."""
    assert table() == [
        "nodes GFLOP moved, MiB received, KiB estimate, us",
        "scope forward backward forward backward forward backward forward backward forward backward",
        "all 3 3 12.00 25.00 48.00 3,072.00 1,500.00 2,260.00",
        ":Model 3 2 12.00 25.00 48.00 3,072.00 1,500.00 2,250.00",
        "0:Block 2 2 12.00 25.00 48.00 1,500.00 2,250.00",
        "rope()#1 1 8.00 500.00",
        "loss() 1 10.00",
    ]


def test_columns_stand_below_their_titles() -> None:
    title, sides, whole, *rows = scope_table(CHARGES, 9)
    assert title.index("GFLOP") + len("GFLOP") == sides.index("backward", sides.index("backward") + 1) + len("backward")
    assert {len(title), len(whole)} == {len(sides)} and all(len(row) <= len(sides) for row in rows)
    assert rows[0].startswith("  :Model ") and rows[1].startswith("    0:Block ")


def test_folding_keeps_what_is_below() -> None:
    assert table(depth=0) == table()[:3]
    assert table(depth=1) == [*table()[:4], table()[-1]]


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("module", ["all 3 3 12.00 25.00", ":Model 3 2 12.00 25.00", "0:Block 2 2 12.00 25.00"]),
        ("function", ["all 3 3 12.00 25.00", "rope()#1 1", "loss() 1"]),
    ],
)
def test_of_modules_or_functions_alone_nothing_is_lost(kind: str, rows: list[str]) -> None:
    bare = [each._replace(cost=Cost(each.cost.calls, each.cost.flops)) for each in CHARGES]
    assert table(charges=by_type(bare, kind))[2:] == rows


def test_of_an_empty_graph_there_is_a_row() -> None:
    assert table(charges=[])[2:] == ["all"]
