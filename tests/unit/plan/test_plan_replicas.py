"""Forecasts of jobs of replica groups: the sum over them against closed forms, the rest against a group alone."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from torchtitan_graph.analysis.cost import Costs, Link
from torchtitan_graph.blueprint import Blueprint
from torchtitan_graph.config import load
from torchtitan_graph.device import CudaRecorder, Recorders
from torchtitan_graph.errors import UserError
from torchtitan_graph.forecast import gradient_messages, seconds_over_replicas, wait_for_replicas
from torchtitan_graph.parallel.layout import REPLICAS, ParallelDims
from torchtitan_graph.plan.__main__ import beside_hsdp, main
from torchtitan_graph.plan.on_cpu import GLOO, ReplayedCosts
from torchtitan_graph.plan.outlook import Hsdp, Outlook
from torchtitan_graph.plan.ranks import BuiltJob, build, configuration, ranks_of_group
from torchtitan_graph.plan.report import as_data, lines
from torchtitan_graph.plan.simulate import EXCHANGE_S, QUORUM_S, VOTE_S, by_rates, simulate
from torchtitan_graph.rates import RATES

H100 = RATES["H100"]
ROUND = H100._replace(near=400e9, far=50e9, network_share=0.5, near_hop=1e-6, far_hop=10e-6)
# Four groups of two ranks, each with four microbatches of a row while all live.
WORDS = [
    "--model.flavor=debugmodel",
    "--training.seq_len=64",
    "--training.local_batch_size=1",
    "--training.global_batch_size=32",
    "--fault_tolerance.enable",
    "--fault_tolerance.replicas=4",
]
MEET_S = QUORUM_S + EXCHANGE_S + VOTE_S


@pytest.fixture(scope="module")
def job() -> BuiltJob:
    return build(configuration(WORDS, 8), 2, H100)


@pytest.mark.parametrize(
    ("link", "seconds"),
    [
        # 2 (R - 1) / R of the bytes, at 25e9 bytes/s, and a hop for each doubling.
        (Link(REPLICAS, 8, 1), 2 * 7 / 8 * 1e9 / 25e9 + 3 * 10e-6),
        (Link(REPLICAS, 5, 1), 2 * 4 / 5 * 1e9 / 25e9 + 3 * 10e-6),
        # Two groups in each machine: two ports.
        (Link(REPLICAS, 8, 2), 2 * 7 / 8 * 1e9 / 2 / 25e9 + 3 * 10e-6),
        # All in one machine: at 200e9 bytes/s.
        (Link(REPLICAS, 4, 4), 2 * 3 / 4 * 1e9 / 200e9 + 2 * 1e-6),
    ],
)
def test_an_all_reduce_takes_what_its_bytes_and_hops_take(link: Link, seconds: float) -> None:
    costs = Costs(ROUND)
    assert costs.all_reduce(10**9, link) == pytest.approx(seconds)
    # One message after the other; negative control: as one message it is shorter.
    in_parts = seconds_over_replicas([10**9 // 4] * 4, costs, link)
    hop = 1e-6 if link.near == link.degree else 10e-6
    assert in_parts == pytest.approx(seconds + 3 * hop * math.ceil(math.log2(link.degree)))
    assert in_parts != pytest.approx(seconds, rel=1e-6)


def test_on_a_cpu_it_takes_what_gloo_takes() -> None:
    assert ReplayedCosts(crowding=2.0).all_reduce(10**9, Link(REPLICAS, 4, 4)) == pytest.approx(2 * (2e-3 + 1.5))
    assert GLOO, "its sums are in a table of their own"


def test_groups_share_a_machine_where_they_fit() -> None:
    assert ParallelDims(dp_shard=8).link_of_replicas(4, num_near=8) == (REPLICAS, 4, 1)
    assert ParallelDims(dp_shard=2).link_of_replicas(8, num_near=8) == (REPLICAS, 8, 4)
    assert ParallelDims(dp_shard=2).link_of_replicas(2, num_near=8) == (REPLICAS, 2, 2)
    assert ParallelDims(dp_shard=64).link_of_replicas(2, num_near=8) == (REPLICAS, 2, 1)


def test_a_step_is_that_of_a_group_and_what_it_does_with_the_others(job: BuiltJob) -> None:
    """All rows of a step are the same as for one group with a fourth of them, and so is all but the sum."""
    alone = dataclasses.replace(job.options, num_replicas=1, num_microbatches=4)
    of_group = job._replace(options=alone, rows_per_step=8)
    prices = by_rates(job, H100)
    plan, group = simulate(job, prices, H100), simulate(of_group, prices, H100)
    link, (rank,) = Link(REPLICAS, 4, 4), job.ranks
    sums = [2 * 3 / 4 * size / (H100.near * H100.network_share) for size in gradient_messages(rank.graphs)]
    waits = wait_for_replicas(rank.graphs, job.options, prices(rank), link)
    assert plan.step.replicas == pytest.approx(waits)
    assert 0 < waits < sum(sums) + len(sums) * 2 * H100.near_hop, "the last microbatch hides some"
    assert plan.step.meeting == MEET_S
    assert plan.step.seconds == pytest.approx(group.step.seconds + plan.step.replicas + MEET_S)
    assert dataclasses.replace(plan.step, seconds=0, replicas=0, meeting=0) == dataclasses.replace(
        group.step, seconds=0
    )
    assert plan.tokens_per_second == pytest.approx(4 * 8 * 64 / plan.step.seconds)
    assert plan.mfu * plan.step.seconds == pytest.approx(group.mfu * group.step.seconds)
    # Negative control: other links take another time.
    elsewhere = wait_for_replicas(rank.graphs, job.options, prices(rank), link._replace(near=1))
    assert elsewhere != pytest.approx(plan.step.replicas, rel=0.1)


def test_the_sum_is_beside_the_last_backward(job: BuiltJob) -> None:
    """By two links with closed forms: one so fast that only the last message is left, one so slow that all is."""
    (rank,), sizes = job.ranks, gradient_messages(job.ranks[0].graphs)
    link = Link(REPLICAS, 4, 4)

    def wait(near: float) -> tuple[float, float]:
        costs = Costs(ROUND._replace(near=near, near_hop=0.0, launch=0.0))
        return wait_for_replicas(rank.graphs, job.options, costs, link), seconds_over_replicas(sizes, costs, link)

    waits, takes = wait(1e15)
    assert 0 < waits < takes / len(sizes) * 3, "but the last messages, of the embedding"
    waits, takes = wait(1e3)
    assert waits == pytest.approx(takes, rel=1e-3) and waits < takes, "it begins before the graph ends"
    recorded = dataclasses.replace(job.options, recorders=Recorders(CudaRecorder))
    assert wait_for_replicas(rank.graphs, recorded, Costs(ROUND), link) == seconds_over_replicas(
        sizes, Costs(ROUND), link
    ), "beside recorded graphs nothing begins early"


def test_gradients_are_a_rank_s_shards_in_fp32(job: BuiltJob) -> None:
    (rank,) = job.ranks
    shards = sum(each.padded_shape.numel() for each in rank.graphs.storages.values()) * 4
    assert sum(gradient_messages(rank.graphs)) == pytest.approx(shards, rel=0.01)
    sent = rank.forecast.sent_once[REPLICAS, "all_reduce"]
    assert sent.number == len(gradient_messages(rank.graphs)) < len(rank.graphs.storages)
    assert sent.num_bytes == pytest.approx(shards * 2 * 3 / 4, rel=0.01)


def test_a_forecast_says_what_the_sum_takes(job: BuiltJob) -> None:
    plan = simulate(job, by_rates(job, H100), H100)
    text = "\n".join(lines(plan))
    assert "a step of 4 x 1 rows of 64 tokens in each of 4 replica groups of 2 ranks on H100" in text
    assert f"sum over 4 replicas               {plan.step.replicas * 1e3:10.2f} ms" in text
    assert "quorum, exchange and vote               9.00 ms" in text and "as measured on a CPU's loopback" in text
    assert f"{plan.tokens_per_second / 8:.1f} tokens/s a rank" in text
    data = as_data(plan)
    assert (data["world_size"], data["num_replicas"], data["degrees"]["dp_shard"]) == (8, 4, 2)
    each = plan.step
    parts = [*each.computed.values(), *each.exposed.values(), each.host, each.sums, each.optimizer, each.replicas]
    assert sum(parts) + each.meeting == pytest.approx(each.seconds)


def test_groups_with_one_microbatch_more_are_waited_for(job: BuiltJob) -> None:
    """15 microbatches are 4 for three groups, and 3 for one."""
    fewer = job._replace(options=dataclasses.replace(job.options, num_microbatches=15))
    assert fewer.num_microbatches == job.num_microbatches == 4
    of = (simulate(each, by_rates(each, H100), H100) for each in (fewer, job))
    uneven, even = of
    assert uneven.step == even.step and uneven.mfu == pytest.approx(even.mfu * 15 / 16)


def test_all_ranks_of_a_job_are_divided_among_its_groups() -> None:
    assert ranks_of_group(load(WORDS), 8) == 2 and ranks_of_group(load([]), 8) == 8
    for world, near in ((10, "8 or 12"), (3, "4")):
        with pytest.raises(UserError, match=rf"--world {world}: .* fault_tolerance.replicas = 4, such as {near}:"):
            configuration(WORDS, world)


def test_a_dry_run_is_of_a_group(job: BuiltJob) -> None:
    said = "\n".join(job.ranks[0].forecast.lines())
    assert "received over replicas in a step: all_reduce" in said and "exposed over replicas" in said
    assert Blueprint(load([*WORDS, "--comm.mode", "fake_backend"]), 2).dims == job.dims


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replicas", "4"], "--replicas 4: the job has replica groups, fault_tolerance.replicas = 4"),
        (["--detect_seconds", "5"], "--detect_seconds 5: .*give --node_mtbf_hours too"),
        (
            ["--storage_gb_per_s", "1", "--node_mtbf_hours", "9"],
            "fault_tolerance.replicas = 4: must divide 8 ranks, 8 on a node",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--world", "8", "--device", "h100", *words, *WORDS]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_hsdp_of_the_same_ranks_stands_beside_it(job: BuiltJob) -> None:
    """It has the same microbatches, and the sum of each in its graph: over slow links all but little of it is waited
    for, so that with four microbatches it takes longer than the groups' sum of all."""
    slow = H100._replace(near=1e8)
    prices, (rank,) = by_rates(job, slow), job.ranks
    plan = simulate(job, prices, slow)
    takes = seconds_over_replicas(gradient_messages(rank.graphs), prices(rank), Link(REPLICAS, 4, 4))
    found = beside_hsdp(plan, slow, None)
    assert (found.with_groups_s, found.tokens) == (plan.step.seconds, job.tokens_per_step)
    assert found.step_s is not None and 0 < found.waits_s < found.step_s
    assert plan.step.seconds < found.step_s < plan.step.seconds + 4 * takes
    ahead, by = Outlook(found), plan.step.seconds / found.step_s - 1
    assert ahead.lines() == [
        f"  HSDP in place of the replica groups: {found.step_s:.4g} s a step, of which it waits {found.waits_s:.3g} s"
        f" for the sum over the copies; these take {plan.step.seconds:.4g} s, {by:+.1%}"
    ]
    assert ahead.data()["hsdp"]["step_s"] == found.step_s


