"""Checkpoint intervals and goodput: against closed forms, and against a run that fails at random."""

import math
import random
from typing import Any, NamedTuple

import pytest

from torchtitan_graph.config import load
from torchtitan_graph.errors import UserError
from torchtitan_graph.plan.failures import Saving, best_interval, expect, expect_replicas, goodput, saving
from torchtitan_graph.plan.outlook import Outlook, check_replicas

HOUR = 3600.0


@pytest.mark.parametrize("cost_s", [0.1, 1.0, 10.0])
def test_the_best_interval_is_young_s_where_saves_are_short(cost_s: float) -> None:
    mtbf_s = 100 * HOUR
    assert best_interval(cost_s, mtbf_s) == pytest.approx(math.sqrt(2 * cost_s * mtbf_s), rel=0.01)


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(60.0, 2 * HOUR), (600.0, 3 * HOUR), (1800.0, HOUR)])
def test_no_other_interval_is_better(cost_s: float, mtbf_s: float) -> None:
    best = best_interval(cost_s, mtbf_s)
    found = goodput(best, cost_s, 300.0, mtbf_s)
    assert all(goodput(best * factor, cost_s, 300.0, mtbf_s) < found for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0))


def test_without_failures_only_saves_take_time() -> None:
    assert goodput(900.0, 100.0, 60.0, 1e12) == pytest.approx(0.9)
    assert goodput(900.0, 100.0, 60.0, 1e300) == pytest.approx(0.9)
    assert goodput(1e6, 100.0, 60.0, 10.0) == 0.0, "a stretch that never ends well"
    assert best_interval(1e6, 10.0) == pytest.approx(10.0), "the longer a save, the rarer: up to the time between them"


def run_that_fails(interval_s: float, waits: float, written: float, restart_s: float, mtbf_s: float) -> float:
    """Play a run of 20,000 stretches and give its goodput: a checkpoint counts once it is whole, `written` after its
    save began; the oracle of the closed form."""
    dice = random.Random(0)
    now = work = 0.0
    whole: list[tuple[float, float]] = [(0.0, 0.0)]  # when a checkpoint is whole, and the work in it
    fails_at = dice.expovariate(1 / mtbf_s)
    while work < 20_000 * interval_s:
        if now + interval_s + waits <= fails_at:
            work += interval_s
            whole.append((now + interval_s + written, work))
            now += interval_s + waits
            del whole[:-4]
            continue
        work = max((w for at, w in whole if at <= fails_at), default=0.0)
        whole = [(0.0, work)]
        now = fails_at + restart_s
        fails_at += dice.expovariate(1 / mtbf_s)
        while fails_at < now:  # it fails again before it trains
            now = fails_at + restart_s
            fails_at += dice.expovariate(1 / mtbf_s)
    return work / now


@pytest.mark.parametrize(
    ("interval_s", "waits", "written", "restart_s", "mtbf_s"),
    [
        (1800.0, 120.0, 120.0, 300.0, 3 * HOUR),
        (3600.0, 600.0, 600.0, 1800.0, 2 * HOUR),
        (1800.0, 5.0, 200.0, 300.0, 3 * HOUR),  # in a thread
    ],
)
def test_goodput_is_that_of_a_run_that_fails_at_random(
    interval_s: float, waits: float, written: float, restart_s: float, mtbf_s: float
) -> None:
    played = run_that_fails(interval_s, waits, written, restart_s, mtbf_s)
    told = goodput(interval_s, waits, restart_s + written - waits, mtbf_s)
    assert told == pytest.approx(played, rel=0.01)
    # Negative control: a restart that costs nothing is another run.
    assert goodput(interval_s, waits, 0.0, mtbf_s) != pytest.approx(played, rel=0.01)


def test_a_save_in_a_thread_waits_for_the_copy_alone() -> None:
    waiting, in_thread = saving(160e9, 20e9, 4e9, None), saving(160e9, 20e9, 4e9, 20e9)
    assert (waiting.waits, waiting.written) == (40.0, 40.0)
    assert (in_thread.waits, in_thread.written) == (1.0, 41.0)


