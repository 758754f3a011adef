"""Uneven experts: files of loads, the busiest rank, and what that makes of times and memory."""

import argparse
import json
import os
from pathlib import Path

import pytest

from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.config import load
from torchtitan_graph.errors import UserError
from torchtitan_graph.plan import expert_loads
from torchtitan_graph.plan.expert_loads import ALL_LAYERS, Busiest, busiest, busiest_by_layer, read_loads
from torchtitan_graph.plan.outlook import add_arguments, check_arguments, check_loads, look_ahead
from torchtitan_graph.plan.ranks import build, configuration
from torchtitan_graph.plan.simulate import by_rates, simulate
from torchtitan_graph.rates import RATES


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
    torn = lines + '5\n{"expert_loads": {"layers.1": [7'
    assert read_loads(written(tmp_path, torn, "metrics.jsonl")) == {"layers.1": [5.0, 3.0]}
    with pytest.raises(UserError, match="no record has expert_loads; train with metrics.log_expert_loads = true"):
        read_loads(written(tmp_path, '{"loss": 1}\n', "metrics.jsonl"))
    strange = [lines.rstrip(), '{"name": "a\u2028b"}', "", "5", "null", '"expert_loads"', '["expert_loads"]', "  "]
    assert read_loads(written(tmp_path, "\n".join(strange), "metrics.jsonl")) == {"layers.1": [5.0, 3.0]}


