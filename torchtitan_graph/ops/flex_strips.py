"""Uncompiled flex attention in strips of queries where rows are long: in one call it holds all scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from torchtitan_graph.torch_private.flex import (
    dense_flex_attention,
    dense_flex_attention_backward,
    run_flex_attention_with,
)

AT_ONCE = 2**28  # scores in one call, as in torch, with torch's bits; above, a strip has at most these:
SCORES_AT_A_TIME = 2**25


class Strip(NamedTuple):
    """Queries `q`, and the keys `kv` that any of them sees."""

    q: slice
    kv: slice


def most_scores(B: int, N: int, Lq: int, Lk: int) -> int:
    """Return the most scores that are held at once."""
    scores = B * N * Lq * Lk
    return scores if scores <= AT_ONCE else max(SCORES_AT_A_TIME, scores * 128 // Lq)


def _forward(q_BNLH: Tensor, k: Tensor, v: Tensor, score: Any, mask: tuple, *rest: Any) -> tuple[Tensor, ...]:
    if not _is_long(q_BNLH, k):
        return dense_flex_attention(q_BNLH, k, v, score, mask, *rest)
    results = []
    for strip in _strips(q_BNLH, k, mask):
        q, kv = strip
        part = dense_flex_attention(
            q_BNLH[:, :, q],
            k[:, :, kv],
            v[:, :, kv],
            _moved(score, strip, before=1),
            (*mask[:-1], _moved(mask[-1], strip, before=0)),
            *rest,
        )
        results.append(part)
    return tuple(_joined(parts) for parts in zip(*results, strict=True))


def _backward(
    q_BNLH: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Any, d_lse: Any, score: Any, joint: Any,
    mask: tuple, scale: float, options: Any, of_score: tuple, of_rule: tuple,
) -> tuple[Any, ...]:  # fmt: skip
    rest = scale, options, _asking(of_score, joint), of_rule
    if not _is_long(q_BNLH, k):
        return dense_flex_attention_backward(q_BNLH, k, v, out, lse, d_out, d_lse, score, joint, mask, *rest)
    dq, dk, dv = torch.empty_like(q_BNLH), torch.zeros_like(k), torch.zeros_like(v)
    of_buffers: tuple[Tensor | None, ...] = ()
    for strip in _strips(q_BNLH, k, mask):
        q, kv = strip
        dq[:, :, q], dk_part, dv_part, others = dense_flex_attention_backward(
            q_BNLH[:, :, q],
            k[:, :, kv],
            v[:, :, kv],
            *(x if x is None else x[:, :, q] for x in (out, lse, d_out, d_lse)),
            _moved(score, strip, before=1),
            _moved(joint, strip, before=1),
            (*mask[:-1], _moved(mask[-1], strip, before=0)),
            *rest,
        )
        dk[:, :, kv] += dk_part
        dv[:, :, kv] += dv_part
        sums = (x if x is None else x + y for x, y in zip(of_buffers, others, strict=True))
        of_buffers = tuple(sums) if of_buffers else others
    return dq, dk, dv, of_buffers


def _asking(of_score: tuple, joint: Any) -> tuple:
    """Set `requires_grad` on the tensors in a score function's closure for which its backward returns gradients: inputs
    of a graph don't have it."""
    if not isinstance(joint, GraphModule) or not of_score:
        return of_score
    *_, output = joint.graph.nodes
    gradients: Any = output.args[0]
    pairs = zip(of_score, gradients[-len(of_score) :], strict=True)
    return tuple(x if gradient is None else x.detach().requires_grad_() for x, gradient in pairs)


def _is_long(q_BNLH: Tensor, k: Tensor) -> bool:
    return q_BNLH.shape[:3].numel() * k.shape[2] > AT_ONCE


def _strips(q_BNLH: Tensor, k: Tensor, mask: tuple) -> Iterator[Strip]:
    """Yield strips of at most `SCORES_AT_A_TIME` scores where possible; the mask's blocks tell which keys each
    needs."""
    (B, N, Lq, _), Lk = q_BNLH.shape, k.shape[2]
    of_query, of_key = mask[-3:-1]
    first, last = _key_blocks(mask)
    begin, low, high = 0, *(first[0], last[0])
    for block in range(1, len(first)):
        wider = min(low, first[block]), max(high, last[block])
        if B * N * (block + 1 - begin) * of_query * (wider[1] + 1 - wider[0]) * of_key > SCORES_AT_A_TIME:
            yield Strip(slice(begin * of_query, block * of_query), slice(low * of_key, min(Lk, (high + 1) * of_key)))
            begin, wider = block, (first[block], last[block])
        low, high = wider
    yield Strip(slice(begin * of_query, Lq), slice(low * of_key, min(Lk, (high + 1) * of_key)))


def _key_blocks(mask: tuple) -> tuple[list[int], list[int]]:
    """Return, by block of queries, the first and the last block of keys that any of them sees."""
    firsts, lasts = [], []
    for count_BHQ, number_BHQK in (mask[2:4], mask[4:6]):
        K = number_BHQK.shape[-1]
        listed = torch.arange(K, device=count_BHQ.device) < count_BHQ.unsqueeze(-1)
        firsts.append(torch.where(listed, number_BHQK, K - 1).amin((0, 1, 3)))
        lasts.append(torch.where(listed, number_BHQK, 0).amax((0, 1, 3)))
    first, last = torch.minimum(*firsts), torch.maximum(*lasts)
    return torch.minimum(first, last).tolist(), last.tolist()


def _moved(function: Callable[..., Any], strip: Strip, before: int) -> Callable[..., Any]:
    """Return a mask rule or score function for a strip, its positions shifted to the row's; they follow `before` other
    arguments."""

    def of_places(*args: Any) -> Any:
        b, h, q, kv = args[before : before + 4]
        return function(*args[:before], b, h, q + strip.q.start, kv + strip.kv.start, *args[before + 4 :])

    return of_places


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    """Return the strips concatenated, in the parts' memory order."""
    order = sorted(range(parts[0].dim()), key=parts[0].stride, reverse=True)
    whole = torch.cat([x.permute(order) for x in parts], dim=order.index(2))
    return whole.permute([order.index(dim) for dim in range(len(order))])


run_flex_attention_with(_forward, _backward)
