"""This rank's microbatches out of one global sequence of rows, and the position in it."""

import functools
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan_graph.config import job
from torchtitan_graph.data.addresses import Listing
from torchtitan_graph.data.batch import IGNORE_INDEX, Batch
from torchtitan_graph.data.batches import Deal, Read, Rows
from torchtitan_graph.data.corpus import Corpus, Resume
from torchtitan_graph.data.counts import Counts, in_words
from torchtitan_graph.data.describe import log_corpus
from torchtitan_graph.data.forms import RowFormat
from torchtitan_graph.data.lengths import Length, count_lengths, reach
from torchtitan_graph.data.mixture import Mixture, Origin
from torchtitan_graph.data.open_corpus import Opened, open_corpus, open_mixture
from torchtitan_graph.data.packing import Cursor, Packing
from torchtitan_graph.data.positions import refuse_other
from torchtitan_graph.data.special_tokens import warn_of_special_tokens
from torchtitan_graph.data.tokenizer import Tokenizer
from torchtitan_graph.data.whole_lane import open_lane, window_rows
from torchtitan_graph.errors import UserError
from torchtitan_graph.log import logger

# Note [Position]
# The position in the data is global: the number of rows that all ranks together have taken, and the cursor after the
# last row taken from each lane. It is valid for any number of ranks and workers. Workers prefetch, so their own
# positions are of no use: each batch carries the cursors after its rows, and only `DataLoader.__next__` makes them the
# position. A rank has the cursors of the lanes it took rows from; `merge_states` chooses, for every lane, the most
# advanced one. For a mixture it also has the row from which the weights are valid, see Note [Mixture]; with epochs the
# number of rows of each lane, see Note [Lengths].
#
# With replica groups a step has a fixed number of microbatches, which are dealt to the replicas that live, see `Deal`.
# The position is then known after whole steps, once the replicas have exchanged how far each has read: `exchange`.