@pytest.mark.parametrize(
    "text",
    ["[1, -1]", "[0, 0]", "[]", "3", "[1, true]", '{"layers.1": 3}', "{}", "[1, NaN]", "[1, Infinity]", "[", '["a"]']
    + ["[1, 1e308]", f"[1, 1{'0' * 400}]", '{"layers.1": [1, 2], "layers.1": [2, 1]}'],
)
def test_what_is_no_load_is_refused_by_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="--expert_load .*loads.json"):
        read_loads(written(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read"):
        read_loads(tmp_path / "no.json")


def test_a_file_of_anybody_is_refused_in_a_moment(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.json")
    sparse = tmp_path / "metrics.jsonl"
    with sparse.open("wb") as file:
        file.truncate(2**40)
    deep = written(tmp_path, "[" * 100_000, "deep.json")
    for path, why in (
        (tmp_path / "fifo.json", "a FIFO"),
        (sparse, "no record of its last 64 MiB"),
        (deep, "100 deep"),
    ):
        with pytest.raises(UserError, match=f"--expert_load '{path}': .*{why}"):
            read_loads(path)


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


def test_a_file_that_does_not_fit_the_model_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "[1, 2, 3]")
    model = Blueprint(load(["--model.name", "deepseek_v3"]), 1).model
    with pytest.raises(UserError, match=f"--expert_load '{path}': 3 loads of layers.1, which has 8 experts"):
        check_loads(path, model)


def test_a_step_waits_for_the_busiest_rank_and_a_checkpoint_has_all_parameters_and_moments(tmp_path: Path) -> None:
    words = "--model.name deepseek_v3 --training.seq_len 4096 --training.local_batch_size 1"
    words += " --activation_checkpoint.mode none --parallelism.expert_parallel_degree 2"
    rates = RATES["H100"]._replace(kernel=0.0, launch=0.0)
    job = build(configuration(words.split(), 2), 2, rates)
    prices = by_rates(job, rates)
    plan = simulate(job, prices, rates)
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    def ahead(loads: str):  # type: ignore[no-untyped-def]
        path = written(tmp_path, loads)
        given = ["--expert_load", str(path), "--storage_gb_per_s", "2", "--node_mtbf_hours", "1000"]
        options = parser.parse_args(given)
        check_arguments(options, job.config)
        return look_ahead(options, plan, prices)

    even, uneven = ahead("[1, 1, 1, 1, 1, 1, 1, 1]"), ahead("[3, 3, 3, 3, 1, 1, 1, 1]")
    assert even.uneven.step_s == pytest.approx(plan.step.seconds)
    assert even.uneven.more_bytes == 0
    assert {each.over_mean for each in uneven.uneven.by_layer.values()} == {1.5}
    assert plan.step.seconds < uneven.uneven.step_s < 1.5 * plan.step.seconds
    assert uneven.uneven.more_bytes > 0
    by_layer = {name: Busiest(0, 16.0) for name in uneven.uneven.by_layer}
    (rank,), priced = job.ranks, expert_loads.uneven(prices(job.ranks[0]), by_layer)
    exchanges = [node for node in rank.graphs.train.gm.graph.nodes if expert_loads.exchanges_rows(node)]
    assert exchanges and all(priced.factor(node) == 16.0 for node in exchanges)
    storages = job.ranks[0].graphs.storages.values()
    assert even.saving.num_bytes == sum(each.shape.numel() for each in storages) * 4 * 3
    assert even.saving.waits == pytest.approx(even.saving.num_bytes / 2e9)
    assert any("the busiest rank of ep has 1.5 times the mean" in line for line in uneven.lines())
    with pytest.raises(UserError, match="--node_mtbf_hours: .*give --storage_gb_per_s too"):
        check_arguments(parser.parse_args(["--node_mtbf_hours", "5"]), job.config)
    with pytest.raises(UserError, match="--restart_minutes 5: .*give --node_mtbf_hours too"):
        check_arguments(parser.parse_args(["--restart_minutes", "5"]), job.config)
    with pytest.raises(UserError, match="--replicas 2: .*give --node_mtbf_hours too"):
        check_arguments(parser.parse_args(["--replicas", "2"]), job.config)
    with pytest.raises(UserError, match="--detect_seconds 5: .*give --replicas too"):
        check_arguments(parser.parse_args(["--detect_seconds", "5"]), job.config)
    given = ["--storage_gb_per_s", "2", "--node_mtbf_hours", "1000", "--replicas", "2"]
    replicas = look_ahead(parser.parse_args(given), plan, prices).replicas
    assert replicas.heal_s * rates.far * rates.network_share == pytest.approx(
        sum(each.padded_shape.numel() for each in storages) * 4 * 3
    ), "a rank's parameters and moments, from another node"
    for given in ("-1", "0", "nan", "1e-300", "1e300"):
        with pytest.raises(UserError, match="--storage_gb_per_s .*: must be a number above 0, from 1e-9 to 1e9"):
            check_arguments(parser.parse_args(["--storage_gb_per_s", given]), job.config)
    own = load(["--optimizer.name", "my.Own"])
    with pytest.raises(UserError, match="--storage_gb_per_s: what optimizer.name = 'my.Own' keeps is not known"):
        check_arguments(parser.parse_args(["--storage_gb_per_s", "1"]), own)


@pytest.mark.parametrize(
    ("more", "world", "ordered"),
    [
        pytest.param("1 --parallelism.overlap_microbatches true", 2, True, marks=pytest.mark.slow),
        pytest.param("1", 2, False, marks=pytest.mark.slow),
        pytest.param(
            "4 --parallelism.overlap_microbatches true --parallelism.pipeline_parallel_degree 2"
            " --parallelism.pipeline_parallel_schedule DualPipeV",
            4,
            True,
        ),
    ],
    ids=["pairs", "one by one", "pairs in a pipeline"],
)
def test_an_order_for_the_loads_is_compared_with_the_one_that_runs(
    more: str, world: int, ordered: bool, tmp_path: Path
) -> None:
    """One microbatch after the other has no such order."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    rates = RATES["H100"]._replace(near=5e8, launch=0.0)  # a slow link, so that orders differ
    words = f"--model.name deepseek_v3 --training.seq_len 512 --training.local_batch_size {more}"
    words += " --training.global_batch_size 8 --activation_checkpoint.mode none --parallelism.expert_parallel_degree 2"
    job = build(configuration(words.split(), world), world, rates)
    prices = by_rates(job, rates)
    plan = simulate(job, prices, rates)
    found = []
    for loads in ("[1, 1, 1, 1, 1, 1, 1, 1]", "[9, 9, 9, 9, 1, 1, 1, 1]"):
        asked = parser.parse_args(["--expert_load", str(written(tmp_path, loads))])
        ahead = look_ahead(asked, plan, prices)
        assert ("in an order for these loads" in "\n".join(ahead.lines())) == ordered
        found.append(ahead.uneven)
    if ordered:
        even, uneven = found
        assert even.ordered_s == pytest.approx(even.step_s, rel=1e-9)
        assert uneven.ordered_s < uneven.step_s * 0.9999
