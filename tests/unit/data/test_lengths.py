"""Of epochs, every row is taken once, in full steps, in one order on any number of ranks and after a resume."""

import hashlib
import json
import math
import time
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pool import run_on
from torchtitan_graph.data import IGNORE_INDEX, Batch, DataLoader, build_dataloader, load_tokenizer, merge_states
from torchtitan_graph.data.batch import PADDING
from torchtitan_graph.data.corpus import ShuffledCorpus
from torchtitan_graph.data.counts import Counts
from torchtitan_graph.data.document import Contexts, Tokens
from torchtitan_graph.data.lane_order import LaneOrder
from torchtitan_graph.data.lengths import ROWS_PER_LANE, Length, count_lengths, epochs_in_words
from torchtitan_graph.data.tokenizer import ByteTokenizer
from torchtitan_graph.errors import UserError


def take(loaders: list[DataLoader], microbatches: int) -> list[str]:
    """Hash the rows of the next microbatches, in the order of ranks."""
    batches = [next(loader) for _ in range(microbatches) for loader in loaders]
    return [
        hashlib.sha256(row.numpy().tobytes()).hexdigest() for batch in batches for row in torch.stack(tuple(batch), 1)
    ]


def to_the_end(loaders: list[DataLoader]) -> list[Batch]:
    batches = []
    while not loaders[0].has_ended:
        batches += [next(loader) for loader in loaders]
    return batches


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=9))
def test_rows_come_from_the_lanes_that_still_have_some(lengths):
    expected = [(lane, k) for k in range(12) for lane, length in enumerate(lengths) if k < length]
    order = LaneOrder(lengths)
    assert [order.place(row) for row in range(len(expected))] == expected
    assert order.num_rows == len(expected) and order.place(len(expected)) is None
    for row in range(len(expected) + 2):
        assert order.given(row) == [sum(lane == each for each, _ in expected[:row]) for lane in range(len(lengths))]


