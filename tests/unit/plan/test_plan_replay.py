"""Prices by replay: every operator of every family runs on made-up numbers, and alike ones once."""

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule

from torchtitan_graph.analysis.cost import Costs, estimate
from torchtitan_graph.check.matrix import Cell, build_model
from torchtitan_graph.config import load
from torchtitan_graph.models.spec import family_names, load_family
from torchtitan_graph.ops.operator import ALL_GATHER
from torchtitan_graph.parallel.dispatch import Exchange
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.plan import operator_times as replaying
from torchtitan_graph.plan.on_cpu import GLOO, ThisCpu
from torchtitan_graph.plan.operator_times import Replay, Times, is_run, key_of
from torchtitan_graph.plan.ranks import build
from torchtitan_graph.plan.simulate import simulate
from torchtitan_graph.rates import RATES
from torchtitan_graph.steps import Assembly, build_graphs
from torchtitan_graph.torch_private.distributed import init_fake_process_group, is_gloo

CPU = RATES["CPU"]


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is asserted here, so none need be long."""
    monkeypatch.setattr(replaying, "_evict", lambda: None)
    monkeypatch.setattr(replaying, "_MOST_CALLS", 1)


FAST = ("llama3",)


def graph(cell: Cell) -> GraphModule:
    init_fake_process_group(cell.dims.num_ranks)
    try:
        layout, family = cell.dims.layout("cpu"), load_family(cell.family)
        train = build_graphs(Assembly(build_model(cell), family, layout, cell.options("graph"))).train
        assert not isinstance(train, dict), "no stages here"
        return train.gm
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in family_names()],
)
def test_every_operator_of_a_family_runs_on_made_up_numbers(family: str) -> None:
    dims = ParallelDims(dp_shard=2, ep=2) if family in ("deepseek_v3", "gpt_oss", "llama4") else ParallelDims(tp=2)
    gm = graph(Cell(dims, family=family, attn="flex" if family == "gpt_oss" else "sdpa"))
    replay = Replay()
    number = replay.learn([gm])
    run = [node for node in gm.graph.nodes if is_run(node)]
    assert number == len({key_of(node) for node in run}) < len(run) / 2, "layers are alike"
    assert replay.learn([gm]) == 0, "it keeps what it knows"
    assert all(replay.times(node).warm >= 0 for node in run)


def test_every_operator_of_an_exchange_by_machine_runs_on_made_up_numbers() -> None:
    """In two hops, with results as sums."""
    dims = ParallelDims(dp_shard=4, ep=4, ep_near=2)
    experts = (("num_experts", 8),)
    gm = graph(Cell(dims, family="deepseek_v3", changes=experts, exchange=Exchange(exact=False)))
    assert Replay().learn([gm]) > 0


def test_an_operator_that_can_t_run_is_named() -> None:
    """Negative control: an index beyond the end."""
    graph = torch.fx.Graph()
    x, index = graph.placeholder("x"), graph.placeholder("index")
    x.meta["val"], index.meta["val"] = torch.empty(4, 3), torch.empty(2, dtype=torch.int64)
    node = graph.call_function(torch.ops.aten.index_select.default, (x, 7, index))
    with pytest.raises(RuntimeError, match="index_select.* can't be run on made-up numbers"):
        Replay().times(node)


def test_other_cores_do_the_same_until_a_replay_ends() -> None:
    made: list[list[int]] = []

    def make() -> Callable[[], object]:
        made.append([])
        return lambda mine=made[-1]: mine.append(threading.get_ident())

    before = threading.active_count()
    with pytest.raises(ValueError, match="planted"), Replay(num_beside=2).company(make):
        while not all(made):
            pass
        raise ValueError("planted")
    assert threading.active_count() == before
    assert len(made) == 2
    assert len({*made[0], *made[1], threading.get_ident()}) == 3


def test_caches_are_between_warm_and_cold() -> None:
    assert Times(1.0, 3.0).at(0.0) == 1.0
    assert Times(1.0, 3.0).at(0.5) == 2.0


def test_a_fake_group_stands_for_gloo_where_it_is_asked_to() -> None:
    for stands_for in ("nccl", "gloo"):
        init_fake_process_group(2, stands_for=stands_for)
        try:
            assert is_gloo(dist.group.WORLD.group_name) == (stands_for == "gloo")  # type: ignore[union-attr]
        finally:
            dist.destroy_process_group()


def test_a_collective_takes_the_rank_s_own_core() -> None:
    """What gloo costs is added to the arithmetic, also where a GPU would hide it; more ranks than cores take turns."""
    words = ["--comm.mode", "fake_backend", "--training.seq_len", "32", "--training.local_batch_size", "1"]
    job = build(load(words), 2, CPU)
    (rank,) = job.ranks
    gm = rank.modules[0]
    alone, crowded = ThisCpu(2), ThisCpu(2)
    alone.crowding, crowded.crowding = 1.0, 3.0
    alone.learn(job)
    crowded.replay.known = alone.replay.known
    costs = alone.prices(CPU)(rank)
    found = estimate(gm, costs)
    sent = sum(costs.seconds(node) for node in gm.graph.nodes if costs.link(node))
    assert sum(found.exposed.values()) == pytest.approx(sent) == pytest.approx(sum(found.sent.values()))
    arithmetic = sum(costs.computing(node) for node in gm.graph.nodes if not costs.link(node))
    assert found.seconds == pytest.approx(sent + arithmetic)
    assert sum(estimate(gm, Costs(CPU, rank.links)).exposed.values()) < sum(found.exposed.values())
    gathers = [node for node in gm.graph.nodes if costs.link(node) and "all_gather" in str(node.target)]
    wire = GLOO[ALL_GATHER]
    assert costs.seconds(gathers[0]) == pytest.approx(wire.latency + gathers[0].meta["val"].nbytes / 2 / wire.rate)
    crowded.replay.__dict__ |= {"seconds_per_new_byte": 0.0, "_again": 0.0}
    alone.replay.__dict__ |= {"seconds_per_new_byte": 0.0, "_again": 0.0}
    one, three = (simulate(job, cpu.prices(CPU), CPU).step for cpu in (alone, crowded))
    assert three.seconds - three.optimizer == pytest.approx(3 * (one.seconds - one.optimizer))