@pytest.mark.parametrize("mtbf_s", [1e-9, 1.7, 1e6, 1e15, 1e20])
@pytest.mark.parametrize("bytes_per_s", [1.0, 5e9, 1e18])
@pytest.mark.parametrize("copied_per_s", [None, 64e9])
def test_no_forecast_is_nonsense(mtbf_s: float, bytes_per_s: float, copied_per_s: float | None) -> None:
    """Whether a run never comes forward, or never fails."""
    saved = saving(5e12, 5e9, bytes_per_s, copied_per_s)
    told = expect(saved, 12.0, mtbf_s, 1, 600.0)
    shares = told.goodput, told.saving, told.redone, told.restarting
    assert sum(shares) == pytest.approx(1) and min(shares) > -1e-9
    assert told.interval_s >= saved.written - saved.waits, "a save is whole before the next one"
    if mtbf_s == 1e20 and bytes_per_s > 1:
        assert told.goodput == pytest.approx(1) and told.interval_s == pytest.approx(
            max(math.sqrt(2 * saved.waits * mtbf_s), saved.written - saved.waits), rel=1e-3, abs=12.0
        )


def test_shares_add_up_and_steps_are_whole() -> None:
    told = expect(saving(5e12, 5e9, 400e9, None), 12.0, 6334 * HOUR, 2048, 600.0)
    assert told.goodput + told.saving + told.redone + told.restarting == pytest.approx(1)
    assert told.interval_s == told.interval_steps * 12.0
    assert told.mtbf_s == pytest.approx(6334 * HOUR / 2048)
    # Llama 3 405B (section 3.3.4 of its report): 419 unexpected interruptions in 54 days, more than 90 % of the time
    # effective.
    assert 0.9 < told.goodput < 0.96


class Cluster(NamedTuple):
    """A run in replica groups: a step's seconds, those between failures of a group, and what failures cost."""

    groups: int
    num_microbatches: int
    step_s: float
    mtbf_s: float
    restart_s: float
    detect_s: float
    heal_s: float
    saves: Saving

    def told(self) -> Any:
        """Return the forecast; each group is a node."""
        words = self._asdict() | {"num_microbatches": self.num_microbatches * self.groups}
        saves, step_s, mtbf_s, restart_s = (words.pop(name) for name in ("saves", "step_s", "mtbf_s", "restart_s"))
        return expect_replicas(saves, step_s, mtbf_s, self.groups, restart_s, **words)


def groups_that_fail(run: Cluster, interval_s: float, events: int) -> float:
    """Play so many failures and returns of groups and give the run's goodput, in steps: the oracle of the closed form.

    A step in which a group fails is done anew; a group that is back joins at a step's end. If all are away, the first
    that is back begins at the last checkpoint, which is whole at once.
    """
    dice = random.Random(0)
    fails_at = [dice.expovariate(1 / run.mtbf_s) for _ in range(run.groups)]  # of a living group
    back_at = [math.inf] * run.groups  # of one that is away
    now = work = whole = 0.0
    saves_at = interval_s
    while events > 0:
        living = sum(at == math.inf for at in back_at)
        if not living:
            now, work = min(back_at), whole
        if (ready := min(back_at)) <= now:
            group = back_at.index(ready)
            now += run.heal_s if living else 0.0
            back_at[group], fails_at[group] = math.inf, now + dice.expovariate(1 / run.mtbf_s)
            events -= 1
            continue
        if saves_at <= now:
            now, whole = now + run.saves.waits, work
            saves_at = now + interval_s
        step_s = run.step_s * math.ceil(run.num_microbatches * run.groups / living) / run.num_microbatches
        steps = max(0, math.ceil((min(fails_at + back_at + [saves_at]) - now) / step_s))
        if now + steps * step_s >= (fails := min(fails_at)):
            steps = max(0, math.floor((fails - now) / step_s))
            group = fails_at.index(fails)
            fails_at[group], back_at[group] = math.inf, fails + run.restart_s
            now += step_s + run.detect_s  # the others' step, in vain
            events -= 1
        now, work = now + steps * step_s, work + steps * run.step_s
    return work / now


MANY = Cluster(8, 4, 10.0, 10 * HOUR, 900.0, 30.0, 60.0, Saving(1e12, 20.0, 20.0))
FEW = Cluster(2, 3, 10.0, 2 * HOUR, 1200.0, 30.0, 60.0, Saving(1e12, 60.0, 60.0))  # both are away often


