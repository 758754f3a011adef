"""The microbatches of each step: on the host, on the device, and the number of targets in those of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_graph.data.batch import IGNORE_INDEX, Batch, counts_of
from torchtitan_graph.data.loader import DataLoader
from torchtitan_graph.parallel.layout import Layout


class Microbatches(NamedTuple):
    """This rank's microbatches of a step; `num_tokens`, on the device, counts the targets of all ranks' in it.
    `divisor` is the one denominator of the loss: that, or of preferences the number of their pairs. `totals` are the
    denominators of other means, see steps/inputs.py."""

    on_device: list[Batch]
    on_host: list[Batch]
    num_tokens: Tensor
    divisor: Tensor
    totals: Tensor


class Feed:
    """Read the microbatches of one step after the other.

    seconds    of the last step, spent waiting for data: this rank's own, and the others'
    own_s      those for this rank's own
    documents  read for this rank's batches of the last step; bytes_read from files of corpora
    """

    def __init__(
        self,
        data: DataLoader,
        layout: Layout,
        device: torch.device,
        *,
        most: int = -1,
        in_pairs: bool = False,
        num_ahead: int = 0,
        gather: Callable[[list[int]], list[list[int]]] | None = None,
        keep_empty: bool = False,
    ) -> None:
        """Read from a data loader.

        Args:
            most: steps to read, also those without a target; -1: all.
            in_pairs: rows are of preferences.
            num_ahead: the model's layers that predict a token further ahead.
            gather: returns every living replica's list of numbers for this one's, where there are replica groups.
            keep_empty: return also steps without a target, with the divisor 1: other groups may have some in theirs.
        """
        self._in_pairs, self._keep_empty, self._num_ahead = in_pairs, keep_empty, num_ahead
        self._data, self._layout, self._device = data, layout, device
        self._left, self._gather = most, gather
        self._copied: list[Batch] = []  # the next microbatches on the device, where they were read ahead
        self.seconds = self.own_s = 0.0
        self.documents = self.bytes_read = 0

    def next(self) -> Microbatches | None:
        """Return the next microbatches that have a target; None at the data's end. All ranks call together."""
        begin, self.own_s = time.perf_counter(), 0.0
        documents, bytes_read = self._data.documents, self._data.bytes_read
        found = None
        while found is None and self._left and not self._data.has_ended:
            self._left -= 1
            started = time.perf_counter()
            on_host = [next(self._data) for _ in range(self._data.deal.own)]
            self.own_s += time.perf_counter() - started
            own = sum(int((batch.labels_BL != IGNORE_INDEX).sum()) for batch in on_host)
            counts = [own, sum(map(pairs, on_host)) if self._in_pairs else own]
            counts += counts_of(on_host, self._num_ahead).tolist()
            if self._gather is not None:
                own, *_ = counts = self._data.exchange(counts, self._gather)
            on_device = [torch.full((), n, device=self._device) for n in counts]
            summed = self._layout.sum_over_rows(torch.stack(on_device))
            num_tokens, divisor, totals = summed[0], summed[1], summed[2:].clamp(min=1)
            divisor = divisor.clamp(min=1) if self._keep_empty else divisor
            # A rank with targets needn't read the sum, for which it would wait.
            if own or self._keep_empty or num_tokens > 0:
                batches = self._copied or [batch.to(self._device, non_blocking=True) for batch in on_host]
                found = Microbatches(batches, on_host, num_tokens, divisor, totals)
            self._copied = []
        self.documents, self.bytes_read = self._data.documents - documents, self._data.bytes_read - bytes_read
        self.seconds = time.perf_counter() - begin
        return found

    def go_back(self) -> None:
        """Forget what was read ahead: the loader has another position, or another deal."""
        self._copied = []

    def read_ahead(self) -> None:
        """Read the next step's microbatches, and start their copies to the device, while it computes.

        On a CPU there is nothing to gain. A copy from memory that is not pinned would wait.
        """
        if self._device.type == "cpu":
            return
        begin = time.perf_counter()
        batches = self._data.read_ahead(self._data.deal.own)
        if all(batch.tokens_BL.is_pinned() for batch in batches):
            self._copied = [batch.to(self._device, non_blocking=True) for batch in batches]
        seconds = time.perf_counter() - begin
        self.own_s += seconds
        self.seconds += seconds


def pairs(batch: Batch) -> int:
    """Return the number of pairs in rows of preferences: of even documents with a target."""
    is_chosen_BL = (batch.labels_BL != IGNORE_INDEX) & (batch.documents_BL % 2 == 0)
    rows_BL = torch.arange(len(is_chosen_BL))[:, None].expand_as(is_chosen_BL)
    return len(torch.stack([rows_BL[is_chosen_BL], batch.documents_BL[is_chosen_BL]]).unique(dim=1).T)