@given(st.integers(1, 9), st.integers(0, 500))
def test_lanes_without_end_are_taken_in_turn(num_lanes, row):
    order = LaneOrder([math.inf] * num_lanes)
    assert order.place(row) == (row % num_lanes, row // num_lanes)
    assert order.given(row) == [-(-(row - lane) // num_lanes) for lane in range(num_lanes)]


class Conversations:
    """Conversations of given lengths, as a source: the tokens of each are its number, the last half are targets."""

    is_whole = True

    def __init__(self, sizes):
        self.sizes, self.digest = sizes, repr(sizes)

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        parts = [torch.full((size,), index).numpy() for size in self.sizes[index]]
        tokens = [Tokens(part, torch.arange(len(part)).numpy() >= len(part) // 2) for part in parts]
        return Contexts(tuple(tokens)) if len(tokens) > 1 else tokens[0]

    def identity(self, index):
        return str(index)


TEXTS = st.lists(st.text("abcdefgh", max_size=30), min_size=1, max_size=12)
SIZES = st.lists(st.lists(st.integers(2, 12), min_size=1, max_size=3), min_size=1, max_size=60)


@st.composite
def sources(draw):
    """Return the texts or conversations of a corpus, repeated so that they fill several lanes."""
    documents = draw(TEXTS | SIZES)
    return documents * draw(st.sampled_from([1, 8]))


def source_of(texts_source, documents):
    return texts_source(documents) if isinstance(documents[0], str) else Conversations(documents)


def documents_of(corpus, epochs: int) -> list[list[int]]:
    """Return the ids of each document of all epochs, and of each of its contexts."""
    found = []
    for epoch in range(epochs):
        for lane in range(corpus.num_lanes):
            for _, document in corpus.documents(lane, epoch, 0):
                if isinstance(document, str):
                    found += [[256, *document.encode(), 257]] if document else []
                else:
                    contexts = document.contexts if isinstance(document, Contexts) else [document]
                    found += [each.ids.tolist() for each in contexts if each.is_target[1:].any()]
    return found


@settings(max_examples=60, deadline=None)
@given(
    sources(),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([12, 31, 64]),
    st.sampled_from([1, 2, 3]),
    st.data(),
)
def test_epochs_against_brute_force(texts_source, documents, epochs, ranks, rows, microbatches, seq_len, after, data):
    """Each token of each document once in each epoch; full steps but the last; the same rows on any number of ranks,
    and after a resume anywhere."""

    def loaders(number: int, rows: int) -> list[DataLoader]:
        corpus = ShuffledCorpus(source_of(texts_source, documents), "all", 0)
        return [
            DataLoader(
                corpus, ByteTokenizer(), seed=0, seq_len=seq_len, local_batch_size=rows, dp_rank=rank,
                dp_degree=number, epochs=epochs, num_microbatches=microbatches,
            )
            for rank in range(number)
        ]  # fmt: skip

    batches = to_the_end(several := loaders(ranks, rows))
    num_rows, tokens, targets = int(several[0].num_rows), [], 0
    in_order = [tuple(x[i] for x in batch) for batch in batches for i in range(rows)]
    for number, (tokens_L, labels_L, _, documents_L) in enumerate(in_order):
        is_token_L = documents_L != PADDING
        assert is_token_L.any() == (number < num_rows), "rows after the last are padding"
        targets += int((labels_L != IGNORE_INDEX).sum())
        tokens += tokens_L[is_token_L].tolist()
    expected = [token for ids in documents_of(several[0]._mixture._corpora[0], epochs) for token in ids]
    assert sorted(tokens) == sorted(expected)
    assert sum(each.tokens for each in several[0].lengths) == len(expected)
    assert len(in_order) - num_rows < ranks * rows, "only the last microbatch is short"

    # Resumed anywhere, on another number of ranks: the rows of an uninterrupted run.
    reference = take(loaders(1, 1), num_rows + 4)
    before = loaders(ranks, rows)
    steps = data.draw(st.integers(0, num_rows // (ranks * rows)))
    assert take(before, steps) == reference[: steps * ranks * rows]
    state = json.loads(json.dumps(merge_states([loader.state_dict() for loader in before])))
    resumed = loaders(after, 1)
    for loader in resumed:
        loader.load_state_dict(state)
    left = len(reference) - steps * ranks * rows
    assert take(resumed, left // after) == reference[steps * ranks * rows :][: left // after * after]


@pytest.fixture(scope="module")
def make_loader(texts_source):
    texts = [hashlib.sha256(b"%d" % number).hexdigest()[: 1 + number * 7 % 60] for number in range(400)]

    def make(rank=0, ranks=1, num_workers=0, *, texts=texts, seq_len=8, epochs=1, split="all", **options) -> DataLoader:
        return DataLoader(
            ShuffledCorpus(texts_source(texts), split, 0), ByteTokenizer(), seed=0, seq_len=seq_len,
            local_batch_size=6 // ranks, dp_rank=rank, dp_degree=ranks, epochs=epochs, num_workers=num_workers,
            **options,
        )  # fmt: skip

    return make


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_last_short_step_is_resumed(make_loader, num_workers):
    whole = make_loader(epochs=2)
    rows = take([whole], math.ceil(whole.num_rows / 6))
    assert whole.has_ended and whole.num_rows % 6
    for steps in (len(rows) // 6 - 1, len(rows) // 6):
        before = [make_loader(rank, 3, epochs=2) for rank in range(3)]
        take(before, steps)
        state = merge_states([loader.state_dict() for loader in before])
        resumed = make_loader(epochs=2, num_workers=num_workers)
        resumed.load_state_dict(state)
        assert take([resumed], len(rows) // 6 - steps) == rows[steps * 6 :]
        assert resumed.has_ended


def test_a_resumed_run_counts_nothing(make_loader, monkeypatch):
    loader = make_loader()
    take([loader], 3)
    state = loader.state_dict()
    monkeypatch.setattr("torchtitan_graph.data.loader.count_lengths", None)
    by_position, by_count = make_loader(), make_loader()
    by_position.load_state_dict(state)
    by_count.count(state)
    by_count.load_state_dict(state)
    following = take([loader], 2)
    assert take([by_position], 2) == following and take([by_count], 2) == following


@pytest.mark.parametrize("most_rows", [6, 24, 198, 6 * 10**6])
def test_no_more_is_counted_than_a_run_takes(make_loader, monkeypatch, most_rows):
    """The order of the rows is the same, so a run that is made longer goes on exactly."""
    whole, some = make_loader(), make_loader(most_rows=most_rows)
    steps = min(most_rows, int(whole.num_rows)) // 6
    assert take([some], steps) == take([whole], steps)
    counted = sum(each.rows for each in some.lengths)
    assert min(most_rows, whole.num_rows) <= counted <= 2 * most_rows + whole._mixture.num_lanes
    longer = make_loader(most_rows=2 * most_rows)
    longer.count(some.state_dict())
    longer.load_state_dict(some.state_dict())
    assert longer.num_rows >= min(2 * most_rows, whole.num_rows)
    assert take([longer], 1) == take([whole], 1)


def test_a_corpus_of_few_rows_has_few_lanes(make_loader):
    """Each lane ends with a row that is full only in part."""
    many, few = make_loader(seq_len=8), make_loader(seq_len=128)
    assert [len(loader.lengths) for loader in (many, few)] == [8, 1]
    assert few.num_rows < 2 * ROWS_PER_LANE <= 8 * ROWS_PER_LANE <= many.num_rows
    resumed = make_loader(seq_len=128)
    resumed.load_state_dict(few.state_dict())
    assert take([resumed], 3) == take([few], 3)


@pytest.mark.parametrize("most_rows", [6, 18, 60])
def test_a_corpus_of_few_rows_has_as_many_lanes_however_few_are_counted(make_loader, most_rows):
    some, whole = make_loader(seq_len=64, most_rows=most_rows), make_loader(seq_len=64)
    assert len(some.lengths) == len(whole.lengths) < make_loader(epochs=0)._mixture.num_lanes
    assert take([some], most_rows // 6) == take([whole], most_rows // 6)


class OneLane:
    """A lane that ends at once, after some seconds, or raises an error of its data."""

    counts = Counts()

    def __init__(self, seconds: float, error: UserError | None = None) -> None:
        self.seconds, self.error = seconds, error

    def next_pieces(self) -> list:
        time.sleep(self.seconds)
        if self.error:
            raise self.error
        return []


def count_together(error: UserError | None = None) -> list[Length] | str:
    """Count two lanes by a rank each; the second takes longer than files may."""
    lanes = [OneLane(0.0), OneLane(0.0 if error else 3.0, error)]
    mixture = SimpleNamespace(num_lanes=2)
    with mock.patch("torchtitan_graph.parallel.agree.FILES_TIMEOUT", timedelta(seconds=1)):
        try:
            return count_lengths(
                mixture, lambda number, _: lanes[number], math.inf, may_merge=False, ranks=(dist.get_rank(), 2)
            )
        except UserError as caught:
            return str(caught)


def test_ranks_that_counted_wait_for_one_that_counts_longer_than_files_take():
    assert run_on(2, count_together) == [[Length(has_ended=True)] * 2] * 2


def test_an_error_of_the_data_that_one_rank_counts_is_raised_on_all_as_it_is():
    assert run_on(2, count_together, UserError("row 7: is bad")) == ["row 7: is bad"] * 2


def test_chats_of_60_tokens_fill_rows_of_512():
    sizes = [[20 + hash_ % 80] for hash_ in (int(hashlib.sha256(b"%d" % i).hexdigest()[:8], 16) for i in range(10_000))]
    corpus = ShuffledCorpus(Conversations(sizes), "all", 0)
    loader = DataLoader(
        corpus, ByteTokenizer(), seed=0, seq_len=512, local_batch_size=16, dp_rank=0, dp_degree=1, epochs=1
    )
    text, *others = epochs_in_words(loader.lengths, 1, 512, 16, True)
    filled = sum(each.tokens for each in loader.lengths) / (512 * loader.num_rows)
    assert filled > 0.98 and not others
    assert text.startswith(f"one epoch: {loader.num_rows:,} rows of 512 tokens in ")


def test_few_conversations_fill_rows_over_the_end_of_an_epoch():
    """40 conversations are 1.2 rows: two of an epoch alone would be padded by 40 %."""
    corpus = ShuffledCorpus(Conversations([[30 + i % 7] for i in range(40)]), "all", 0)
    loader = DataLoader(
        corpus, ByteTokenizer(), seed=0, seq_len=1024, local_batch_size=1, dp_rank=0, dp_degree=1, epochs=10
    )
    (length,) = loader.lengths
    assert length.tokens == 10 * sum(30 + i % 7 for i in range(40))
    assert length.tokens > 0.9 * 1024 * length.rows


@pytest.mark.parametrize("without_counts", [True, False])
def test_a_position_of_conversations_by_an_earlier_release_is_refused_with_what_to_do(without_counts):
    corpus = ShuffledCorpus(Conversations([[20], [5]] * 3), "all", 0)
    loader = DataLoader(corpus, ByteTokenizer(), seed=0, seq_len=10, local_batch_size=1, dp_rank=0, dp_degree=1)
    next(loader)
    state = merge_states([loader.state_dict()])
    loader.load_state_dict(state)
    earlier = {**state, "corpus": "another digest", "seq_len": "10, longer conversations: cut"}
    if without_counts:
        earlier = {key: value for key, value in state.items() if key != "counted"}
    with pytest.raises(UserError, match=r"by an earlier release, .*exclude_from_loading = \['dataloader'\]"):
        loader.load_state_dict(earlier)


def test_what_is_left_out_is_counted_once(make_loader):
    corpus = ShuffledCorpus(Conversations([[20], [5], [1], [9, 1]] * 3), "all", 0)
    loader = DataLoader(
        corpus, ByteTokenizer(), seed=0, seq_len=10, local_batch_size=1, dp_rank=0, dp_degree=1, epochs=2,
        too_long="drop",
    )  # fmt: skip
    counts = sum((each.counts for each in loader.lengths), Counts())
    assert (counts.dropped, counts.without_target) == (6, 12)
    to_the_end([loader])
    assert loader.counts == counts


@pytest.mark.parametrize(
    ("saved", "here"), [(1, 2), (0, 1), (1, 0)], ids=["fewer", "without epochs", "with epochs"]
)  # fmt: skip
def test_a_position_of_other_epochs_is_refused(make_loader, saved, here):
    with pytest.raises(UserError, match=f"was saved with epochs = {saved or None}.* this run has {here or None}"):
        make_loader(epochs=here).load_state_dict(make_loader(epochs=saved).state_dict())


def test_a_position_of_an_earlier_release_is_refused_with_epochs_and_read_without(make_loader):
    state = make_loader(epochs=0).state_dict()
    del state["epochs"]
    make_loader(epochs=0).load_state_dict(state)
    with pytest.raises(UserError, match="or by a release that took the rows of epochs in another order"):
        make_loader(epochs=1).load_state_dict(state)


@pytest.mark.slow
def test_an_epoch_of_the_embedded_corpus_is_padded_by_less_than_2_percent():
    for tokenizer in (ByteTokenizer(), load_tokenizer("tests/assets/tokenizer")):
        loader = build_dataloader(
            dataset="stdlib", dataset_path=None, split="train", tokenizer=tokenizer, seed=0, seq_len=2048,
            local_batch_size=16, dp_rank=0, dp_degree=1, epochs=1,
        )  # fmt: skip
        room = 2048 * 16 * math.ceil(loader.num_rows / 16)
        assert sum(each.tokens for each in loader.lengths) > 0.98 * room
