"""Rows hold every token once as input, have every target within a document, and keep documents apart."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torchtitan_graph.data import IGNORE_INDEX, PADDING
from torchtitan_graph.data.corpus import ShuffledCorpus
from torchtitan_graph.data.counts import Counts
from torchtitan_graph.data.document import Tokens
from torchtitan_graph.data.packing import Cursor, Lane, Packing
from torchtitan_graph.data.tokenizer import ByteTokenizer
from torchtitan_graph.data.whole_lane import WINDOW_ROWS, WholeLane, best_fit, open_lane, window_rows
from torchtitan_graph.errors import UserError

TOKENIZER = ByteTokenizer()
TEXTS = st.lists(st.text("abcdefgh", max_size=25), min_size=1, max_size=15)


def lane_of(texts_source, texts, seq_len, epochs=1, cursor=None, whole=False) -> Lane:
    corpus = ShuffledCorpus(texts_source(texts), "all", seed=0)
    assert corpus.num_lanes == 1
    return open_lane(corpus, TOKENIZER, Packing(seq_len, epochs, whole), 0, cursor or Cursor())


def documents_of(texts_source, texts, epochs=1) -> list[list[int]]:
    corpus = ShuffledCorpus(texts_source(texts), "all", seed=0)
    return [
        [TOKENIZER.bos_id, *text.encode(), TOKENIZER.eos_id]
        for epoch in range(epochs)
        for _, text in corpus.documents(0, epoch, 0)
        if text
    ]


def expected_rows(documents, seq_len) -> list[np.ndarray]:
    """Cut the stream of (token, target, number of its document) into rows, token by token."""
    stream = [
        (token, target, number)
        for number, document in enumerate(documents)
        for token, target in zip(document, [*document[1:], IGNORE_INDEX], strict=True)
    ]
    padding = (TOKENIZER.eos_id, IGNORE_INDEX, PADDING)
    stream += [padding] * (-len(stream) % seq_len)
    rows = []
    for start in range(0, len(stream), seq_len):
        row, positions = stream[start : start + seq_len], []
        for place, (_, _, number) in enumerate(row):
            same = place > 0 and row[place - 1][2] == number
            positions.append(positions[-1] + 1 if same else 0)
        tokens, labels, numbers = zip(*row, strict=True)
        rows.append(
            np.array([tokens, labels, positions, [PADDING if n == PADDING else n - numbers[0] for n in numbers]])
        )
    return rows


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(1, 12))
def test_rows_are_the_stream_of_documents_cut(texts_source, texts, seq_len):
    lane = lane_of(texts_source, texts, seq_len)
    for expected in expected_rows(documents_of(texts_source, texts), seq_len):
        np.testing.assert_array_equal(lane.next_row(), expected)


@settings(max_examples=50, deadline=None)
@given(TEXTS, st.integers(1, 12))
def test_after_the_last_epoch_padding_follows_for_ever(texts_source, texts, seq_len):
    lane = lane_of(texts_source, texts, seq_len)
    for _ in expected_rows(documents_of(texts_source, texts), seq_len):
        lane.next_row()
    for _ in range(2):
        tokens_L, labels_L, positions_L, documents_L = lane.next_row()
        assert (labels_L == IGNORE_INDEX).all()
        assert (tokens_L == TOKENIZER.eos_id).all()
        assert positions_L.tolist() == list(range(seq_len))
        assert (documents_L == PADDING).all()


@pytest.mark.parametrize("epochs", [0, 3])
def test_the_next_epoch_follows_in_the_same_row_and_another_order(texts_source, epochs):
    texts = [str(number) * 3 for number in range(10)]
    stream = [token for document in documents_of(texts_source, texts, epochs=3) for token in document]
    lane = lane_of(texts_source, texts, 7, epochs)
    got = np.concatenate([lane.next_row()[0] for _ in range(len(stream) // 7)])
    assert got.tolist() == stream[: len(got)]
    if epochs:
        assert (lane.next_row()[1] != IGNORE_INDEX).sum() < 7
        assert (lane.next_row()[1] == IGNORE_INDEX).all()
    per_epoch = len(stream) // 3
    assert stream[:per_epoch] != stream[per_epoch : 2 * per_epoch]


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(2, 30))
def test_whole_documents_begin_a_row_or_follow_one_that_leaves_room(texts_source, texts, seq_len):
    lane = lane_of(texts_source, texts, seq_len, whole=True)
    expected: list[list[int]] = [[]]
    for document in documents_of(texts_source, texts):
        for start in range(0, len(document), seq_len):  # one that is longer than a row is cut
            piece = document[start : start + seq_len]
            if len(expected[-1]) + len(document) - start > seq_len and expected[-1]:
                expected.append([])
            expected[-1] += piece
    for tokens in filter(None, expected):
        row = lane.next_row()
        assert lane.filled == len(tokens)
        assert row[0].tolist() == tokens + [TOKENIZER.eos_id] * (seq_len - len(tokens))
        assert (row[1, len(tokens) :] == IGNORE_INDEX).all()


@settings(max_examples=50, deadline=None)
@given(TEXTS, st.integers(1, 12), st.integers(0, 20), st.integers(0, 2), st.booleans())
def test_a_cursor_resumes_its_lane(texts_source, texts, seq_len, rows_before, epochs, whole):
    assume(any(texts) or epochs)
    lane = lane_of(texts_source, texts, seq_len, epochs, whole=whole)
    for number in range(rows_before):
        lane.next_row() if number % 2 else lane.next_pieces()
    resumed = lane_of(texts_source, texts, seq_len, epochs, lane.cursor, whole)
    for _ in range(5):
        np.testing.assert_array_equal(resumed.next_row(), lane.next_row())
        assert resumed.cursor == lane.cursor


def test_documents_without_text_are_left_out(texts_source):
    texts = ["", "one", "", "", "two", ""]
    lane = lane_of(texts_source, texts, 5)
    tokens = [lane.next_row()[0].tolist() for _ in range(2)]
    assert sorted(bytes(row[1:4]) for row in tokens) == [b"one", b"two"]
    assert lane.next_row()[1].tolist() == [IGNORE_INDEX] * 5
    with pytest.raises(UserError, match="got no document with text in 16 epochs: documents without text: 34$"):
        lane_of(texts_source, ["", ""], 5, epochs=0).next_row()


def test_a_cursor_inside_a_document_without_text_goes_on_behind_it(texts_source):
    texts = ["", "one"] * 4  # as a run saved it that still trained on the bos and eos of empty documents
    corpus = ShuffledCorpus(texts_source(texts), "all", seed=0)
    documents = dict(corpus.documents(0, 0, 0))
    empty = next(index for index, text in documents.items() if not text and documents.get(index + 1))
    row = lane_of(texts_source, texts, 5, cursor=Cursor(3, 0, empty, 1)).next_row()
    assert row[0].tolist() == [TOKENIZER.bos_id, *b"one", TOKENIZER.eos_id]


def test_a_cursor_one_token_off_is_noticed(texts_source):
    lane = lane_of(texts_source, ["a document", "another one"], 4)
    lane.next_row()
    off = lane_of(texts_source, ["a document", "another one"], 4, cursor=lane.cursor._replace(offset=3))
    assert not np.array_equal(off.next_row(), lane.next_row())


def test_a_split_without_documents_is_refused_where_it_repeats(texts_source):
    class Empty:
        num_lanes, digest = 1, ""

        def __init__(self, whole):
            self.whole = whole

        def is_whole(self, lane):
            return self.whole

        def documents(self, lane, epoch, start):
            return iter(())

    for whole in (False, True):
        with pytest.raises(UserError, match="too few documents"):
            open_lane(Empty(whole), TOKENIZER, Packing(4), 0, Cursor()).next_row()


class Whole:
    """Conversations of given lengths: the tokens of each are its number, the last half of them targets."""

    num_lanes, digest = 1, "whole"

    def __init__(self, sizes):
        self.sizes = sizes

    def is_whole(self, lane):
        return True

    def documents(self, lane, epoch, start):
        for number in range(start, len(self.sizes)):
            size = self.sizes[number]
            yield number, Tokens(np.full(size, number), np.arange(size) >= size // 2)


def whole_lane(sizes, seq_len=10, epochs=1, cursor=None, **options) -> WholeLane:
    lane = open_lane(Whole(sizes), TOKENIZER, Packing(seq_len, epochs, **options), 0, cursor or Cursor())
    assert isinstance(lane, WholeLane)
    return lane


SIZES = st.lists(st.integers(2, 14), min_size=1, max_size=60)


def rows_of(lane) -> list[np.ndarray]:
    """Return the rows of a lane to its end."""
    rows = []
    while (row := lane.next_row()) is not None and lane.filled:
        rows.append(row)
    return rows


@settings(max_examples=60, deadline=None)
@given(SIZES, st.sampled_from(["cut", "drop"]), st.booleans())
def test_conversations_are_in_one_row_each_and_once(sizes, too_long, alone):
    lane = whole_lane(sizes, too_long=too_long, alone=alone)
    found: dict[int, int] = {}
    for tokens_L, labels_L, positions_L, documents_L in rows_of(lane):
        for document in np.unique(documents_L[: lane._packing.seq_len]):
            mine = documents_L == document
            number, size = tokens_L[mine][0], int(mine.sum())
            assert (number == TOKENIZER.eos_id) == (document == PADDING)
            if document == PADDING:
                assert (labels_L[mine] == IGNORE_INDEX).all()
                continue
            assert (tokens_L[mine] == number).all() and number not in found
            found[number] = size
            assert positions_L[mine].tolist() == list(range(size))
            is_target = np.arange(1, size) >= sizes[number] // 2
            assert labels_L[mine][:-1].tolist() == np.where(is_target, number, IGNORE_INDEX).tolist()
            assert labels_L[mine][-1] == IGNORE_INDEX
        assert not alone or len(np.unique(tokens_L)) <= 2
    kept = {i: min(n, 10) for i, n in enumerate(sizes) if n <= 10 or too_long == "cut"}
    assert found == kept


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(0, 20), st.integers(0, 2), st.booleans())
def test_a_cursor_resumes_a_lane_of_conversations(sizes, rows_before, epochs, alone):
    lane = whole_lane(sizes, epochs=epochs, alone=alone)
    for number in range(rows_before):
        lane.next_row() if number % 2 else lane.next_pieces()
    resumed = whole_lane(sizes, epochs=epochs, alone=alone, cursor=lane.cursor)
    for _ in range(8):
        np.testing.assert_array_equal(resumed.next_row(), lane.next_row())
        assert (resumed.cursor, resumed.counts) == (lane.cursor, lane.counts)


@pytest.mark.parametrize(
    ("too_long", "expected"),
    [("cut", Counts(cut=2, without_target=2)), ("drop", Counts(dropped=2, without_target=2))],
)
def test_conversations_that_do_not_fit_are_counted_once(too_long, expected):
    sizes = [12, 4, 1, 13, 1]  # one token has nothing to predict
    lane, total = whole_lane(sizes, too_long=too_long), Counts()
    for _ in range(6):
        lane.next_row()
        total += lane.counts
    assert total == expected


def test_conversations_that_do_not_fit_may_be_refused():
    with pytest.raises(UserError, match="has 12 tokens, more than training.seq_len = 10.*training.too_long"):
        whole_lane([12, 4], too_long="refuse").next_row()
    with pytest.raises(UserError, match="with anything to learn in 16 epochs: .* as nothing in them is learned .*: 34"):
        whole_lane([1, 1], epochs=0).next_row()
    lane = whole_lane([30, 4])
    lane.next_row()  # whose ten tokens have no target: they are left out
    assert lane.counts == Counts(beyond=1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 10), max_size=80))
def test_best_fit_fills_rows(sizes):
    bins = best_fit(sizes, 10, most=len(sizes))
    assert sorted(item for items in bins for item in items) == list(range(len(sizes)))
    filled = [sum(sizes[item] for item in items) for items in bins]
    assert all(0 < size <= 10 for size in filled)
    assert sum(size <= 5 for size in filled) <= 1  # two such bins would have been one
    assert bins == sorted(bins)


def test_windows_are_of_a_number_of_tokens_within_bounds_of_rows():
    assert [window_rows(seq_len) for seq_len in (128, 2048, 8192)] == [128, 64, 32]


def test_windows_follow_each_other():
    lane = whole_lane([3] * (WINDOW_ROWS * 20), seq_len=9)
    rows = rows_of(lane)
    numbers = [number for row in rows for number in dict.fromkeys(row[0].tolist()) if number != TOKENIZER.eos_id]
    assert sorted(numbers) == sorted({*range(WINDOW_ROWS * 20)} - {TOKENIZER.eos_id})
