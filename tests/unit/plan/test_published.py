"""A forecast is shown next to the published run that is most like it, and says of which board it is."""

import pytest

from torchtitan_graph.config import load
from torchtitan_graph.plan.published import nearest_published
from torchtitan_graph.plan.report import _board
from torchtitan_graph.rates import RATES


@pytest.mark.parametrize(
    ("words", "ranks", "board", "name"),
    [
        ("--model.flavor 8B --training.seq_len 8192", 64, "H100", "8B 128 H100_500W, 2 x 8192, op"),
        ("--model.flavor 8B --training.seq_len 8192", 8, "H100_500W", "8B 8 H100_500W, 2 x 8192, op"),
        ("--model.flavor 8B --compile.codegen blocks", 8, "H100", "8B 8 H100_500W, 2 x 8192, op, compiled"),
        ("--model.flavor 8B --model.converters float8", 60, "H200", "8B 64 H200, 2 x 8192, op, compiled, float8"),
        ("--model.flavor 70B", 64, "A100", "70B 64 A100, 1 x 8192, full"),
    ],
)
def test_the_nearest_run(words: str, ranks: int, board: str, name: str) -> None:
    found = nearest_published(load(words.split()), ranks, board)
    assert found is not None and found.name == name


def test_without_a_published_run_nothing_is_shown() -> None:
    assert nearest_published(load([]), 8, "H100") is None
    assert nearest_published(load(["--model.flavor", "8B"]), 8, "cpu") is None


def test_boards_of_one_name_are_told_apart() -> None:
    assert _board(RATES["H100"]) == "989 TFLOP/s in bf16, 3.35 TB/s of memory (another board: H100_500W)"
    assert "(another board: H100)" in _board(RATES["H100_500W"]) and "board" not in _board(RATES["A100"])
