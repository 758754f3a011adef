"""What fails on one rank is raised on all, and nobody waits."""

import torch
import torch.distributed as dist

from pool import run_on
from torchtitan_graph.parallel.agree import (
    LateMax,
    describe_ranks,
    files_group,
    gather_from_ranks,
    on_all_ranks,
    on_rank_0,
)
from torchtitan_graph.transient import is_transient


class Unpicklable(Exception):
    def __reduce__(self) -> str:
        raise TypeError("not to be sent")


def fail_on(rank: int, error: Exception) -> int:
    if dist.get_rank() == rank:
        raise error
    return dist.get_rank()


def errors(rank: int) -> list[str]:
    found = []
    for agree in (on_rank_0, on_all_ranks, gather_from_ranks):
        for error in (OSError("disk full"), Unpicklable("odd")):
            try:
                agree(lambda error=error: fail_on(rank, error), files_group())  # type: ignore[misc]
            except Exception as caught:
                found.append(f"{type(caught).__name__}: {caught}")
    return found


def lose_the_store(rank: int) -> None:
    if dist.get_rank() == rank:
        try:
            raise ConnectionResetError("the store")
        except ConnectionResetError as error:
            raise ValueError("of a library") from error


def are_transient(rank: int) -> list[bool]:
    found = []
    for agree in (on_rank_0, on_all_ranks):
        try:
            agree(lambda: lose_the_store(rank), files_group())
        except Exception as caught:
            found.append(is_transient(caught))
    return found


def test_a_transient_error_is_one_on_all_ranks() -> None:
    assert run_on(2, are_transient, 0, timeout=60) == [[True, True]] * 2
    assert run_on(2, are_transient, 1, timeout=60) == [[True]] * 2


def told(rank: int) -> list[str]:
    return [f"RanksFailed: rank {rank}: OSError: disk full", f"RanksFailed: rank {rank}: Unpicklable: odd"]


def test_an_error_of_rank_0_is_raised_on_all_ranks() -> None:
    own = ["OSError: disk full", "RuntimeError: Unpicklable: odd"]  # of on_rank_0, as it was where it can be sent
    assert run_on(2, errors, 0) == [own + told(0) * 2] * 2


def test_an_error_of_another_rank_is_raised_on_all_ranks() -> None:
    assert run_on(2, errors, 1) == [told(1) * 2] * 2


def results() -> tuple[int, int, list[int]]:
    return on_rank_0(lambda: dist.get_rank() + 7), on_all_ranks(dist.get_rank), gather_from_ranks(dist.get_rank)


def test_results_go_where_they_should() -> None:
    assert run_on(2, results) == [(7, 0, [0, 1]), (7, 1, [0, 1])]


def test_one_process_needs_no_group() -> None:
    assert (on_rank_0(lambda: 1), on_all_ranks(lambda: 2), gather_from_ranks(lambda: 3), files_group()) == (
        1,
        2,
        [3],
        None,
    )


def test_a_thousand_failures_are_told_in_a_line() -> None:
    text = describe_ranks(dict.fromkeys(range(1000), "OSError: full"))
    assert text.startswith("rank 0: OSError: full; rank 1") and text.endswith("and 996 ranks more")


def exchanged() -> list[int]:
    late, rank = LateMax(torch.device("cpu")), dist.get_rank()
    return [late.exchange(number) for number in (rank * 3, 7 - rank, 0, 0)]


def test_the_greatest_of_all_ranks_numbers_is_known_one_call_later() -> None:
    assert run_on(2, exchanged) == [[0, 3, 7, 0]] * 2
