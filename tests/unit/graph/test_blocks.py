"""Blocks by their global names."""

import pytest

from torchtitan_graph.graph.blocks import block_of, number_of

BLOCKS = {"layers.1", "layers.10", "encoder.layers.3"}  # a part of a model: names stay those of the whole


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("layers.1", "layers.1"),
        ("layers.1.attention.wq.weight", "layers.1"),
        ("layers.10.norm", "layers.10"),
        ("encoder.layers.3.w", "encoder.layers.3"),
        ("layers.2.norm", None),
        ("layers.11", None),
        ("layers", None),
        ("norm.weight", None),
        ("", None),
    ],
)
def test_a_name_belongs_to_the_block_that_it_begins_with(name: str, block: str | None) -> None:
    assert block_of(name, BLOCKS) == block


def test_a_block_has_its_number_in_the_whole_model() -> None:
    assert [number_of(block) for block in sorted(BLOCKS)] == [3, 1, 10]