class DataLoader:
    """Iterate over this rank's microbatches: number m has rows m*n*B + rank*B to m*n*B + (rank+1)*B - 1 for n ranks.

    Without replica groups a rank takes the numbers 0, 1, 2, ...; `num_microbatches` is how many a step has.

    With `epochs`, rows are counted before the first is read (see `count`), and come from the lanes that still have
    some, so that they fill all steps but the last; those after `num_rows` are padding, without end. A run takes no more
    than `most_rows`, and no more are counted. With `multiple`, rows have whole documents, and a batch is as long as its
    longest row, rounded up to a multiple of that. With `alone`, a row has one document, or a part of it. `too_long` as
    in `Packing`.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        local_batch_size: int,
        dp_rank: int,
        dp_degree: int,
        seed: int,
        num_microbatches: int = 1,
        epochs: int = 0,
        most_rows: float = math.inf,
        num_workers: int = 0,
        multiple: int | None = None,
        alone: bool = False,
        too_long: str = "cut",
    ) -> None:
        self._mixture = corpus if isinstance(corpus, Mixture) else Mixture({"": corpus}, [1.0])
        assert not epochs or len(self._mixture.names) == 1, "the corpora of a mixture don't end together"
        self._most_rows = most_rows
        self._lengths: Sequence[Length] | None = None if epochs else ()
        self._counts_with: tuple[int, int] | None = None  # this rank and the number of ranks, where they count together
        packing = Packing(seq_len, epochs, multiple is not None, alone, too_long)
        self._open_lane = functools.partial(open_lane, self._mixture, tokenizer, packing)
        rows = Rows(self._mixture, self._open_lane, multiple or seq_len, local_batch_size, dp_rank, dp_degree)
        rows.deal = Deal(total=num_microbatches)
        self._rows = rows
        self.source_names = self._mixture.names
        self._targets = torch.zeros(len(self.source_names), dtype=torch.int64)
        length: int | str = seq_len if multiple is None else f"up to {seq_len}, of whole documents"
        length = f"{length}, one document a row" if alone else length
        self._has_conversations = any(map(self._mixture.is_whole, range(self._mixture.num_lanes)))
        if self._has_conversations:
            length = f"{length}, {window_rows(seq_len)} rows of conversations at a time, longer ones: {too_long}"
        self._identity = {"corpus": corpus.digest, "tokenizer": tokenizer.digest, "seed": seed, "seq_len": length}
        self._identity["epochs"] = epochs or None
        with warnings.catch_warnings():  # torchdata 0.11 calls a function that newer torch deprecates
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            self._loader = StatefulDataLoader(
                rows,
                batch_size=None,
                generator=torch.Generator(),  # its own: an iterator draws from it, also that of a resumed run
                num_workers=num_workers,
                persistent_workers=num_workers > 0,
                pin_memory=torch.cuda.is_available(),
            )
        self._iterator: Iterator[Read | UserError | OSError] | None = None
        self._ahead: deque[Read] = deque()
        self._resumes: dict[int, Resume] = {}  # of the streams among the lanes that this rank took rows from
        self.documents = self.bytes_read = 0  # read for this rank's batches since the start
        self._counted = Counts()  # of all ranks when the position was loaded
        self._counts = Counts()  # of this rank since, and of the same ranks of other replicas, as exchanged
        self._not_exchanged = Counts()  # of this rank since the last exchange
        self._batches = 0  # taken since the start, or since load_state_dict
        self._first_row, self._origin, self._cursors = rows.start()

    def __iter__(self) -> "DataLoader":
        return self

    def count(self, known: dict[str, Any] | None = None, ranks: tuple[int, int] | None = None) -> None:
        """Count the rows of all epochs, before the first row is read; without epochs there is nothing to count.

        Args:
            known: a saved position, whose numbers are taken if it is of the same data.
            ranks: this rank and the number of ranks, if all ranks call together, and count a part each.
        """
        if not self._identity["epochs"]:
            return
        assert self._iterator is None, "rows were read already"
        self._counts_with = ranks
        saved = [Length.from_list(each) for each in (known or {}).get("lengths", ()) if self._is_of_same_data(known)]
        if saved:
            self._mixture.set_lanes(len(saved))
        if not saved or not reach(saved, self._most_rows):
            saved = count_lengths(self._mixture, self._open_lane, self._most_rows, may_merge=not saved, ranks=ranks)
        self._lengths = saved
        self._mixture.set_lengths([each.rows for each in saved])
        self._rows.allocate()
        self.rewind()

    @property
    def lengths(self) -> Sequence[Length]:
        """What each lane gives until its end, or as far as `most_rows` of all reach; nothing without epochs."""
        if self._lengths is None:
            self.count()
        assert self._lengths is not None
        return self._lengths

    @property
    def num_rows(self) -> float:
        """The number of rows of all epochs, or one that is at least `most_rows`; math.inf without epochs."""
        return self._mixture.num_rows if self.lengths else math.inf

    def refuse_empty(self) -> None:
        """Raise UserError if the epochs have no row, with what became of the documents."""
        if not self.num_rows:
            why = "; ".join(in_words(self.left_out)) or "none has text"
            raise UserError(f"training.dataset: no document has anything to learn: {why}")

    @property
    def has_ended(self) -> bool:
        """Whether all rows were taken, by all ranks together."""
        return self.num_taken >= self.num_rows

    def __next__(self) -> Batch:
        read = self._ahead.popleft() if self._ahead else self._read()
        batch, cursors, counts = read.batch, read.cursors, read.counts
        self._resumes |= read.resumes
        self.documents += read.documents
        self.bytes_read += read.bytes_read
        rows = self._rows.row_numbers(self._first_row, self.deal.number(self._batches))
        places = [place for row in rows if (place := self._mixture.place(row, self._origin)) is not None]
        for place, cursor in zip(places, cursors, strict=True):
            self._cursors[place.lane] = cursor
        if len(self.source_names) > 1:
            targets_B = (batch.labels_BL != IGNORE_INDEX).sum(1)
            self._targets.index_add_(0, torch.tensor([place.source for place in places]), targets_B)
        self._batches += 1
        self._counts += counts
        self._not_exchanged += counts
        return batch

    @property
    def deal(self) -> Deal:
        """The microbatches of a step that this replica takes. A new deal is set before a position is loaded."""
        return self._rows.deal

    @deal.setter
    def deal(self, deal: Deal) -> None:
        self._rows.deal = deal

    def exchange(self, own: list[int], gather: Callable[[list[int]], list[list[int]]]) -> list[int]:
        """Exchange with the same rank of the other replicas, after a step's microbatches, how far each has read.

        Args:
            own: counts of this rank's microbatches.
            gather: returns every living replica's list for this one's; of itself alone if the exchange failed.

        Returns:
            the sums of `own` over the replicas.
        """
        sums = [*own, *self._not_exchanged, *self._targets.tolist()]
        cursors = [number for cursor in self._cursors for number in cursor]
        received = gather(sums + cursors)
        first, last = len(own), len(own) + len(self._not_exchanged)
        total = [sum(numbers) for numbers in zip(*(each[: len(sums)] for each in received), strict=True)]
        self._counts += Counts(*(a - b for a, b in zip(total[first:last], self._not_exchanged, strict=True)))
        self._not_exchanged = Counts()
        self._targets.copy_(torch.tensor(total[last:]))
        lanes = [max(cursors) for cursors in zip(*(_cursors(each[len(sums) :]) for each in received), strict=True)]
        self._cursors = lanes
        return total[:first]

    def read_ahead(self, num_batches: int) -> list[Batch]:
        """Return the next batches of `__next__`, without changing the position. See Note [Position]."""
        while len(self._ahead) < num_batches:
            self._ahead.append(self._read())
        return [read.batch for read in self._ahead]

    def _read(self) -> Read:
        if self._iterator is None:
            self.lengths  # noqa: B018 - counted before the workers begin
            self._iterator = iter(self._loader)
        read = next(self._iterator)
        if isinstance(read, (UserError, OSError)):
            raise read
        return read

    @property
    def counts(self) -> Counts:
        """The documents so far that did not become rows as they are: of all ranks when the position was loaded, of this
        one since."""
        return self._counted + self._counts

    @property
    def left_out(self) -> Counts:
        """The documents of all epochs that did not become rows as they are; without epochs, `counts`."""
        return sum((each.counts for each in self.lengths), Counts()) if self.lengths else self.counts

    def take_targets(self) -> torch.Tensor:
        """Return the number of targets of each source in this rank's batches since the last call; for mixtures only."""
        taken = self._targets.clone()
        self._targets.zero_()
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the position after the batches taken; `merge_states` completes it."""
        lengths, taken = self.lengths, self.num_taken
        state = {**self._identity, "rows": taken, "lanes": [list(cursor) for cursor in self._cursors]}
        state |= {"lengths": [each.to_list() for each in lengths]} if lengths else {}
        state |= {"counted": list(self._counted), "counts": list(self._counts)}
        if self._resumes:
            state["resumes"] = [[lane, *resume] for lane, resume in self._resumes.items()]
        if len(self.source_names) > 1:
            since, given = self._origin
            state["mixture"] = {
                "weights": list(self._mixture.weights),
                "since": since,
                "given_before": list(given),
                "given": list(self._mixture.given(taken, self._origin)),
            }
        return state

    @property
    def num_taken(self) -> int:
        """The number of rows that all ranks have taken, with the padding after the last."""
        deal = self.deal
        steps, rest = divmod(self._batches, deal.own)
        assert deal.living == 1 or not rest, "with replicas the position is known after whole steps"
        return self._first_row + (steps * deal.total + rest) * self._rows.global_batch_size

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set a merged position, of any number of ranks and workers; the next batch is the first after it.

        Weights of a mixture that differ from the saved run's are used from there on.
        Raises UserError if it was saved with another corpus, tokenizer, seed, row length or number of epochs, or is
        inconsistent.
        """
        refuse_other(state, self._identity, self._has_conversations)
        if self._identity["epochs"] and (self._lengths is None or len(self._lengths) != len(state["lengths"])):
            self.count(state, self._counts_with)
        origin, saved, given = self._mixture.origin(), state.get("mixture"), self._lanes_given(state)
        if saved:
            origin = Origin(saved["since"], tuple(saved["given_before"]))
            if saved["weights"] != list(self._mixture.weights):
                origin = Origin(state["rows"], tuple(saved["given"]))
                logger.info("training.sources: the weights change from row %d on", state["rows"])
        if [row for row, *_ in state["lanes"]] != given or min(map(min, state["lanes"])) < 0:
            # Skipping to a row far ahead of its lane's cursor would never end.
            raise UserError(f"checkpoint: its data position says {state['rows']:,} rows, which its lanes did not give")
        self._rows.set_start(state["rows"], origin, state["lanes"])
        self._rows.set_resumes(state.get("resumes", ()))
        self._counted = Counts(*state.get("counted", ()))
        self.rewind()

    def _is_of_same_data(self, state: dict[str, Any] | None) -> bool:
        return state is not None and all(state.get(key) == here for key, here in self._identity.items())

    def _lanes_given(self, state: dict[str, Any]) -> list[int]:
        """Return the number of rows that each lane gave up to a position."""
        saved = state.get("mixture")
        return self._mixture.lanes_given(saved["given"] if saved else [state["rows"]])

    def catch_up(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a merged position with the cursors after all its rows: those of rows that a lost replica has read are
        found by reading over them."""
        lanes = []
        for number, (cursor, given) in enumerate(zip(state["lanes"], self._lanes_given(state), strict=True)):
            if cursor[0] < given:
                cursor = self._rows.skip_to(given, number, Cursor(*cursor))
            lanes.append([*cursor])
        return {**state, "lanes": lanes}

    def rewind(self) -> "DataLoader":
        """Return to the position that was loaded last, or to the beginning; the next batch is the first from there."""
        self._iterator = None
        self._ahead.clear()
        self._batches, self._counts, self._not_exchanged = 0, Counts(), Counts()
        self._targets.zero_()
        self._first_row, self._origin, self._cursors = self._rows.start()
        return self


def _cursors(numbers: list[int]) -> list[Cursor]:
    size = len(Cursor._fields)
    return [Cursor(*numbers[i : i + size]) for i in range(0, len(numbers), size)]


def build_dataloader(
    *,
    dataset: str,
    dataset_path: str | None,
    split: str,
    tokenizer: Tokenizer,
    seed: int,
    reading: RowFormat | None = None,
    sources: Sequence[job.DataSource] = (),
    opened: Opened | None = None,
    **loading: Any,
) -> DataLoader:
    """Return a loader of this rank's rows of a split of a corpus; `loading` are arguments of `DataLoader`.

    split: "train", "validation", or "all", for a corpus that is used for validation as a whole.
    sources: the parts of a mixture; if there are any, they replace `dataset` and `dataset_path`.
    reading: how rows of the corpus are read as documents; not given: as text, or as their columns tell.
    opened: as in `open_corpus`.

    Raises UserError if the corpus can't be found or read.
    """
    reading = RowFormat(tokenizer) if reading is None else reading
    if sources:
        corpus: Corpus = open_mixture(sources, split, seed, reading, opened)
    else:
        corpus = open_corpus(dataset, dataset_path, split, seed, reading, opened)
        what = "training data" if split == "train" else "validation data"
        log_corpus(what, corpus, dataset, dataset_path, split, reading)
        if split != "validation":  # validation documents are like training's
            warn_of_special_tokens(corpus, tokenizer, dataset_path or dataset)
    return DataLoader(corpus, tokenizer, seed=seed, **loading)


def training_loader(
    config: job.JobConfig, tokenizer: Tokenizer, listed: Mapping[str, Listing] | None = None, **loading: Any
) -> DataLoader:
    """Return a loader of a job's training data, for tools; `loading` are arguments of `DataLoader` that are not among
    the job's options.

    listed: the files at addresses, as `list_corpora` found them.
    """
    training = config.training
    return build_dataloader(
        dataset=training.dataset,
        dataset_path=training.dataset_path,
        sources=training.sources,
        split="train",
        tokenizer=tokenizer,
        reading=RowFormat.of(training, tokenizer, listed),
        seed=config.debug.seed or 0,
        seq_len=training.seq_len,
        multiple=job.ROW_MULTIPLE if training.dynamic_seq_len else None,
        alone=training.one_document_per_row,
        too_long=training.too_long,
        **loading,
    )
