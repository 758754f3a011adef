"""Attention within segments by a CPU's kernel, call by call; see Note [Pieces].

Note [Groups of queries]
The kernel has no heads of keys that several heads of queries share. So a head of keys counts as a row of a batch, whose
heads are the G heads of queries that it serves: they read one head of keys, expanded and not copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtitan_graph.ops.pieces import Call, Places
from torchtitan_graph.torch_private.flash import cpu_backward, cpu_forward


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
    K = k_TKH.shape[1]
    q_KGTH, k_KGTH, v_KGTH, out_KGTH = (_by_head(x, K) for x in (q_TNH, k_TKH, v_TKH, out_TNH))
    lse_KGT = lse_NT.unflatten(0, (K, -1))
    for call in calls:
        out, lse = cpu_forward(*_inputs(call, q_KGTH, k_KGTH, v_KGTH), call.seen(), scale)
        out_KGTH[:, :, call.queries] = _rows(out, call)
        lse_KGT[:, :, call.queries] = _rows(lse, call)
        del out, lse  # before the next call needs memory


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
    T, K, H = k_TKH.shape
    once = _each_key_once(calls, T)
    new = torch.empty if once else torch.zeros
    dq_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    dk_KTH, dv_KTH = (new((T, K, H), dtype=lse_NT.dtype, device=k_TKH.device).transpose(0, 1) for _ in range(2))
    q_KGTH, k_KGTH, v_KGTH = (_by_head(x, K) for x in (q_TNH, k_TKH, v_TKH))
    d_out_KGTH, out_KGTH, dq_KGTH = (_by_head(x, K) for x in (d_out_TNH, out_TNH, dq_TNH))
    lse_KGT = lse_NT.unflatten(0, (K, -1))
    for call in calls:
        d_out, out, lse = (_pieces(x, call.queries, call) for x in (d_out_KGTH, out_KGTH, lse_KGT))
        inputs = _inputs(call, q_KGTH, k_KGTH, v_KGTH)
        d_q, d_k, d_v = cpu_backward(d_out, *inputs, out, lse, call.seen(), scale)
        dq_KGTH[:, :, call.queries] = _rows(d_q, call)
        for total_KTH, part in ((dk_KTH, d_k), (dv_KTH, d_v)):
            if once and isinstance(call.keys, slice):
                torch.sum(part, 1, dtype=total_KTH.dtype, out=total_KTH[:, call.keys])
                continue
            part_KTH = _rows(part.sum(1, keepdim=True, dtype=total_KTH.dtype), call).squeeze(1)
            if once:
                total_KTH[:, call.keys] = part_KTH
            elif isinstance(call.keys, slice):
                total_KTH[:, call.keys] += part_KTH
            else:
                total_KTH.index_add_(1, call.keys, part_KTH)
        del d_q, d_k, d_v, d_out, inputs, out, lse, part  # before the next call needs memory
    return dq_TNH, dk_KTH.transpose(0, 1).type_as(k_TKH), dv_KTH.transpose(0, 1).type_as(v_TKH)


def _by_head(rows: Tensor, K: int) -> Tensor:
    """Return a view (K, heads / K, T, H) of rows (T, heads, H)."""
    return rows.unflatten(1, (K, -1)).movedim(0, 2)


def _inputs(call: Call, q_KGTH: Tensor, k_KGTH: Tensor, v_KGTH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values of a call's pieces; see Note [Groups of queries]."""
    q, k, v = _pieces(q_KGTH, call.queries, call), _pieces(k_KGTH, call.keys, call), _pieces(v_KGTH, call.keys, call)
    return q, k.expand(-1, q.shape[1], -1, -1), v.expand(-1, q.shape[1], -1, -1)


def _pieces(x_KGT: Tensor, places: Places, call: Call) -> Tensor:
    """Return the pieces (K * pieces, G, L, ...) at places of (K, G, T, ...); a single piece is a view."""
    part = x_KGT[:, :, places]
    return part if call.number == 1 else part.unflatten(2, (call.number, -1)).movedim(2, 1).flatten(0, 1)


def _rows(pieces: Tensor, call: Call) -> Tensor:
    """Reshape pieces (K * pieces, G, L, ...) to (K, G, pieces * L, ...)."""
    return pieces if call.number == 1 else pieces.unflatten(0, (-1, call.number)).movedim(1, 2).flatten(2, 3)


def _each_key_once(calls: Sequence[Call], T: int) -> bool:
    """Return whether each of T keys is in one piece: then its gradient is written, else it is added up."""
    return all(call.offset == 0 for call in calls) and sum(call.number * call.length for call in calls) == T
