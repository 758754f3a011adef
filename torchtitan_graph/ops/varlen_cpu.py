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
    K, G = k_TKH.shape[1], q_TNH.shape[1] // k_TKH.shape[1]
    q_KGTH, out_KGTH, lse_KGT = _by_head(q_TNH, K), _by_head(out_TNH, K), lse_NT.unflatten(0, (K, G))
    k_KGTH, v_KGTH = (_by_head(x, K).expand(-1, G, -1, -1) for x in (k_TKH, v_TKH))
    for call in calls:
        out, lse = cpu_forward(
            _pieces(q_KGTH, call.queries, call),
            _key_pieces(k_KGTH, call),
            _key_pieces(v_KGTH, call),
            call.seen(),
            scale,
        )
        _write(out_KGTH, out, call)
        _write(lse_KGT, lse, call)
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
    q_KGTH, d_out_KGTH, out_KGTH, dq_KGTH = (_by_head(x, K) for x in (q_TNH, d_out_TNH, out_TNH, dq_TNH))
    G = q_KGTH.shape[1]
    k_KGTH, v_KGTH = (_by_head(x, K).expand(-1, G, -1, -1) for x in (k_TKH, v_TKH))
    lse_KGT = lse_NT.unflatten(0, (K, G))
    for call in calls:
        d_out, q, out, lse = (_pieces(x, call.queries, call) for x in (d_out_KGTH, q_KGTH, out_KGTH, lse_KGT))
        k, v = _key_pieces(k_KGTH, call), _key_pieces(v_KGTH, call)
        d_q, d_k, d_v = cpu_backward(d_out, q, k, v, out, lse, call.seen(), scale)
        _write(dq_KGTH, d_q, call)
        for total_KTH, part in ((dk_KTH, d_k), (dv_KTH, d_v)):
            _add_keys(total_KTH, part, call, once)
        del d_q, d_k, d_v, d_out, q, k, v, out, lse, part  # before the next call needs memory
    return dq_TNH, dk_KTH.transpose(0, 1).type_as(k_TKH), dv_KTH.transpose(0, 1).type_as(v_TKH)


def _by_head(rows: Tensor, K: int) -> Tensor:
    """Return a view (K, heads / K, T, H) of rows (T, heads, H)."""
    return rows.unflatten(1, (K, -1)).movedim(0, 2)


def _slice(x: Tensor, dim: int, places: slice) -> Tensor:
    return x.narrow(dim, places.start, places.stop - places.start)  # in a third of the time of x[..., places]


def _pieces(x_KGT: Tensor, places: Places, call: Call) -> Tensor:
    """Return the pieces (K * pieces, G, L, ...) at places of (K, G, T, ...); a single piece is a view."""
    if isinstance(places, slice):
        return _slice(x_KGT, 2, places)
    return x_KGT[:, :, places].unflatten(2, (call.number, -1)).movedim(2, 1).flatten(0, 1)


def _key_pieces(x_KGTH: Tensor, call: Call) -> Tensor:
    """Return the pieces of keys or values, expanded; see Note [Groups of queries]."""
    if isinstance(call.keys, slice):
        return _slice(x_KGTH, 2, call.keys)
    return _pieces(x_KGTH[:, :1], call.keys, call).expand(-1, x_KGTH.shape[1], -1, -1)


def _write(x_KGT: Tensor, pieces: Tensor, call: Call) -> None:
    """Write the pieces of a call's queries to their places of (K, G, T, ...)."""
    if isinstance(call.queries, slice):
        _slice(x_KGT, 2, call.queries).copy_(pieces)
    else:
        x_KGT[:, :, call.queries] = _rows(pieces, call)


def _add_keys(total_KTH: Tensor, part: Tensor, call: Call, once: bool) -> None:
    """Sum gradients of keys over the queries' heads, and write or add them to the sums of all pieces."""
    if isinstance(call.keys, slice):
        total = _slice(total_KTH, 1, call.keys)
        if once:
            torch.sum(part, 1, dtype=total.dtype, out=total)
        else:
            total.add_(part.sum(1, dtype=total.dtype))
    else:
        total_KTH.index_add_(1, call.keys, _rows(part.sum(1, keepdim=True, dtype=total_KTH.dtype), call).squeeze(1))


def _rows(pieces: Tensor, call: Call) -> Tensor:
    """Reshape pieces (K * pieces, G, L, ...) to (K, G, pieces * L, ...)."""
    return pieces if call.number == 1 else pieces.unflatten(0, (-1, call.number)).movedim(1, 2).flatten(2, 3)


def _each_key_once(calls: Sequence[Call], T: int) -> bool:
    """Return whether each of T keys is in one piece, a call of its own: then its gradient is written, not added up."""
    return all(call.number == 1 and call.offset == 0 for call in calls) and sum(call.length for call in calls) == T