@pytest.mark.slow
def test_the_command_compares_goodput_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--world", "32", "--device", "h100", "--json", str(tmp_path / "plan.json")]
    words += ["--storage_gb_per_s", "5", "--node_mtbf_hours", "10", "--restart_minutes", "30"]
    assert main([*words, *WORDS, "--training.global_batch_size", "64"]) == 0
    found, text = json.loads((tmp_path / "plan.json").read_text()), capsys.readouterr().out
    of, without, hsdp = found["replicas"], found["failures"]["goodput"], found["hsdp"]
    assert of["groups"] == 4 and of["goodput"] > without
    assert "with 4 replica groups of 1 node: goodput" in text
    own, other = of["goodput"] * found["tokens_per_second"], without * 64 * 64 / hsdp["step_s"]
    assert f"  with failures {own:.0f} tokens/s; by HSDP {other:.0f}: {own / other - 1:+.1%}" in text


@pytest.mark.slow
def test_a_search_varies_the_layout_of_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--world", "8", "--device", "h100", "--search", "rows"]
    assert main([*words, *WORDS, "--training.global_batch_size", "16"]) == 0
    said = capsys.readouterr()
    assert "replicas = 4" in said.out and "in each of 4 replica groups of 2 ranks" in said.out
    assert "dp_shard 2, rows 2: " in said.err and "rows 4" not in said.err, "a group would have no microbatch"


def test_hsdp_that_is_not_legal_is_said_to_be_so() -> None:
    assert Outlook(Hsdp(1.0, 64, why="the reason")).lines() == [
        "  HSDP in place of the replica groups: no forecast, for the reason"
    ]
