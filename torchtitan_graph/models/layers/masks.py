"""Attention masks: rules for which positions see which, their intersections, and masks built from them.

A rule is a function `(b, h, q, kv) -> bool` on index tensors that broadcast: row of the batch, head, position of the
query, position of the key. That is flex attention's own convention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from torchtitan_graph.ops.varlen import Segments

FLEX_BLOCK = 128
PAIRS_AT_A_TIME = 2**24

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Mask = Tensor | BlockMask | Segments


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Mask rule: a query sees keys that are not later."""
    return q >= kv


def same_document(documents_BL: Tensor) -> Rule:
    """Return a mask rule: a query sees keys with the same number in `documents_BL`."""

    def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return documents_BL[b, q] == documents_BL[b, kv]

    return rule


def sliding(window: int) -> Rule:
    """Return a mask rule: a query sees the last `window` positions, its own among them."""

    def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q - kv < window

    return rule


def chunked(positions_BL: Tensor, chunk: int) -> Rule:
    """Return a mask rule: a query sees its chunk of a document; `positions_BL` count from the document's start."""

    def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return positions_BL[b, q] // chunk == positions_BL[b, kv] // chunk

    return rule


def begins_of(*numbers_BL: Tensor) -> Tensor:
    """Return (B, L) whether a segment begins: at a row's first token, and where a number differs from the last."""
    begins_BL = torch.ones_like(numbers_BL[0], dtype=torch.bool)
    begins_BL[:, 1:] = torch.stack([x[:, 1:] != x[:, :-1] for x in numbers_BL]).any(0)
    return begins_BL


def all_of(*rules: Rule) -> Rule:
    """Return the intersection of mask rules."""

    def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        seen = rules[0](b, h, q, kv)
        for each in rules[1:]:
            seen = seen & each(b, h, q, kv)
        return seen

    return rule


def of_queries(rule: Rule, places_L: Tensor | None) -> Rule:
    """Return a mask rule for a rank's part of the row, with queries at `places_L`; keys keep their places."""
    if places_L is None:
        return rule

    def of_part(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return rule(b, h, places_L[q], kv)

    return of_part


def dense_mask_bytes(B: int, Lq: int, Lk: int, num_masks: int, itemsize: int) -> int:
    """Return the bytes of one batch's masks under sdpa: for each pair of positions a boolean, and a number of
    `itemsize` bytes (`as_bias`)."""
    return B * Lq * Lk * num_masks * (1 + itemsize)


def build_mask(attn: str, rule: Rule, B: int, L: int, device: torch.device, places_L: Tensor | None = None) -> Mask:
    """Build the mask of one batch.

    Args:
        attn: "sdpa": a boolean tensor (B, 1, Lq, L), True where a query (dim 2) sees a key (dim 3); "flex": a
            `BlockMask` of the same rule over blocks.
        rule: one for all heads.
        places_L: places of the queries; None: one at each place.
    """
    Lq, rule = L if places_L is None else len(places_L), of_queries(rule, places_L)
    if attn == "flex":
        return _block_mask(rule, B, Lq, L, device)
    return _seen(rule, B, torch.arange(Lq, device=device), L)


def _seen(rule: Rule, B: int, q_L: Tensor, Lk: int) -> Tensor:
    b, h = torch.arange(B, device=q_L.device).view(B, 1, 1, 1), torch.zeros(1, dtype=torch.long, device=q_L.device)
    return rule(b, h, q_L.view(-1, 1), torch.arange(Lk, device=q_L.device)).expand(B, 1, len(q_L), Lk)


def _strips(rule: Rule, B: int, Lq: int, Lk: int, device: torch.device) -> Iterator[Tensor]:
    """Yield the mask of some queries at a time, whole blocks of them: that of a long row takes gigabytes."""
    length = max(1, PAIRS_AT_A_TIME // (B * Lk * FLEX_BLOCK)) * FLEX_BLOCK
    length = Lq if device.type == "meta" else length
    for q_L in torch.arange(Lq, device=device).split(length):
        yield _seen(rule, B, q_L, Lk)


def num_seen(rule: Rule, B: int, L: int, device: torch.device) -> Tensor:
    """Return the number (B, L) of positions that each position sees."""
    return torch.cat([seen.sum(-1).squeeze(1) for seen in _strips(rule, B, L, L, device)], dim=1)


def _block_mask(rule: Rule, B: int, Lq: int, Lk: int, device: torch.device) -> BlockMask:
    """Return the result of `create_block_mask`, without its eleven bytes for each pair of positions."""
    block, counts = FLEX_BLOCK, []
    for seen in _strips(rule, B, Lq, Lk, device):
        seen = F.pad(seen, (0, -Lk % block, 0, -seen.shape[2] % block))
        counts.append(seen.unflatten(3, (-1, block)).unflatten(2, (-1, block)).sum((3, 5), dtype=torch.int32))
    count_B1QK = torch.cat(counts, dim=2)
    full = count_B1QK == block * block
    part, whole = (
        (blocks.sum(-1, dtype=torch.int32), blocks.int().argsort(dim=-1, descending=True, stable=True).int())
        for blocks in ((count_B1QK > 0) & ~full, full)
    )
    return BlockMask.from_kv_blocks(*part, *whole, BLOCK_SIZE=block, mask_mod=rule, seq_lengths=(Lq, Lk))


def as_bias(mask: Mask, dtype: torch.dtype) -> Mask:
    """Return a boolean mask as a bias of scores: 0 where a query sees a key, else -inf. Other masks are unchanged.

    Attention's kernels need this form, and would build, and keep for backward, one in each layer.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))
