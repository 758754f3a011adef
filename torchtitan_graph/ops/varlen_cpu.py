"""Attention within segments by a CPU's kernel, call by call; see Note [Pieces]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_graph.ops.pieces import Call, Places
from torchtitan_graph.torch_private.flash import cpu_backward, cpu_forward

_ALL = slice(None)


def attend_in_pieces(
    out_TNH: Tensor,
    lse_NT: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    calls: Sequence[Call],
    scale: float,
) -> None:
    """Write the result of attention, and the logarithms of the sums of exponentials."""
    for call in calls:
        q_PNLH, k_PNLH, v_PNLH = _inputs(call, q_TNH, k_TKH, v_TKH)
        out_PNLH, lse_PNL = cpu_forward(q_PNLH, k_PNLH, v_PNLH, call.seen(), scale)
        out_TNH[call.own] = _rows(out_PNLH)[call.real]
        lse_NT[:, call.own] = _rows(lse_PNL)[call.real].t()


def gradients_in_pieces(
    d_out_TNH: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    out_TNH: Tensor,
    lse_NT: Tensor,
    calls: Sequence[Call],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values; those of keys that are in several pieces are added up in the
    type of `lse_NT`."""
    dq_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    dk_TKH, dv_TKH = (torch.zeros(x.shape, dtype=lse_NT.dtype, device=x.device) for x in (k_TKH, v_TKH))
    for call in calls:
        q_PNLH, k_PNLH, v_PNLH = _inputs(call, q_TNH, k_TKH, v_TKH)
        out_PNLH = _by_piece(out_TNH[call.queries], call)
        # A query that rounds a piece up adds nothing: its gradient is 0, its denominator infinite.
        d_out_PNLH = _by_piece(_filled(d_out_TNH[call.own], call, 0.0), call)
        lse_PNL = _by_piece(_filled(lse_NT[:, call.own].t(), call, float("inf")), call)
        d_q, d_k, d_v = cpu_backward(d_out_PNLH, q_PNLH, k_PNLH, v_PNLH, out_PNLH, lse_PNL, call.seen(), scale)
        dq_TNH[call.own] = _rows(d_q)[call.real]
        _add(dk_TKH, call.keys, _rows(d_k))
        _add(dv_TKH, call.keys, _rows(d_v))
    return dq_TNH, dk_TKH.type_as(k_TKH), dv_TKH.type_as(v_TKH)


def _inputs(call: Call, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values of a call's pieces: a CPU's kernel has no groups of queries."""
    groups = q_TNH.shape[1] // k_TKH.shape[1]
    k, v = (x[call.keys].repeat_interleave(groups, dim=1) if groups > 1 else x[call.keys] for x in (k_TKH, v_TKH))
    return _by_piece(q_TNH[call.queries], call), _by_piece(k, call), _by_piece(v, call)


def _by_piece(rows: Tensor, call: Call) -> Tensor:
    """Reshape rows (T, N, ...) to pieces (P, N, L, ...)."""
    return rows.unflatten(0, (call.number, -1)).transpose(1, 2)


def _rows(pieces: Tensor) -> Tensor:
    """Reshape pieces (P, N, L, ...) to rows (T, N, ...)."""
    return pieces.transpose(1, 2).flatten(0, 1)


def _filled(rows: Tensor, call: Call, value: float) -> Tensor:
    """Return the rows of all of a call's queries, from those of its pieces' own; others have the value."""
    if len(rows) == call.number * call.length:
        return rows
    filled = rows.new_full((call.number * call.length, *rows.shape[1:]), value)
    filled[call.real] = rows
    return filled


def _add(total_TKH: Tensor, keys: Places, part_TNH: Tensor) -> None:
    """Add the gradients of some keys, one for each query head, to those of all."""
    part_TKH = part_TNH.unflatten(1, (total_TKH.shape[1], -1)).sum(2, dtype=total_TKH.dtype)
    if isinstance(keys, slice):
        total_TKH[keys] += part_TKH
    else:
        total_TKH.index_add_(0, keys, part_TKH)
