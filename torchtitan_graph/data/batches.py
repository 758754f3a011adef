"""Microbatches of a rank, packed from the lanes of its rows."""

import errno
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from torchtitan_graph.data.batch import Batch
from torchtitan_graph.data.corpus import Resume
from torchtitan_graph.data.counts import Counts
from torchtitan_graph.data.files import Reading
from torchtitan_graph.data.mixture import Mixture, Origin
from torchtitan_graph.data.packing import Cursor, Lane
from torchtitan_graph.errors import UserError
from torchtitan_graph.transient import is_transient


class Read(NamedTuple):
    """What reading gives: a microbatch, and what reading it changed.

    cursors    after its rows, in their lanes
    counts     of the documents that did not become rows as they are
    resumes    where the streams of its rows can be begun again, by lane; none where they are not streamed
    documents  read for it
    bytes_read for it, from files of corpora, by this process
    """

    batch: Batch
    cursors: list[Cursor]
    counts: Counts
    resumes: dict[int, Resume]
    documents: int
    bytes_read: int


class Deal(NamedTuple):
    """The microbatches of a step that this replica takes: of `total` those numbered `replica`, `replica + living`, ...,
    `replica` being its index among the replicas that live."""

    replica: int = 0
    living: int = 1
    total: int = 1

    @property
    def own(self) -> int:
        """The number of microbatches of this replica."""
        return len(range(self.replica, self.total, self.living))

    def number(self, batch: int) -> int:
        """Return the number, over all steps and replicas, of this replica's microbatch `batch`."""
        step, nth = divmod(batch, self.own)
        return step * self.total + self.replica + nth * self.living


class Rows(IterableDataset):
    """Microbatches of a rank, or of one of its workers, with the cursors after their rows; the last may be an error:
    of the user, or of storage that does not answer."""

    def __init__(
        self,
        mixture: Mixture,
        open_lane: Callable[[int, Cursor], Lane],
        multiple: int,
        local_batch_size: int,
        dp_rank: int,
        dp_degree: int,
    ) -> None:
        self._mixture, self._open_lane, self._multiple = mixture, open_lane, multiple
        self._local_batch_size, self._dp_rank = local_batch_size, dp_rank
        self.global_batch_size = local_batch_size * dp_degree
        # In shared memory, for persistent workers: they see where a new iteration starts.
        self.allocate()
        self._origin = torch.zeros(1 + len(mixture.names), dtype=torch.int64).share_memory_()
        self._deal = torch.tensor(Deal()).share_memory_()

    def allocate(self) -> None:
        """Make the memory for where an iteration starts, in as many lanes as there are."""
        shape = 1 + self._mixture.num_lanes, len(Cursor._fields)
        self._start = torch.zeros(shape, dtype=torch.int64).share_memory_()

    @property
    def deal(self) -> Deal:
        return Deal(*self._deal.tolist())

    @deal.setter
    def deal(self, deal: Deal) -> None:
        self._deal.copy_(torch.tensor(deal))

    def start(self) -> tuple[int, Origin, list[Cursor]]:
        """Return the number of rows of all ranks before the first batch, the mixture's origin, and the cursors."""
        rows, *cursors = self._start.tolist()
        since, *given = self._origin.tolist()
        return rows[0], Origin(since, tuple(given)), [Cursor(*cursor) for cursor in cursors]

    def set_start(self, rows: int, origin: Origin, cursors: list[list[int]]) -> None:
        self._start.copy_(torch.tensor([[rows, 0, 0, 0], *cursors]))
        self._origin.copy_(torch.tensor([origin.row, *origin.given]))

    def row_numbers(self, first_row: int, number: int) -> range:
        """Return the rows of the global sequence in this rank's part of a microbatch; `first_row` is all ranks' first
        of number 0."""
        first = first_row + number * self.global_batch_size + self._dp_rank * self._local_batch_size
        return range(first, first + self._local_batch_size)

    def set_resumes(self, resumes: Sequence[Sequence[Any]]) -> None:
        """Tell the streams where they can be begun; see `DataLoader.state_dict`. It is no help to workers that run."""
        for lane, *resume in resumes:
            self._mixture.set_resume(lane, Resume(*resume))

    def skip_to(self, row: int, number: int, cursor: Cursor) -> Cursor:
        """Return the cursor of a lane before one of its rows, from an earlier cursor."""
        lane = self._open_lane(number, cursor)
        while lane.cursor.row < row:
            lane.next_pieces()
        return lane.cursor

    def __iter__(self) -> Iterator[Read | UserError | OSError]:
        try:
            yield from self._batches()
        except UserError as error:  # raised in a worker process, its message would be a traceback
            yield error
        except Exception as error:
            if get_worker_info() is None or not is_transient(error):
                raise
            # A worker's error is raised by its message alone, and this one would no longer be one of storage.
            lost = OSError(errno.EIO, f"{type(error).__name__}: {error}")
            lost.transient = True  # type: ignore[attr-defined]
            yield lost

    def _batches(self) -> Iterator[Read]:
        worker = get_worker_info()
        batch, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        first_row, origin, cursors = self.start()  # once: it may be changed while workers still prefetch
        deal = self.deal
        lanes: dict[int, Lane] = {}
        padding = self._open_lane(0, Cursor()).padding()
        while True:
            rows, behind, longest, counts = [], [], 1, Counts()
            resumes: dict[int, Resume] = {}
            documents, bytes_read = Reading.documents, Reading.bytes_read
            for row in self.row_numbers(first_row, deal.number(batch)):
                place = self._mixture.place(row, origin)
                if place is None:
                    rows.append(torch.from_numpy(padding))
                    continue
                _, number, row_in_lane = place
                if number not in lanes:
                    lanes[number] = self._open_lane(number, cursors[number])
                lane = lanes[number]
                while lane.cursor.row < row_in_lane:
                    lane.next_pieces()
                assert lane.cursor.row == row_in_lane
                rows.append(torch.from_numpy(lane.next_row()))
                behind.append(lane.cursor)
                longest = max(longest, lane.filled)
                counts += lane.counts
                if (resume := self._mixture.resume(number, lane.cursor.document)) is not None:
                    resumes[number] = resume
            length = -(-longest // self._multiple) * self._multiple
            made = Batch(*torch.stack([row[:, :length] for row in rows], dim=1))
            documents, bytes_read = Reading.documents - documents, Reading.bytes_read - bytes_read
            yield Read(made, behind, counts, resumes, documents, bytes_read)
            batch += stride
