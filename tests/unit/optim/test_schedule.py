"""The learning rate of every step, written out."""

import logging
import math

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from torchtitan_graph.config import job
from torchtitan_graph.log import logger
from torchtitan_graph.optim import build_lr_scheduler


@pytest.fixture(autouse=True)
def log_to_caplog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "propagate", True)


def schedule(lr: float = 1.0, **options: object) -> LRScheduler:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    return build_lr_scheduler(optimizer, job.LRScheduler(**options), total_steps=10)


def rates(num_steps: int = 10, **options: object) -> list[float]:
    scheduler = schedule(**options)
    found = []
    for _ in range(num_steps):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def test_warmup_stable_linear_decay() -> None:
    expected = [0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert rates(warmup_steps=4, decay_ratio=0.4) == expected
    assert rates(warmup_steps=4, decay_ratio=0.39) == expected  # 3.9 steps are 4


def test_decay_takes_all_that_follows_the_warmup_by_default() -> None:
    assert rates(warmup_steps=5) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize(
    ("decay_type", "at_half"),
    [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)],
)
def test_shape_of_the_decay(decay_type: str, at_half: float) -> None:
    found = rates(warmup_steps=0, decay_ratio=0.4, decay_type=decay_type)
    assert found[:7] == [1.0] * 7
    assert found[8] == pytest.approx(at_half)
    assert found[7] > found[8] > found[9] > 0


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
def test_the_minimum_is_reached_right_after_the_last_step_and_kept(decay_type: str) -> None:
    found = rates(num_steps=14, warmup_steps=2, decay_type=decay_type, min_lr_factor=0.1)
    assert found[9] > 0.1
    assert found[10:] == [pytest.approx(0.1)] * 4


def test_no_decay() -> None:
    assert rates(num_steps=14, warmup_steps=0, decay_ratio=0.0) == [1.0] * 14


def test_total_steps_of_the_table_replaces_the_length_of_the_run() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_lr_scheduler(optimizer, job.LRScheduler(warmup_steps=0, total_steps=4), total_steps=1000)
    scheduler.load_state_dict({"num_steps_done": 3})
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_run_shorter_than_its_warmup_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = rates(warmup_steps=200)
    assert found == pytest.approx([step / 10 for step in range(1, 11)])
    assert "lr_scheduler.warmup_steps = 200" in caplog.text


def test_a_decay_longer_than_what_follows_the_warmup_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = rates(warmup_steps=5, decay_ratio=0.9)
    assert found == rates(warmup_steps=5)
    assert "lr_scheduler.decay_ratio = 0.9" in caplog.text


def test_state_is_the_number_of_steps_done_and_restores_exactly() -> None:
    whole = schedule(lr=3e-4, warmup_steps=3, decay_type="cosine")
    for _ in range(6):
        whole.optimizer.step()
        whole.step()
    resumed = schedule(lr=3e-4, warmup_steps=3, decay_type="cosine")
    resumed.load_state_dict(whole.state_dict())
    assert whole.state_dict() == {"num_steps_done": 6}
    for _ in range(4):
        assert resumed.get_last_lr() == whole.get_last_lr()
        assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
        for scheduler in (whole, resumed):
            scheduler.optimizer.step()
            scheduler.step()


def test_a_resumed_run_takes_the_learning_rate_that_is_configured_now() -> None:
    resumed = schedule(lr=2.0, warmup_steps=4)
    resumed.load_state_dict({"num_steps_done": 1})
    assert resumed.optimizer.param_groups[0]["lr"] == 1.0
