"""Which positions see which: rules, their products, and the masks that attention is given.

A rule is a function `(b, h, q, kv) -> bool` on index tensors that broadcast: row of the batch, head, position of the
query, position of the key. That is flex attention's own convention.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

FLEX_BLOCK = 128

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Mask = Tensor | BlockMask


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """See what is not later."""
    return q >= kv


def same_document(documents_BL: Tensor) -> Rule:
    """See what has the same number in `documents_BL`."""

    def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return documents_BL[b, q] == documents_BL[b, kv]

    return rule


def sliding(window: int) -> Rule:
    """See the last `window` positions, the query's own among them."""

    def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q - kv < window

    return rule


def chunked(positions_BL: Tensor, chunk: int) -> Rule:
    """See what lies in the same chunk of a document; `positions_BL` count from the document's start."""

    def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return positions_BL[b, q] // chunk == positions_BL[b, kv] // chunk

    return rule


def all_of(*rules: Rule) -> Rule:
    """See what every rule lets see."""

    def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        seen = rules[0](b, h, q, kv)
        for each in rules[1:]:
            seen = seen & each(b, h, q, kv)
        return seen

    return rule


def dense_mask_bytes(B: int, L: int, num_masks: int, itemsize: int) -> int:
    """Return what the masks of one batch take under sdpa: for each pair of positions a boolean, and a number of
    `itemsize` bytes (`as_bias`).
    """
    return B * L * L * num_masks * (1 + itemsize)


def build_mask(attn: str, rule: Rule, B: int, L: int, device: torch.device) -> Mask:
    """Build the mask of one batch.

    Args:
        attn: "sdpa" gives a boolean tensor (B, 1, L, L), True where a query (dim 2) sees a key (dim 3); "flex" a
            `BlockMask` that holds the same rule over blocks.
        rule: one for all heads.
    """
    if attn == "flex":
        return create_block_mask(rule, B, None, L, L, device=device, BLOCK_SIZE=FLEX_BLOCK)
    b, h = torch.arange(B, device=device).view(B, 1, 1, 1), torch.zeros(1, dtype=torch.long, device=device)
    q, kv = torch.arange(L, device=device).view(L, 1), torch.arange(L, device=device)
    return rule(b, h, q, kv).expand(B, 1, L, L)


def as_bias(mask: Mask, dtype: torch.dtype) -> Mask:
    """Give a boolean mask as what is added to scores: 0 where a query sees a key, else -inf. A `BlockMask` stays.

    Attention's kernels want it so, and would make, and keep for backward, one in each layer.
    """
    if isinstance(mask, BlockMask) or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))
