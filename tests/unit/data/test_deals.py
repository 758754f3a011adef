"""Microbatches that are dealt to the replicas that live: a step has the same rows whoever lives, and none is lost."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pool import run_on
from torchtitan_graph.data import IGNORE_INDEX, DataLoader, merge_states
from torchtitan_graph.data.batches import Deal
from torchtitan_graph.data.corpus import ShuffledCorpus
from torchtitan_graph.data.counts import Counts
from torchtitan_graph.data.mixture import Mixture
from torchtitan_graph.data.tokenizer import ByteTokenizer
from torchtitan_graph.parallel.layout import ParallelDims
from torchtitan_graph.trainer import position_of_all

TOTAL, RANKS, ROWS = 6, 2, 2  # microbatches of a step, ranks of a group, rows of a rank's microbatch


@pytest.fixture(scope="module")
def make(texts_source):
    texts = [f"document {number} " * (1 + number % 5) for number in range(120)]

    def loader(rank: int = 0, ranks: int = RANKS, **options) -> DataLoader:
        halves = {"a": texts[::2], "b": texts[1::2]}
        parts = {name: ShuffledCorpus(texts_source(half), "train", 0) for name, half in halves.items()}
        return DataLoader(
            Mixture(parts, [2.0, 1.0]), ByteTokenizer(), seed=0, seq_len=32, local_batch_size=ROWS, dp_rank=rank,
            dp_degree=ranks, num_microbatches=TOTAL, **options,
        )  # fmt: skip

    return loader


def rows_of(batches) -> list[bytes]:
    return [row.numpy().tobytes() for batch in batches for row in batch.tokens_BL]


def exchange(loaders: list[DataLoader], counts: list[int]) -> list[list[int]]:
    """Call `exchange` of the same rank of several replicas together, and return what each returns."""
    told: list[list[int]] = []
    barrier = threading.Barrier(len(loaders))

    def gather(numbers: list[int]) -> list[list[int]]:
        told.append(numbers)
        barrier.wait(10)
        return told

    with ThreadPoolExecutor(len(loaders)) as threads:
        return list(threads.map(lambda loader, count: loader.exchange([count], gather), loaders, counts))


@pytest.fixture(scope="module")
def reference(make):
    """The rows of each step of a job without replicas, by rank, with the position behind them and its targets."""
    loaders, steps = [make(rank) for rank in range(RANKS)], []
    for _ in range(12):
        batches = [[next(loader) for _ in range(TOTAL)] for loader in loaders]
        targets = [sum(int((b.labels_BL != IGNORE_INDEX).sum()) for b in each) for each in batches]
        by_source = [loader.take_targets().tolist() for loader in loaders]
        position = merge_states([loader.state_dict() for loader in loaders])
        steps.append(([sorted(rows_of(each)) for each in batches], targets, by_source, position))
    return steps


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", range(3))
def test_a_step_has_the_same_rows_whoever_lives(make, reference, seed: int, workers: int) -> None:
    """Replicas come and go at random, and steps are done anew: rows, targets and position are those of one job."""
    rng = random.Random(seed)
    loaders: dict[int, list[DataLoader]] = {}
    step, position = 0, merge_states([make(rank).state_dict() for rank in range(RANKS)])
    while step < len(reference):
        living = sorted(rng.sample(range(4), rng.randint(1, 4)))
        for place, number in enumerate(living):
            if number not in loaders or rng.random() < 0.2:
                loaders[number] = [make(rank, num_workers=workers) for rank in range(RANKS)]
            for loader in loaders[number]:
                loader.deal = Deal(place, len(living), TOTAL)
                loader.load_state_dict(position)
        for _ in range(rng.randint(1, 3)):  # steps of this quorum
            if step == len(reference):
                break
            rows, targets, by_source, behind = reference[step]
            for rank in range(RANKS):
                here = [loaders[number][rank] for number in living]
                batches = [[next(loader) for _ in range(loader.deal.own)] for loader in here]
                own = [sum(int((b.labels_BL != IGNORE_INDEX).sum()) for b in each) for each in batches]
                assert sorted(row for each in batches for row in rows_of(each)) == rows[rank]
                assert exchange(here, own) == [[targets[rank]]] * len(living)
                assert all(loader.take_targets().tolist() == by_source[rank] for loader in here)
            if rng.random() < 0.3:  # the vote is no: what was read is read again
                for number in living:
                    for loader in loaders[number]:
                        loader.load_state_dict(position)
                continue
            for number in living:
                assert merge_states([loader.state_dict() for loader in loaders[number]]) == behind
            position, step = behind, step + 1


def test_a_deal_without_replicas_is_every_microbatch() -> None:
    assert [Deal(total=3).number(batch) for batch in range(7)] == list(range(7))


def test_deals_are_disjoint_and_whole() -> None:
    for total in range(1, 9):
        for living in range(1, total + 1):
            deals = [Deal(place, living, total) for place in range(living)]
            numbers = [deal.number(batch) for deal in deals for batch in range(2 * deal.own)]
            assert sorted(numbers) == list(range(2 * total))
            assert max(deal.own for deal in deals) - min(deal.own for deal in deals) <= 1


def test_the_position_is_not_known_within_a_step(make) -> None:
    loader = make()
    loader.deal = Deal(1, 2, TOTAL)
    next(loader)
    with pytest.raises(AssertionError, match="after whole steps"):
        loader.state_dict()


def position_with_one_document_cut() -> dict:
    own = {"lanes": [[0, 0, 0, 0]], "counts": list(Counts(cut=1)), "counted": list(Counts(cut=5)), "rows": 4}
    return position_of_all(own, ParallelDims(dp_shard=2, tp=2).layout("cpu"))


def test_ranks_that_read_the_same_rows_count_them_once() -> None:
    for position in run_on(4, position_with_one_document_cut):
        assert position["counted"] == list(Counts(cut=7))
