"""The batch of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_graph.capture.step import labels_ahead

IGNORE_INDEX = -100  # the default ignore_index of torch's cross_entropy
PADDING = -1  # the number of the document where a position is padding
PAIRS_PER_ROW = 16  # of preferences, at most: pair k is the documents 2k and 2k + 1 of its row
BYTES_PER_TOKEN = 4 * 8  # of a batch


class Batch(NamedTuple):
    """Rows of packed documents, as int64 tensors, all of shape (B, L).

    tokens_BL: the input.
    labels_BL: the next token of the same document, IGNORE_INDEX where there is none: at a document's last token
        and in padding. A document that is split at a row's end keeps the target of its last token there.
    positions_BL: place of a token in its document's part in this row: 0 at a document's first token and at
        a row's first, always below L.
    documents_BL: number of the document within its row, from 0; PADDING where there is none, which masks take for a
        document of its own.
    """

    tokens_BL: torch.Tensor
    labels_BL: torch.Tensor
    positions_BL: torch.Tensor
    documents_BL: torch.Tensor

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the same rows on a device; `non_blocking` as in `Tensor.to`."""
        return Batch(*(x.to(device, non_blocking=non_blocking) for x in self))


def counts_of(microbatches: Sequence[Batch], num_ahead: int) -> Tensor:
    """Return the number of tokens without padding; that of rows with any; and the number of targets of each of
    `num_ahead` layers that predict a token further ahead. They are the denominators of means over a step."""
    found = torch.zeros(2 + num_ahead, dtype=torch.int64, device=microbatches[0].tokens_BL.device)
    for batch in microbatches:
        is_token_BL = batch.documents_BL != PADDING
        ahead = (labels_ahead(batch.labels_BL, batch.documents_BL, k) for k in range(1, num_ahead + 1))
        found += torch.stack([is_token_BL.sum(), is_token_BL.any(1).sum(), *((x != IGNORE_INDEX).sum() for x in ahead)])
    return found
