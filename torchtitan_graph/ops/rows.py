"""Custom operators: rows that take another order while something is computed of them, without a copy in between.

On a GPU each is one kernel, see rows_kernels.py; a CPU computes the same by torch's operators, in blocks of rows, and
rounds each of them. Rows and scores have one dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_graph.ops.operator import operator

_BLOCK = 1 << 18  # numbers that a CPU computes at a time


def _places(tensors: Sequence[Tensor], number: int) -> Tensor:
    return torch.arange(number) % tensors[0].shape[0]


def _blocks(number: int, width: int) -> list[slice]:
    """Return blocks of rows that a CPU computes at a time, so that what lies between two steps stays small."""
    step = max(1, _BLOCK // max(1, width))
    return [slice(begin, begin + step) for begin in range(0, number, step)]


@operator(
    lambda rows_SD, index_S, copies: rows_SD.new_empty(index_S.shape[0] // copies, rows_SD.shape[1]),
    dynamic_rows=lambda *_, **__: False,
    examples=_places,
)
def sums_of_rows(rows_SD: Tensor, index_S: Tensor, copies: int) -> Tensor:
    """Return sums of rows, (T, D): `index_S` names the rows of each, `copies` of them. A GPU adds in fp32 at least.
    Where there are fewer rows than places in `index_S`, those of padding are missing at the end, and count as zeros."""
    if len(rows_SD) < len(index_S):
        index_S = index_S.clamp(max=len(rows_SD))
        rows_SD = torch.cat([rows_SD, rows_SD.new_zeros(1, rows_SD.shape[1])])
    out_TD = rows_SD.new_empty(index_S.shape[0] // copies, rows_SD.shape[1])
    if rows_SD.is_cuda:
        from torchtitan_graph.ops.rows_kernels import write_sums

        write_sums(out_TD, rows_SD, index_S, copies)
        return out_TD
    index_TA = index_S.view(-1, copies)
    for block in _blocks(len(out_TD), copies * rows_SD.shape[1]):
        rows = rows_SD.index_select(0, index_TA[block].flatten())
        torch.sum(rows.unflatten(0, (-1, copies)), 1, out=out_TD[block])
    return out_TD


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
    of_rows_SD, of_scores_S1 = rows_SD.new_empty(rows_SD.shape), scores_S1.new_empty(scores_S1.shape)
    if rows_SD.is_cuda:
        from torchtitan_graph.ops.rows_kernels import write_scored_gradients

        write_scored_gradients(of_rows_SD, of_scores_S1, grads_UD, index_S, rows_SD, scores_S1)
        return of_rows_SD, of_scores_S1
    for block in _blocks(*rows_SD.shape):
        grads = grads_UD.index_select(0, index_S[block])
        torch.sum(grads * rows_SD[block], 1, keepdim=True, out=of_scores_S1[block])
        torch.mul(grads, scores_S1[block], out=of_rows_SD[block])
    return of_rows_SD, of_scores_S1
