"""The rows a step uses depend neither on the number of ranks or workers nor on where a run was interrupted."""

import hashlib
import json
from types import SimpleNamespace

import pytest
import torch

from torchtitan_graph.data import (
    IGNORE_INDEX,
    PADDING,
    Batch,
    DataLoader,
    build_dataloader,
    load_tokenizer,
    merge_states,
    sources,
)
from torchtitan_graph.data.batches import Deal
from torchtitan_graph.data.corpus import ShuffledCorpus
from torchtitan_graph.data.feed import Feed
from torchtitan_graph.data.tokenizer import ByteTokenizer
from torchtitan_graph.errors import UserError

# Three workers are more than a small machine's cores, which torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

GLOBAL_BATCH = 8
STEPS = 24


@pytest.fixture(scope="module")
def make_loader(texts_source):
    texts = [hashlib.sha256(b"%d" % number).hexdigest()[: 1 + number * 7 % 17] for number in range(160)]

    def make(dp_rank=0, dp_degree=1, num_workers=0, *, texts=texts, seed=0, seq_len=32, epochs=0, tokenizer=None,
             local_batch_size=None, **options) -> DataLoader:  # fmt: skip
        return DataLoader(
            ShuffledCorpus(texts_source(texts), "train", seed), tokenizer or ByteTokenizer(), seed=seed,
            seq_len=seq_len, local_batch_size=local_batch_size or GLOBAL_BATCH // dp_degree, dp_rank=dp_rank,
            dp_degree=dp_degree, epochs=epochs, num_workers=num_workers, **options,
        )  # fmt: skip

    return make


def hashes(batch: Batch) -> list[str]:
    return [
        hashlib.sha256(torch.stack([tensor[row] for tensor in batch]).numpy().tobytes()).hexdigest()
        for row in range(len(batch.tokens_BL))
    ]


def take(loaders: list[DataLoader], steps: int) -> list[list[str]]:
    """Hash the rows of every step, in the order of ranks."""
    return [[row for loader in loaders for row in hashes(next(loader))] for _ in range(steps)]


@pytest.fixture(scope="module")
def reference(make_loader) -> list[list[str]]:
    """The rows of an uninterrupted run on one rank: over three epochs."""
    loader = make_loader()
    rows = take([loader], STEPS)
    assert max(epoch for _, epoch, *_ in loader.state_dict()["lanes"]) >= 3
    assert len({row for step in rows for row in step}) == STEPS * GLOBAL_BATCH, "the test needs rows that all differ"
    return rows


LAYOUTS = [(1, 0), (1, 2), (2, 0), (2, 2), (4, 0), (4, 1)]


# To each of the second from any of the first; most pairs are in the slow tier.
AFTER = [(1, 2), (2, 0), (4, 0), (2, 3)]
FAST = {(1, 0, 4, 0), (2, 2, 1, 2), (4, 0, 2, 0), (4, 1, 2, 3)}


@pytest.mark.parametrize(
    ("dp_degree_after", "num_workers_after", "dp_degree", "num_workers"),
    [
        pytest.param(*after, *before, marks=[] if (*before, *after) in FAST else [pytest.mark.slow])
        for after in AFTER
        for before in LAYOUTS
    ],
)
def test_resume_at_another_degree_and_worker_count(
    make_loader, reference, dp_degree, num_workers, dp_degree_after, num_workers_after
):
    before = [make_loader(rank, dp_degree, num_workers) for rank in range(dp_degree)]
    assert take(before, 9) == reference[:9]  # workers have read ahead by now
    state = json.loads(json.dumps(merge_states([loader.state_dict() for loader in before])))
    after = [make_loader(rank, dp_degree_after, num_workers_after) for rank in range(dp_degree_after)]
    for loader in after:
        loader.load_state_dict(state)
    assert take(after, STEPS - 9) == reference[9:]


@pytest.mark.parametrize("dp_degree", [2, 4])
def test_merged_position_is_that_of_one_rank(make_loader, dp_degree):
    one, ranks = make_loader(), [make_loader(rank, dp_degree) for rank in range(dp_degree)]
    for _ in range(5):
        take([one], 1)
        take(ranks, 1)
        assert merge_states([loader.state_dict() for loader in ranks]) == merge_states([one.state_dict()])


def test_accumulated_microbatches_are_the_rows_of_a_step(make_loader, reference):
    ranks = [make_loader(rank, 2, local_batch_size=2) for rank in range(2)]
    steps = [take(ranks, 2) for _ in range(STEPS)]
    assert [[row for microbatch in step for row in microbatch] for step in steps] == reference


def test_three_ranks_share_lanes_and_leave_no_row_out(make_loader):
    one, three = make_loader(local_batch_size=6), [make_loader(rank, 3, local_batch_size=2) for rank in range(3)]
    assert take([one], 10) == take(three, 10)


