"""A mixture gives each corpus its share of the rows, whatever the ranks and workers, and wherever it is resumed."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from torchtitan_graph.config import check, load
from torchtitan_graph.config.job import DataSource
from torchtitan_graph.data import IGNORE_INDEX, DataLoader, build_dataloader, merge_states
from torchtitan_graph.data.corpus import ShuffledCorpus
from torchtitan_graph.data.mixture import PERIOD, Mixture, Origin
from torchtitan_graph.data.tokenizer import ByteTokenizer
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger

GLOBAL_BATCH, STEPS = 8, 24
SIZES = {"a": 160, "b": 40, "c": 80}  # 4 lanes, 1 and 2
WEIGHTS = (0.6, 0.3, 0.1)


@pytest.fixture(scope="module")
def make_mixture(texts_source):
    def texts(name: str) -> list[str]:
        return [name * (1 + number * 7 % 17) + f"{number}" for number in range(SIZES[name])]

    def make(weights=WEIGHTS, names=("a", "b", "c"), seed=0) -> Mixture:
        return Mixture({name: ShuffledCorpus(texts_source(texts(name)), "train", seed) for name in names}, weights)

    return make


@pytest.fixture(scope="module")
def make_loader(make_mixture):
    def make(dp_rank=0, dp_degree=1, num_workers=0, *, local_batch_size=None, **mixture) -> DataLoader:
        return DataLoader(
            make_mixture(**mixture), ByteTokenizer(), seed=mixture.get("seed", 0), seq_len=32,
            local_batch_size=local_batch_size or GLOBAL_BATCH // dp_degree, dp_rank=dp_rank, dp_degree=dp_degree,
            num_workers=num_workers,
        )  # fmt: skip

    return make


def take(loaders: list[DataLoader], steps: int) -> list[list[str]]:
    """Hash the rows of every step, in the order of ranks."""
    return [
        [
            hashlib.sha256(row.numpy().tobytes()).hexdigest()
            for loader in loaders
            for row in torch.stack(next(loader), 1)
        ]
        for _ in range(steps)
    ]


def resume(make_loader, state: dict, dp_degree: int, num_workers: int = 0, **mixture) -> list[DataLoader]:
    loaders = [make_loader(rank, dp_degree, num_workers, **mixture) for rank in range(dp_degree)]
    for loader in loaders:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loaders


@pytest.fixture(scope="module")
def reference(make_loader) -> list[list[str]]:
    return take([make_loader()], STEPS)


@pytest.mark.parametrize(
    ("dp_degree_after", "num_workers_after", "dp_degree", "num_workers"),
    [
        (1, 2, 2, 2),
        (4, 0, 1, 0),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((1, 2, 1, 0), (1, 2, 4, 1), (4, 0, 2, 2), (4, 0, 4, 1))
        ),
    ],
)
def test_resume_at_another_degree_and_worker_count(
    make_loader, reference, dp_degree, num_workers, dp_degree_after, num_workers_after
):
    before = [make_loader(rank, dp_degree, num_workers) for rank in range(dp_degree)]
    assert take(before, 9) == reference[:9]
    state = merge_states([loader.state_dict() for loader in before])
    assert take(resume(make_loader, state, dp_degree_after, num_workers_after), STEPS - 9) == reference[9:]


def test_every_step_has_its_share_of_each_corpus(make_mixture):
    mixture = make_mixture()
    counts: Counter[int] = Counter()
    for row in range(PERIOD):
        counts[mixture.place(row, mixture.origin()).source] += 1
        assert all(abs(counts[source] - (row + 1) * weight) < 2 for source, weight in enumerate(WEIGHTS))
    assert all(mixture.place(row, mixture.origin()).source == mixture._sources[row - PERIOD] for row in (PERIOD, 20000))


def test_a_corpus_gives_the_rows_that_it_gives_alone(make_mixture):
    """In their order, every row once, whatever lies between."""
    mixture = make_mixture()
    for source, name in enumerate("abc"):
        alone = make_mixture([1.0], [name])
        first_lane = mixture._first_lanes[source]
        mixed = [place for row in range(2 * PERIOD) if (place := mixture.place(row, mixture.origin())).source == source]
        expected = [alone.place(row, alone.origin()) for row in range(len(mixed))]
        assert [(place.lane - first_lane, place.row) for place in mixed] == [(p.lane, p.row) for p in expected]


@pytest.mark.parametrize("row", [0, 1, 777, PERIOD - 1, PERIOD, 2 * PERIOD + 5])
def test_rows_given_are_those_counted(make_mixture, row):
    mixture, origin = make_mixture(), Origin(100, (50, 30, 20))
    counts = Counter(mixture.place(100 + before, origin).source for before in range(row))
    assert mixture.given(100 + row, origin) == (50 + counts[0], 30 + counts[1], 20 + counts[2])


@pytest.mark.parametrize("dp_degree_after", [1, 2])
def test_other_weights_hold_from_the_resumed_row_on(make_loader, make_mixture, dp_degree_after):
    before = make_loader()
    take([before], 9)
    state = merge_states([before.state_dict()])
    given = state["mixture"]["given"]
    changed = resume(make_loader, state, dp_degree_after, weights=(0.0, 1.0, 1.0))
    take(changed, 2)
    middle = merge_states([loader.state_dict() for loader in changed])
    assert middle["mixture"]["given"] == [given[0], given[1] + GLOBAL_BATCH, given[2] + GLOBAL_BATCH]
    rows_after = [max(row for row, *_ in middle["lanes"][4:5]), sum(row for row, *_ in middle["lanes"][5:])]
    assert rows_after == [given[1] + GLOBAL_BATCH, given[2] + GLOBAL_BATCH]
    # Resumed once more with the new weights, the sequence goes on as if it had not been.
    again = resume(make_loader, middle, 1, weights=(0.0, 1.0, 1.0))
    assert take(again, 3) == take(changed, 3)


def test_targets_are_counted_by_source(make_loader):
    loader, ranks = make_loader(), [make_loader(rank, 2) for rank in range(2)]
    batches = [next(loader) for _ in range(3)]
    take(ranks, 3)
    counts = loader.take_targets()
    assert counts.sum() == sum((batch.labels_BL != IGNORE_INDEX).sum() for batch in batches)
    assert torch.equal(counts, ranks[0].take_targets() + ranks[1].take_targets())
    of_a = sum(((batch.tokens_BL == ord("a")).any(1)).sum() for batch in batches)
    assert of_a == loader.state_dict()["mixture"]["given"][0]
    assert loader.take_targets().tolist() == [0, 0, 0]


# Negative controls, and what is refused


@pytest.mark.parametrize("change", [{"weights": (0.6, 0.29, 0.11)}, {"seed": 1}], ids=["weights", "seed"])
def test_another_mixture_gives_other_rows(make_loader, reference, change):
    assert take([make_loader(**change)], STEPS) != reference


@pytest.mark.parametrize("change", [{"names": ("b", "a", "c")}, {"names": ("a", "b"), "weights": (1, 1)}])
def test_other_corpora_are_refused(make_loader, change):
    with pytest.raises(UserError, match="was saved with corpus = .a: train of"):
        make_loader(**change).load_state_dict(make_loader().state_dict())


def test_the_log_names_the_sources_and_no_message_shows_whole_digests(tmp_path: Path, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("INFO", logger.name)
    positions = []
    for number in range(2):
        file = tmp_path / "x.jsonl"
        file.write_text(f'{{"text": "document {number}"}}\n' * 100)
        sources = [DataSource(dataset_path=str(file), weight=3.0), DataSource("stdlib")]
        data = build_dataloader(
            dataset="", dataset_path=None, sources=sources, split="train", tokenizer=ByteTokenizer(), seed=0, seq_len=8,
            local_batch_size=4, dp_rank=0, dp_degree=1,
        )  # fmt: skip
        positions.append(data.state_dict())
    own, embedded, *_ = dict.fromkeys(caplog.messages)
    of_own = f"{file}; 1 file; 95 of 100 documents, the others are held out for validation; text of the columns text"
    assert own == f"source x.jsonl, 75.00 % of the rows: {of_own}"
    assert embedded.startswith(
        "source stdlib, 25.00 % of the rows: stdlib, the embedded corpus: this Python's own sour"
    )
    with pytest.raises(UserError) as error:
        data.load_state_dict(positions[0])
    assert "corpus = 'x.jsonl: train of " in str(error.value) and not re.search("[0-9a-f]{20}", str(error.value))


def test_entries_of_a_job_are_mixed(tmp_path: Path):
    for name in ("x", "y"):
        (tmp_path / f"{name}.jsonl").write_text(('{"text": "' + name * 30 + '"}\n') * 100)
    sources = [DataSource(dataset_path=str(tmp_path / "x.jsonl"), weight=3.0), DataSource("stdlib", name="python")]

    def loader(sources: list[DataSource]) -> DataLoader:
        return build_dataloader(
            dataset="", dataset_path=None, sources=sources, split="train", tokenizer=ByteTokenizer(), seed=0, seq_len=8,
            local_batch_size=4, dp_rank=0, dp_degree=1,
        )  # fmt: skip

    mixed = loader(sources)
    next(mixed)
    assert mixed.source_names == ("x.jsonl", "python")
    assert mixed.state_dict()["mixture"]["given"] == [3, 1]
    with pytest.raises(UserError, match="training.sources, entry 2: .*no such file"):
        loader([sources[0], DataSource(dataset_path=str(tmp_path / "z"))])


def test_the_least_weight_is_legal():
    check(load(["--training.sources", '[{dataset = "stdlib", weight = 9999}, {dataset = "c4", weight = 1}]']), 1)


@pytest.mark.parametrize(
    ("sources", "others", "message"),
    [
        ('[{dataset = "stdlib", weight = 0.0}]', "", "each weight must be 0 or at least 1/10000 of their sum"),
        ('[{dataset = "stdlib"}, {dataset = "c4", weight = 1e-9}]', "", "each weight must be 0 or at least"),
        ('[{dataset = "stdlib"}, {weight = 2}]', "", "entry 2: needs dataset or dataset_path"),
        ('[{dataset_path = "a/x"}, {dataset_path = "b/x"}]', "", "several entries are called x"),
        ('[{dataset = "stdlib"}]', "--training.dataset_path a", "training.dataset_path = 'a': is not used with"),
        ('[{dataset = "stdlib"}]', "--training.epochs=2", "training.epochs = 2"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(sources: str, others: str, message: str):
    config = load(["--training.sources", sources, *others.split()])
    with pytest.raises(UserError) as caught:
        check(config, 1)
    assert message in str(caught.value)
