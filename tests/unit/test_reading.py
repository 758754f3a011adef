"""What the host reads of a step: the numbers as they are, and on the device whether the step is to be taken."""

import math

import pytest
import torch

from torchtitan_graph.steps.reading import Read, Reading

GATHERED = torch.tensor([[0.25, 0, 0], [0.5, 2, 15]])  # of two ranks: loss, news, signal


def test_numbers_arrive_as_they_are_and_counts_exact() -> None:
    num_tokens = torch.tensor(2**40 + 1)
    reading = Reading(GATHERED, torch.tensor(1.5), num_tokens, torch.tensor([3, 2**40 - 2]))
    assert reading.wait() == Read([0.25, 0.5], [0, 2], 15, 1.5, 2**40 + 1, [3, 2**40 - 2])
    assert Reading(GATHERED, torch.tensor(1.5), num_tokens).wait().by_source == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "norm", "neither"])
def test_a_step_stops_for_any_loss_and_for_the_norm(where: str, bad: float) -> None:
    gathered = GATHERED.clone()
    gathered[1, 0] = bad if where == "loss" else 0.5
    reading = Reading(gathered, torch.tensor(bad if where == "norm" else 1.5), torch.tensor(8))
    assert reading.stops.item() == (where != "neither") and reading.stops.dtype == torch.float32


@pytest.mark.parametrize(
    ("limits", "skips"), [((0.75, 1.5), False), ((0.74, 1.5), True), ((0.75, 1.4), True), ((math.inf, math.inf), False)]
)
def test_a_step_stops_for_the_sum_of_losses_and_the_norm_above_their_limits(
    limits: tuple[float, float], skips: bool
) -> None:
    reading = Reading(GATHERED, torch.tensor(1.5), torch.tensor(8), None, torch.tensor(limits, dtype=torch.float64))
    assert (reading.stops.item() == 1.0) == skips == reading.wait().skips


def test_what_is_decided_is_read() -> None:
    reading = Reading(GATHERED, torch.tensor(1.5), torch.tensor(8), stops=torch.tensor(1.0))
    assert reading.stops.item() == 1.0 and reading.wait().skips


@pytest.mark.parametrize(
    ("losses", "norm", "says"),
    [
        ([0.25, 0.5], 1.5, ""),
        ([0.25, math.inf], 1.5, "the loss is not finite on ranks [1]"),
        ([0.25, 0.5], math.nan, "the gradient norm is nan"),
        ([math.nan, math.inf], math.inf, "the loss is not finite on ranks [0, 1], the gradient norm is inf"),
    ],
)
def test_only_what_is_not_finite_is_named(losses: list[float], norm: float, says: str) -> None:
    assert Read(losses, [0, 0], 0, norm, 8, []).not_finite() == says