def test_a_resumed_run_can_be_resumed(make_loader, reference):
    state, got = None, []
    for dp_degree in (1, 4, 2, 1):
        loaders = [make_loader(rank, dp_degree) for rank in range(dp_degree)]
        for loader in loaders if state else []:
            loader.load_state_dict(state)
        got += take(loaders, 3)
        state = merge_states([loader.state_dict() for loader in loaders])
    assert got == reference[:12]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}])
def test_one_loader_goes_back_and_forth(make_loader, reference, options):
    loader = make_loader(**options)
    start = loader.state_dict()
    for steps in (3, 5, 2):
        loader.load_state_dict(start)
        assert take([loader], steps) == reference[:steps]
        middle = loader.state_dict()
    loader.load_state_dict(middle)
    assert take([loader], 3) == reference[2:5]


def test_workers_stay(make_loader):
    loader = make_loader(num_workers=1)
    start = loader.state_dict()
    next(loader)
    pids = [worker.pid for worker in loader._iterator._workers]
    loader.load_state_dict(start)
    next(loader)
    assert [worker.pid for worker in loader._iterator._workers] == pids


def test_position_counts_what_was_taken_not_what_was_prefetched(make_loader):
    loader = make_loader(num_workers=2)
    take([loader], 1)
    assert loader.state_dict()["rows"] == GLOBAL_BATCH
    assert sum(row for row, *_ in loader.state_dict()["lanes"]) == GLOBAL_BATCH


def test_what_is_read_ahead_is_given_next_and_does_not_move_the_position(make_loader, reference):
    loader = make_loader()
    start = loader.state_dict()
    take([loader], 1)
    position = loader.state_dict()
    ahead = loader.read_ahead(2)
    assert [hashes(batch) for batch in ahead] == reference[1:3]
    assert loader.state_dict() == position
    assert next(loader) is ahead[0]
    loader.load_state_dict(start)  # what is ahead is behind another position
    assert take([loader], 3) == reference[:3]


# Negative controls: the comparison by hash sees another seed and a position that is off by one.


def test_another_seed_gives_other_rows(make_loader, reference):
    assert take([make_loader(seed=1)], 1)[0] != reference[0]


@pytest.mark.parametrize("place", range(1, 4))  # of another number of rows it is refused
def test_a_shifted_cursor_gives_other_rows(make_loader, reference, place):
    loader = make_loader()
    take([loader], 3)
    state = loader.state_dict()
    lane = max(range(len(state["lanes"])), key=lambda lane: state["lanes"][lane][0])
    state["lanes"][lane][place] += 1
    loader.load_state_dict(state)
    assert take([loader], 3) != reference[3:6]


@pytest.mark.parametrize(
    ("change", "key"),
    [({"seed": 1}, "seed"), ({"seq_len": 16}, "seq_len"), ({"texts": ["other"] * 160}, "corpus"),
     ({"tokenizer": load_tokenizer("tests/assets/tokenizer")}, "tokenizer")],
)  # fmt: skip
def test_a_position_of_another_run_is_refused(make_loader, change, key):
    state = make_loader().state_dict()
    with pytest.raises(UserError, match=f"was saved with {key} = "):
        make_loader(**change).load_state_dict(state)


def test_ranks_at_different_steps_do_not_merge(make_loader):
    ranks = [make_loader(rank, 2) for rank in range(2)]
    next(ranks[0])
    with pytest.raises(AssertionError):
        merge_states([loader.state_dict() for loader in ranks])


@pytest.mark.parametrize("dp_degree", [1, 2])
def test_in_one_epoch_every_token_is_an_input_once(make_loader, texts_source, dp_degree):
    texts = [chr(33 + number) * (number % 50) for number in range(160)]  # some are empty
    ranks = [make_loader(rank, dp_degree, texts=texts, epochs=1) for rank in range(dp_degree)]
    tokens = []
    while not ranks[0].has_ended:
        for tokens_L in (row for loader in ranks for row in next(loader).tokens_BL):
            tokens += tokens_L[tokens_L != 257].tolist()  # padding is 257 too
    corpus = ShuffledCorpus(texts_source(texts), "train", 0)
    documents = [text.encode() for lane in range(4) for _, text in corpus.documents(lane, 0, 0)]
    assert len(documents) == 152
    assert sorted(tokens) == sorted(
        [256] * sum(map(bool, documents)) + [byte for document in documents for byte in document]
    )


