"""Rows hold every token once as input, have every target within a document, and keep documents apart."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torchtitan_graph.data import IGNORE_INDEX
from torchtitan_graph.data.corpus import ShuffledCorpus
from torchtitan_graph.data.packing import Cursor, Lane
from torchtitan_graph.data.tokenizer import ByteTokenizer
from torchtitan_graph.errors import UserError

TOKENIZER = ByteTokenizer()
TEXTS = st.lists(st.text("abcdefgh", max_size=25), min_size=1, max_size=15)


def lane_of(texts_source, texts, seq_len, repeat=False, cursor=None, whole=False) -> Lane:
    corpus = ShuffledCorpus(texts_source(texts), "all", seed=0)
    assert corpus.num_lanes == 1
    return Lane(corpus, TOKENIZER, seq_len, repeat, 0, cursor or Cursor(), whole)


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
    padding = (TOKENIZER.eos_id, IGNORE_INDEX, len(documents))
    stream += [padding] * (-len(stream) % seq_len)
    rows = []
    for start in range(0, len(stream), seq_len):
        row, positions = stream[start : start + seq_len], []
        for place, (_, _, number) in enumerate(row):
            same = place > 0 and row[place - 1][2] == number
            positions.append(positions[-1] + 1 if same else 0)
        tokens, labels, numbers = zip(*row, strict=True)
        rows.append(np.array([tokens, labels, positions, np.array(numbers) - numbers[0]]))
    return rows


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(1, 12))
def test_rows_are_the_stream_of_documents_cut(texts_source, texts, seq_len):
    lane = lane_of(texts_source, texts, seq_len)
    for expected in expected_rows(documents_of(texts_source, texts), seq_len):
        np.testing.assert_array_equal(lane.next_row(), expected)


@settings(max_examples=50, deadline=None)
@given(TEXTS, st.integers(1, 12))
def test_without_repeat_padding_follows_for_ever(texts_source, texts, seq_len):
    lane = lane_of(texts_source, texts, seq_len)
    for _ in expected_rows(documents_of(texts_source, texts), seq_len):
        lane.next_row()
    for _ in range(2):
        tokens_L, labels_L, positions_L, documents_L = lane.next_row()
        assert (labels_L == IGNORE_INDEX).all()
        assert (tokens_L == TOKENIZER.eos_id).all()
        assert positions_L.tolist() == list(range(seq_len))
        assert (documents_L == 0).all()


def test_with_repeat_the_next_epoch_follows_in_the_same_row_and_another_order(texts_source):
    texts = [str(number) * 3 for number in range(10)]
    stream = [token for document in documents_of(texts_source, texts, epochs=3) for token in document]
    lane = lane_of(texts_source, texts, 7, repeat=True)
    got = np.concatenate([lane.next_row()[0] for _ in range(len(stream) // 7)])
    assert got.tolist() == stream[: len(got)]
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
@given(TEXTS, st.integers(1, 12), st.integers(0, 20), st.booleans(), st.booleans())
def test_a_cursor_resumes_its_lane(texts_source, texts, seq_len, rows_before, repeat, whole):
    assume(any(texts) or not repeat)
    lane = lane_of(texts_source, texts, seq_len, repeat, whole=whole)
    for number in range(rows_before):
        lane.next_row() if number % 2 else lane.skip_row()
    resumed = lane_of(texts_source, texts, seq_len, repeat, lane.cursor, whole)
    for _ in range(5):
        np.testing.assert_array_equal(resumed.next_row(), lane.next_row())
        assert resumed.cursor == lane.cursor


def test_documents_without_text_are_left_out(texts_source):
    texts = ["", "one", "", "", "two", ""]
    lane = lane_of(texts_source, texts, 5)
    tokens = [lane.next_row()[0].tolist() for _ in range(2)]
    assert sorted(bytes(row[1:4]) for row in tokens) == [b"one", b"two"]
    assert lane.next_row()[1].tolist() == [IGNORE_INDEX] * 5
    with pytest.raises(UserError, match=r"got no document with text in 16 epochs\. The 34 .* are empty"):
        lane_of(texts_source, ["", ""], 5, repeat=True).next_row()


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

        def documents(self, lane, epoch, start):
            return iter(())

    with pytest.raises(UserError, match="too few documents"):
        Lane(Empty(), TOKENIZER, 4, True, 0, Cursor()).next_row()
