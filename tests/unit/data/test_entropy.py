"""Unigram entropy against frequencies counted by hand."""

import math
from collections import Counter

import pytest

from torchtitan_graph.data.entropy import unigram_entropy
from torchtitan_graph.data.tokenizer import ByteTokenizer


def entropy(path, **options) -> float:
    return unigram_entropy(
        dataset="", dataset_path=str(path), split="all", tokenizer=ByteTokenizer(), seq_len=8, **options
    )


def test_entropy_counts_every_target_of_every_lane(tmp_path):
    texts = ["ab" * (number % 9) + chr(65 + number % 20) for number in range(70)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    counts = Counter([target for text in texts for target in [*text, "eos"]])
    total = sum(counts.values())
    expected = -sum(count / total * math.log(count / total) for count in counts.values())
    assert entropy(tmp_path) == pytest.approx(expected, rel=1e-12)


def test_equally_frequent_targets_have_the_entropy_of_their_number(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    assert entropy(tmp_path) == pytest.approx(math.log(4))  # a, b, c and eos


def test_first_rows_only(tmp_path):
    (tmp_path / "a.txt").write_text("aaaaaaaa" + "bcdefgh" * 9)
    assert entropy(tmp_path, num_rows=1) == 0
    assert entropy(tmp_path) > 1
