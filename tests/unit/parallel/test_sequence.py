"""A row is dealt to the ranks in short blocks, each token once, and comes back in order."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pool import run_on
from torchtitan_graph.parallel.sequence import block_length, in_order, places_of, whole_rows

CPU = torch.device("cpu")
ROWS = [(8, 2), (12, 2), (512, 2), (4096, 4), (2 * 3 * 131, 3), (2 * 8 * 96, 8)]


def dealt(L: int, degree: int) -> Tensor:
    return torch.stack([places_of(rank, L, degree, CPU) for rank in range(degree)])


@pytest.mark.parametrize(("L", "degree"), ROWS)
def test_each_place_is_dealt_once_and_found_again(L: int, degree: int) -> None:
    places_RL = dealt(L, degree)
    assert places_RL.shape == (degree, L // degree)
    assert in_order(places_RL.view(degree, 1, -1, 1)).flatten().tolist() == list(range(L))


def test_blocks_are_dealt_forth_and_back() -> None:
    assert dealt(1024, 2).view(2, -1, 128)[:, :, 0].tolist() == [[0, 384, 512, 896], [128, 256, 640, 768]]


@pytest.mark.parametrize(("L", "degree"), ROWS)
def test_no_rank_sees_more_than_another_under_a_causal_mask(L: int, degree: int) -> None:
    seen_R = dealt(L, degree).double().sum(1)
    assert (seen_R - seen_R.mean()).abs().max() <= 1e-9 * seen_R.mean()


@pytest.mark.parametrize(("L", "degree", "block"), [(1024, 2, 128), (32, 2, 8), (4 * 96, 2, 96), (4 * 131, 2, 1)])
def test_blocks_are_as_long_as_they_divide(L: int, degree: int, block: int) -> None:
    assert block_length(L, degree) == block


def gathered_with_gradients() -> tuple[list[bool], list[bool]]:
    """Gather keys and values of other widths; every rank then weighs each place by a number of its own."""
    rank, degree, L = dist.get_rank(), dist.get_world_size(), 12
    whole = [torch.arange(2 * L * 6.0).view(2, L, 2, 3), torch.arange(2.0 * L).view(2, L, 1).neg()]
    parts = tuple(x[:, places_of(rank, L, degree, CPU)].requires_grad_() for x in whole)
    found = whole_rows(parts, degree, dist.group.WORLD.group_name)  # type: ignore[union-attr]
    sum((x * (rank + 1) * w).sum() for x, w in zip(found, whole, strict=True)).backward()  # type: ignore[union-attr]
    gradients = [w[:, places_of(rank, L, degree, CPU)] * sum(range(1, degree + 1)) for w in whole]
    return (
        [torch.equal(x, w) for x, w in zip(found, whole, strict=True)],
        [torch.equal(x.grad, g) for x, g in zip(parts, gradients, strict=True)],  # type: ignore[arg-type]
    )


def test_parts_are_gathered_in_order_and_gradients_summed() -> None:
    assert run_on(2, gathered_with_gradients) == [([True, True], [True, True])] * 2
