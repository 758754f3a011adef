"""Custom operators: rows that take another order while something is computed of them, without a copy in between.

On a GPU each is one kernel, see rows_kernels.py; on a CPU torch's operators compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_graph.ops.operator import operator


def _places(tensors: Sequence[Tensor], number: int) -> Tensor:
    return torch.arange(number) % tensors[0].shape[0]


@operator(
    lambda rows_SD, index_S, copies: rows_SD.new_empty(index_S.shape[0] // copies, rows_SD.shape[1]), examples=_places
)
def sums_of_rows(rows_SD: Tensor, index_S: Tensor, copies: int) -> Tensor:
    """Return sums of rows, (T, D): `index_S` names the rows of each, `copies` of them. A GPU adds in fp32 at least."""
    if rows_SD.is_cuda:
        from torchtitan_graph.ops.rows_kernels import write_sums

        out_TD = rows_SD.new_empty(index_S.shape[0] // copies, rows_SD.shape[1])
        write_sums(out_TD, rows_SD, index_S, copies)
        return out_TD
    return rows_SD.index_select(0, index_S).unflatten(0, (-1, copies)).sum(1)


@operator(lambda rows_SD, scores_S1, index_S: rows_SD.new_empty(rows_SD.shape), examples=_places)
def scored_rows(rows_SD: Tensor, scores_S1: Tensor, index_S: Tensor) -> Tensor:
    """Return rows times their scores, in another order: the i-th is row `index_S[i]`."""
    if rows_SD.is_cuda:
        from torchtitan_graph.ops.rows_kernels import write_scored

        out_SD = rows_SD.new_empty(rows_SD.shape)
        write_scored(out_SD, rows_SD, scores_S1, index_S)
        return out_SD
    return rows_SD.index_select(0, index_S).mul_(scores_S1.index_select(0, index_S))


@operator(
    lambda grads_UD, index_S, rows_SD, scores_S1: (
        rows_SD.new_empty(rows_SD.shape),
        scores_S1.new_empty(scores_S1.shape),
    ),
    examples=_places,
)
def scored_rows_backward(
    grads_UD: Tensor, index_S: Tensor, rows_SD: Tensor, scores_S1: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and of their scores, given that of their products: row `index_S[i]` of `grads_UD`
    is row i's."""
    if rows_SD.is_cuda:
        from torchtitan_graph.ops.rows_kernels import write_scored_gradients

        of_rows_SD, of_scores_S1 = rows_SD.new_empty(rows_SD.shape), scores_S1.new_empty(scores_S1.shape)
        write_scored_gradients(of_rows_SD, of_scores_S1, grads_UD, index_S, rows_SD, scores_S1)
        return of_rows_SD, of_scores_S1
    grads_SD = grads_UD.index_select(0, index_S)
    of_scores_S1 = (grads_SD * rows_SD).sum(1, keepdim=True)
    return grads_SD.mul_(scores_S1), of_scores_S1
