"""Alarms ring when they should, and only then; the slowest rank is found."""

import json
import logging
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pool import run_on
from torchtitan_graph.log import logger
from torchtitan_graph.metrics.health import FEWEST, Alarm, Leaps, compare_ranks, limit


@pytest.fixture(autouse=True)
def log_to_caplog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "propagate", True)


def watch(values: list[float], threshold: float = 10.0) -> None:
    alarm = Alarm("loss", "metrics.loss_alarm", threshold)
    for step, value in enumerate(values, start=1):
        alarm.watch(step, value)


def noise(num_values: int) -> list[float]:
    generator = random.Random(0)
    return [3.0 + generator.gauss(0, 0.1) for _ in range(num_values)]


def test_a_leap_is_one_warning_with_its_step(caplog: pytest.LogCaptureFixture) -> None:
    watch([*noise(50), 6.0, 6.5, 6.2, *noise(50)])
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("step 51: the loss leaps to 6, ")
    assert caplog.messages[0].endswith("of the last 50 steps (metrics.loss_alarm = 10)")


def test_the_next_leap_is_another_warning(caplog: pytest.LogCaptureFixture) -> None:
    watch([*noise(50), 6.0, *noise(10), 7.0])
    assert [message.partition(":")[0] for message in caplog.messages] == ["step 51", "step 62"]


@pytest.mark.parametrize(
    "values",
    [
        noise(1000),
        [10.0 - 0.01 * step for step in range(500)],  # it falls
        [*noise(50), 0.1],  # downwards
        [*noise(FEWEST - 1), 100.0],  # too few to compare with
        [*[3.0] * 50, 3.01],  # no deviation at all, hardly a leap
        [*[9.0, 11.0, 10.0] * 17, 24.5],  # 14.5 median distances, 9.8 deviations
    ],
)
def test_no_alarm(values: list[float], caplog: pytest.LogCaptureFixture) -> None:
    watch(values)
    assert caplog.messages == []


def test_0_is_never(caplog: pytest.LogCaptureFixture) -> None:
    watch([*noise(50), 1e9], threshold=0)
    assert caplog.messages == []


@contextmanager
def heard() -> Iterator[list[str]]:
    """Yield the list of what is logged, in a process without pytest."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Keep()
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def compare(rank_times: list[tuple[float, float]], share: float) -> tuple[dict[str, float], list[str]]:
    import torch.distributed as dist

    work_s, data_s = rank_times[dist.get_rank()]
    with heard() as said:
        return compare_ranks(7, 4.0, work_s, data_s, share), said


def test_the_slowest_rank_is_found_by_all_and_told_by_one() -> None:
    (first, told), (second, silent) = run_on(2, compare, [(1.0, 0.5), (2.0, 0.25)], share=0.1)
    assert first == second
    assert first == {"slowest_rank": 1, "slowest_busy_s": 2.25, "slowest_data_s": 0.25, "median_busy_s": 1.5}
    assert silent == []
    assert told == [
        "step 7: the others wait for rank 1: it worked 2.000 s and waited 0.250 s for its data, the median rank took "
        "1.500 s for both, of a step of 4.000 s (metrics.straggler_share = 0.1)"
    ]


@pytest.mark.parametrize(("slowest_s", "share"), [(2.25, 0.2), (1.59, 0.001)], ids=["share", "seconds"])
def test_a_small_difference_is_no_warning(slowest_s: float, share: float) -> None:
    (_, told), _ = run_on(2, compare, [(1.0, 0.5), (slowest_s, 0.0)], share=share)
    assert told == []


def test_a_loss_below_0_has_the_least_deviation_of_one_above() -> None:
    assert limit([-5.0] * FEWEST, 10.0) == pytest.approx(-4.5) and limit([5.0] * FEWEST, 10.0) == pytest.approx(5.5)


def test_a_step_is_skipped_where_the_alarm_would_ring() -> None:
    leaps = Leaps(10.0)
    for step, value in enumerate(noise(FEWEST), start=1):
        assert leaps.limits() == (math.inf, math.inf)
        leaps.add(step, value, 2 * value, False)
    of_loss, of_norm = leaps.limits()
    assert 3.5 < of_loss < 5 and of_norm == pytest.approx(2 * of_loss)


def skip() -> list[str]:
    with heard() as said:
        Leaps(10.0).add(3, 1.0, 2.0, skipped=True)
    return said


def test_one_rank_tells_of_a_skipped_step() -> None:
    (told,), silent = run_on(2, skip)
    assert told.startswith("step 3 is skipped") and silent == []


def test_a_lasting_rise_is_not_skipped_for_ever() -> None:
    leaps = Leaps(10.0)
    for step, value in enumerate([*noise(100), *(x + 5 for x in noise(100))], start=1):
        leaps.add(step, value, 1.0, value > leaps.limits()[0])
    assert 40 < leaps.num_skipped < 60


def test_what_is_saved_gives_the_same_limits() -> None:
    leaps, other = Leaps(10.0), Leaps(10.0)
    for step, value in enumerate(noise(30), start=1):
        leaps.add(step, value, value / 3, step == 25)
    other.load_state_dict(json.loads(json.dumps(leaps.state_dict())))
    assert other.limits() == leaps.limits() and other.num_skipped == 1


def test_a_run_is_lost_after_skipped_steps_in_a_row_also_if_it_was_stopped_in_between() -> None:
    leaps, other = Leaps(10.0, patience=2), Leaps(10.0, patience=2)
    found = []
    for step, skipped in enumerate([True, False, True, True]):
        leaps.add(step, 1.0, 1.0, skipped)
        found.append(leaps.is_lost())
        if step == 2:
            other.load_state_dict(json.loads(json.dumps(leaps.state_dict())))
    assert found == [False, False, False, True]
    other.add(3, 1.0, 1.0, True)
    assert other.is_lost()
    never = Leaps(10.0)
    never.add(0, 1.0, 1.0, True)
    assert not never.is_lost()
