"""The worker pool: results in rank order, warm processes, and failures that name every rank."""

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from pool import PoolFailed, mesh, run_on
from torchtitan_graph.check import pool
from torchtitan_graph.parallel.agree import files_group


def total_of_ranks(start: float, *, scale: float = 1.0) -> float:
    x = torch.full((), scale * (start + dist.get_rank()))
    dist.all_reduce(x)
    return x.item()


def process_id() -> int:
    return os.getpid()


def surroundings() -> tuple:
    mesh_is_kept = mesh((2, 1), ("dp_shard", "tp")) is mesh((2, 1), ("dp_shard", "tp"))
    env = (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"])
    return env, torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), mesh_is_kept


def gloo_threads() -> list[int]:
    groups = [dist.group.WORLD, mesh((2,), ("dp_shard",)).get_group(), files_group()]
    return [group._get_backend(torch.device("cpu")).options._threads for group in groups]


def random_numbers() -> torch.Tensor:
    return torch.rand(3)


def rank_1_raises_while_the_others_wait() -> None:
    if dist.get_rank() == 1:
        raise ValueError("broken on purpose")
    dist.barrier()


def rank_1_crashes_while_the_others_wait() -> None:
    if dist.get_rank() == 1:
        os._exit(17)
    dist.barrier()


def rank_0_sleeps() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def returns_what_cannot_be_sent() -> object:
    return lambda: None


def warns() -> None:
    warnings.warn("worn out", stacklevel=1)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_rank_runs_the_call_and_results_come_in_rank_order(world_size: int) -> None:
    expected = sum(2.0 * (1.0 + rank) for rank in range(world_size))
    assert run_on(world_size, total_of_ranks, 1.0, scale=2.0) == [expected] * world_size


def test_every_group_runs_its_collectives_in_one_thread():
    """Two would corrupt the heap, see `one_thread_per_gloo_group`; rarely, so this asks for their number."""
    assert run_on(2, gloo_threads) == [[1, 1, 1]] * 2


def test_processes_are_kept_between_calls() -> None:
    ids = run_on(2, process_id)
    assert len({*ids, os.getpid()}) == 3
    assert run_on(2, process_id) == ids


def test_a_call_finds_its_surroundings_set() -> None:
    assert run_on(2, surroundings) == [((str(rank), str(rank), "2"), 1, True, True) for rank in range(2)]


def test_every_call_starts_from_the_same_seed() -> None:
    first, second = run_on(1, random_numbers), run_on(1, random_numbers)
    assert torch.equal(first[0], second[0])


@pytest.mark.slow
def test_an_exception_shows_every_rank_and_the_pool_recovers() -> None:
    before = run_on(2, process_id)
    with pytest.raises(PoolFailed) as failure:
        run_on(2, rank_1_raises_while_the_others_wait)
    text = str(failure.value)
    assert "rank 1 failed first" in text
    assert "ValueError: broken on purpose" in text.split("--- rank 1:")[1]
    assert "rank_1_raises_while_the_others_wait" in text.split("--- rank 0:")[1].split("--- rank 1:")[0]
    assert not set(before) & set(run_on(2, process_id))


@pytest.mark.slow
def test_a_crash_shows_its_exit_code() -> None:
    with pytest.raises(PoolFailed) as failure:
        run_on(2, rank_1_crashes_while_the_others_wait)
    assert "exit code 17" in str(failure.value).split("--- rank 1:")[1]
    assert "rank_1_crashes_while_the_others_wait" in str(failure.value).split("--- rank 0:")[1].split("--- rank 1:")[0]
    assert run_on(2, total_of_ranks, 0.0) == [1.0, 1.0]


@pytest.mark.slow
def test_a_timeout_shows_where_the_slow_rank_is() -> None:
    with pytest.raises(PoolFailed) as failure:
        run_on(2, rank_0_sleeps, timeout=1)
    text = str(failure.value)
    assert "not done after 1 s" in text
    assert "rank_0_sleeps" in text.split("--- rank 0:")[1].split("--- rank 1:")[0]
    assert "--- rank 1: returned" in text


def test_workers_that_do_not_start_in_time_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "START_TIMEOUT_S", 0.5)  # no process has imported torch by then
    monkeypatch.setattr(pool, "_started", {})  # another test may have started as many
    with pytest.raises(PoolFailed, match=r"starting on 3 ranks: not done after 0\.5 s"):
        run_on(3, total_of_ranks, 0.0)


@pytest.mark.slow
def test_a_result_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(PoolFailed, match="pickle"):
        run_on(1, returns_what_cannot_be_sent)


def test_a_warning_is_an_error_in_the_workers_too() -> None:
    with pytest.raises(PoolFailed, match="UserWarning: worn out"):
        run_on(1, warns)


@pytest.mark.filterwarnings("ignore:worn out")
def test_a_test_can_allow_a_warning_in_the_workers() -> None:
    assert run_on(1, warns) == [None]
