"""Every epoch deals all documents of a split to the lanes, each once; splits share none."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_graph.data.corpus import ShuffledCorpus, in_split, num_lanes, shuffled
from torchtitan_graph.errors import UserError


def texts_of(corpus, epoch=0) -> list[str]:
    return [text for lane in range(corpus.num_lanes) for _, text in corpus.documents(lane, epoch, 0)]


@settings(deadline=None)  # of a loaded machine
@given(st.integers(1, 300), st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 100)))
def test_shuffle_is_a_permutation(total, key):
    assert sorted(shuffled(index, total, key) for index in range(total)) == list(range(total))


def test_shuffle_looks_random():
    """The mean distance of neighbours in a random order is a third of the length; in order it is 1."""
    total = 5000
    for key in ((0, 0), (0, 1), (7, 0)):
        order = [shuffled(index, total, key) for index in range(total)]
        distance = sum(abs(a - b) for a, b in zip(order, order[1:], strict=False)) / total
        assert total / 3 * 0.95 < distance < total / 3 * 1.05


def test_shuffles_of_two_epochs_and_two_seeds_differ():
    orders = {tuple(shuffled(i, 50, key) for i in range(50)) for key in ((0, 0), (0, 1), (1, 0), (2**62, 0))}
    assert len(orders) == 4


@pytest.mark.parametrize("total", [1, 2, 3, 40, 700, 6000])
def test_train_and_validation_are_all_documents_and_share_none(texts_source, total):
    source = texts_source([str(number) for number in range(total)])
    train = texts_of(ShuffledCorpus(source, "train", 0))
    validation = texts_of(ShuffledCorpus(source, "validation", 0)) if total > 1 else []
    assert sorted(train + validation, key=int) == [str(number) for number in range(total)]
    if total > 1:
        assert 1 <= len(validation) <= max(1, 0.07 * total)


def test_splits_hold_in_every_epoch_and_for_every_seed(texts_source):
    source = texts_source([str(number) for number in range(200)])
    validation = {frozenset(texts_of(ShuffledCorpus(source, "validation", seed), epoch)) for seed, epoch in
                  ((0, 0), (0, 1), (5, 0))}  # fmt: skip
    assert len(validation) == 1


def test_every_epoch_deals_all_documents_anew(texts_source):
    source = texts_source([str(number) for number in range(1100)])
    corpus = ShuffledCorpus(source, "all", 0)
    assert corpus.num_lanes == 32
    first, second = ([frozenset(t for _, t in corpus.documents(lane, epoch, 0)) for lane in range(32)]
                     for epoch in (0, 1))  # fmt: skip
    assert frozenset.union(*first) == frozenset.union(*second)
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_documents_start_anywhere(texts_source):
    corpus = ShuffledCorpus(texts_source([str(number) for number in range(100)]), "train", 3)
    whole = list(corpus.documents(0, 1, 0))
    for index, _ in whole:
        assert list(corpus.documents(0, 1, index)) == [item for item in whole if item[0] >= index]


def test_order_is_the_same_in_another_process():
    """Nothing rests on Python's randomised hash()."""
    code = (
        "from torchtitan_graph.data.corpus import in_split, shuffled\n"
        "print([shuffled(i, 99, (4, 2)) for i in range(99)], [in_split('train', str(i)) for i in range(99)])"
    )
    environment = {"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    here = [shuffled(i, 99, (4, 2)) for i in range(99)], [in_split("train", str(i)) for i in range(99)]
    assert run.stdout == f"{here[0]} {here[1]}\n"


@pytest.mark.parametrize(("wanted", "lanes"), [(0.1, 1), (1, 1), (3.9, 2), (4, 4), (255, 128), (1e9, 256)])
def test_number_of_lanes_is_a_power_of_two(wanted, lanes):
    assert num_lanes(wanted) == lanes


def test_one_document_has_no_validation_split(texts_source):
    with pytest.raises(UserError, match="validation.dataset: one document"):
        ShuffledCorpus(texts_source(["x"]), "validation", 0)


def test_a_corpus_without_documents_is_refused(texts_source):
    with pytest.raises(UserError, match="no documents"):
        ShuffledCorpus(texts_source([]), "train", 0)