def test_with_a_multiple_a_batch_is_as_long_as_its_longest_row(make_loader):
    cut, loader = (make_loader(local_batch_size=2, multiple=multiple) for multiple in (None, 4))
    lengths = set()
    for _ in range(STEPS):
        batch = next(loader)
        length = batch.tokens_BL.shape[1]
        is_padding_BL = batch.documents_BL == PADDING
        assert length % 4 == 0 and is_padding_BL.sum(1).min() < 4
        assert (batch.labels_BL[is_padding_BL] == IGNORE_INDEX).all()
        assert all(tensor.is_contiguous() for tensor in batch)
        lengths.add(length)
        assert next(cut).tokens_BL.shape[1] == 32
    assert len(lengths) > 1 and max(lengths) <= 32
    with pytest.raises(UserError, match="seq_len = 32, this run has 'up to 32, of whole documents'"):
        loader.load_state_dict(merge_states([cut.state_dict()]))


@pytest.mark.parametrize("damage", ["rows", "a lane", "a row", "a place"])
def test_a_position_that_does_not_add_up_is_refused(make_loader, damage):
    loader = make_loader()
    take([loader], 3)
    state = loader.state_dict()
    if damage == "rows":
        state["rows"] = 10**15  # to go forward to there would take for ever
    elif damage == "a lane":
        state["lanes"].pop()
    elif damage == "a row":
        state["lanes"][0][0] -= 1
    else:
        state["lanes"][0][3] = -1
    with pytest.raises(UserError, match="which its lanes did not give"):
        make_loader().load_state_dict(state)


def test_batch_is_contiguous_int64(make_loader):
    for tensor in next(make_loader()):
        assert tensor.shape == (8, 32) and tensor.dtype == torch.int64 and tensor.is_contiguous()


def test_an_error_in_a_worker_names_the_document(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SMALL_CORPUS_BYTES", 0)  # else it is found when it is opened
    file = tmp_path / "good.jsonl"
    file.write_text('{"text": "x"}\n' * 6 + '{"text": 123}\n' + '{"text": "x"}\n' * 13)
    loader = build_dataloader(
        dataset="", dataset_path=str(file), split="all", tokenizer=ByteTokenizer(), seed=0, seq_len=8,
        local_batch_size=4, dp_rank=0, dp_degree=1, num_workers=1,
    )  # fmt: skip
    with pytest.raises(UserError, match="good.jsonl, line 7") as error:
        for _ in range(20):
            next(loader)
    assert str(error.value).startswith(str(file))  # without the worker's traceback


@pytest.mark.slow
def test_the_embedded_corpus_gives_the_same_rows_to_two_ranks_with_workers():
    def loader(rank, dp_degree, num_workers):
        return build_dataloader(
            dataset="stdlib", dataset_path=None, split="train", tokenizer=load_tokenizer("tests/assets/tokenizer"),
            seq_len=256, local_batch_size=4 // dp_degree, dp_rank=rank, dp_degree=dp_degree, seed=0,
            num_workers=num_workers,
        )  # fmt: skip

    assert take([loader(0, 1, 0)], 4) == take([loader(0, 2, 2), loader(1, 2, 2)], 4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rewound_it_begins_again_where_it_began(make_loader, reference, num_workers):
    one = make_loader(num_workers=num_workers)
    assert take([one], 3) == reference[:3]
    assert take([one.rewind()], 2) == reference[:2]


@pytest.mark.parametrize("lost", [0, 1])
def test_the_position_after_rows_of_a_lost_replica_is_found_without_it(make_loader, reference, lost):
    loaders = [make_loader(local_batch_size=2, num_microbatches=4) for _ in range(2)]
    for number, loader in enumerate(loaders):
        loader.deal = Deal(number, 2, 4)
        take([loader], 3 * 2)
    both = merge_states([loader.state_dict() for loader in loaders])
    alone = merge_states([loaders[1 - lost].state_dict()])
    assert alone["lanes"] != both["lanes"]
    assert loaders[1 - lost].catch_up(alone) == {**alone, "lanes": both["lanes"]}
    assert loaders[lost].catch_up(both) == both
    resumed = make_loader()
    resumed.load_state_dict(loaders[1 - lost].catch_up(alone))
    assert take([resumed], 4) == reference[3:7]


@pytest.mark.parametrize("keep_empty", [False, True])
def test_a_group_that_trains_alone_takes_a_step_also_where_its_rows_have_no_target(make_loader, keep_empty):
    """Else it would be a step ahead of the others."""
    loader = make_loader(texts=["a"] * 8, seq_len=1, local_batch_size=1)
    one_rank = SimpleNamespace(sum_over_rows=lambda counts: counts)
    feed = Feed(loader, one_rank, torch.device("cpu"), keep_empty=keep_empty)
    steps = [feed.next() for _ in range(4)]  # the third row is a document's last token
    assert [int(step.num_tokens) for step in steps] == ([1, 1, 0, 1] if keep_empty else [1, 1, 1, 1])
    assert [int(step.divisor) for step in steps] == [1] * 4
