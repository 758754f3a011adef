"""Uneven experts: files of loads, the busiest rank, and what that makes of times and memory."""

import json
from pathlib import Path

import pytest

from torchtitan_graph.errors import UserError
from torchtitan_graph.plan.experts import ALL_LAYERS, Busiest, busiest, busiest_by_layer, read_loads


def written(folder: Path, text: str, name: str = "loads.json") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_list_is_of_every_layer_and_a_table_of_each(tmp_path: Path) -> None:
    assert read_loads(written(tmp_path, "[1, 2, 3, 2.5]")) == {ALL_LAYERS: [1.0, 2.0, 3.0, 2.5]}
    assert read_loads(written(tmp_path, '{"layers.1": [1, 0]}')) == {"layers.1": [1.0, 0.0]}


def test_a_run_s_last_record_that_has_loads_counts(tmp_path: Path) -> None:
    records = [{"expert_loads": {"layers.1": [9, 1]}}, {"expert_loads": {"layers.1": [5, 3]}}, {"validation_loss": 2.0}]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    assert read_loads(written(tmp_path, lines, "metrics.jsonl")) == {"layers.1": [5.0, 3.0]}
    with pytest.raises(UserError, match="no record has expert_loads; train with metrics.log_expert_loads = true"):
        read_loads(written(tmp_path, '{"loss": 1}\n', "metrics.jsonl"))


@pytest.mark.parametrize(
    "text",
    ["[1, -1]", "[0, 0]", "[]", "3", "[1, true]", '{"layers.1": 3}', "{}", "[1, NaN]", "[1, Infinity]", "[", '["a"]'],
)
def test_what_is_no_load_is_refused_by_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="--expert_load .*loads.json"):
        read_loads(written(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read"):
        read_loads(tmp_path / "no.json")


def test_the_busiest_rank_has_the_experts_with_most_tokens() -> None:
    assert busiest([1, 1, 1, 1], 2) == (0, 1.0)
    assert busiest([1, 1, 3, 1, 1, 1], 3) == Busiest(1, 1.5)
    assert busiest([5, 1, 1, 1], 1) == Busiest(0, 1.0), "a rank that has all experts has all rows"
    assert busiest([0, 0, 0, 7], 4) == Busiest(3, 4.0)


def test_loads_must_fit_the_model() -> None:
    layers = {"layers.1": 4, "layers.2": 4}
    assert busiest_by_layer({ALL_LAYERS: [1, 1, 3, 3]}, layers, 2) == {name: Busiest(1, 1.5) for name in layers}
    for loads, said in (
        ({ALL_LAYERS: [1.0] * 6}, "6 loads of layers.1, which has 4 experts"),
        ({"layers.1": [1.0] * 4}, "no loads of layers.2"),
        ({"layers.0": [1.0] * 4}, "layers.0 has no experts"),
    ):
        with pytest.raises(UserError, match=said):
            busiest_by_layer(loads, layers, 2)
    with pytest.raises(UserError, match="no experts; leave it out"):
        busiest_by_layer({ALL_LAYERS: [1.0]}, {}, 1)