@pytest.mark.parametrize(
    ("run", "within", "others"),
    [
        (
            MANY,
            0.002,
            [{"restart_s": 450.0}, {"mtbf_s": 20 * HOUR}, {"detect_s": 0.0}, {"heal_s": 0.0}, {"step_s": 1.0}],
        ),
        (FEW, 0.01, [{"restart_s": 600.0}, {"mtbf_s": 4 * HOUR}]),
    ],
    ids=["eight groups", "two"],
)
def test_goodput_with_replicas_is_that_of_groups_that_fail_at_random(
    run: Cluster, within: float, others: list[dict[str, float]]
) -> None:
    told = run.told()
    played = groups_that_fail(run, told.interval_steps * run.step_s, events=30_000)
    assert told.goodput == pytest.approx(played, rel=within)
    # Negative control: runs that differ in one number.
    assert all(run._replace(**other).told().goodput != pytest.approx(played, rel=within) for other in others)


def test_steps_are_as_long_as_the_living_groups_need() -> None:
    """Two of three groups need 3 / 2 of the time with two microbatches, and twice it with one."""
    two, one = (MANY._replace(groups=3, num_microbatches=number).told().fewer for number in (2, 1))
    assert one == pytest.approx(two * 3 / 2, rel=0.03)
    assert MANY._replace(groups=2, num_microbatches=7).told().fewer > 0


def test_groups_wait_for_those_with_one_microbatch_more() -> None:
    """Of 5 microbatches one of two groups has 3: alone it takes 5 / 3 of the time, not twice as long."""
    words = {"groups": 2, "detect_s": 30.0, "heal_s": 60.0}
    of = MANY.saves, MANY.step_s, MANY.mtbf_s, 2, MANY.restart_s
    five, six = (expect_replicas(*of, num_microbatches=number, **words).fewer for number in (5, 6))
    assert five / six == pytest.approx((1 - 3 / 5) / (1 - 3 / 6), rel=0.01)


def test_groups_that_never_fail_lose_nothing_and_save_once_a_day() -> None:
    told = MANY._replace(mtbf_s=1e15).told()
    assert told.interval_steps == 8640 and told.goodput == pytest.approx(86400 / 86420)


@pytest.mark.parametrize("mtbf_s", [1e-9, 1.0, 1e6, 1e15])
@pytest.mark.parametrize("groups", [2, 4096])
def test_no_forecast_with_replicas_is_nonsense(groups: int, mtbf_s: float) -> None:
    told = MANY._replace(groups=groups, mtbf_s=mtbf_s).told()
    assert 0 <= told.goodput <= 1 and told.interval_steps >= 1 and 0 <= told.fewer <= 1
    assert told.goodput < 1e-9 or mtbf_s > 1


def test_the_number_of_groups_is_checked() -> None:
    config = load(["--parallelism.data_parallel_replicate_degree", "4"])
    check_replicas(4, config, 64, 8)
    check_replicas(2, config, 64, 8)
    for groups, world, said in (
        (8, 64, "data_parallel_replicate_degree = 4 must be a multiple of it; set it to 8"),
        (
            3,
            64,
            "--replicas 3: must divide 64 ranks, 8 on a node, into two or more equal groups of whole nodes: 2, 4, 8",
        ),
        (1, 64, "--replicas 1: .*: 2, 4, 8"),
        (2, 8, "there is no such number; take more nodes"),
        (2, 12, "there is no such number"),
    ):
        with pytest.raises(UserError, match=said):
            check_replicas(groups, config, world, 8)


def test_one_line_compares_with_and_without_replicas() -> None:
    alone = expect(MANY.saves, MANY.step_s, MANY.mtbf_s, MANY.groups, MANY.restart_s)
    ahead = Outlook(saving=MANY.saves, failures=alone, replicas=MANY.told())
    assert ahead.lines()[-1] == (
        f"  with 8 replica groups of 1 node: goodput 94.2% (without: {alone.goodput:.1%}); fewer groups cost 3.8%,"
        " stops 2.0%; best save every 8640 steps"
    )
    assert ahead.data()["replicas"]["goodput"] == MANY.told().goodput > alone.goodput
