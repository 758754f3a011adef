"""Context parallel: which tokens of a row a rank has, and the whole row's again.

Short blocks are dealt to and fro, 0 1 1 0 0 1 1 0: under a causal mask late queries see more than early ones, and with
packed documents two long parts a rank, one early and one late, would not weigh alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

c10d = torch.ops._c10d_functional

LONGEST_BLOCK = 128  # what flex attention masks as one


def block_length(L: int, degree: int) -> int:
    """Give the length of the blocks that a row of `L` tokens is dealt in: the longest that gives each rank equally many
    of both directions."""
    assert L % (2 * degree) == 0, "checked with the configuration"
    share = L // (2 * degree)
    return max(block for block in range(1, min(share, LONGEST_BLOCK) + 1) if share % block == 0)


def places_of(rank: int, L: int, degree: int, device: torch.device) -> Tensor:
    """Give the places (L / degree) in the row of the tokens that a rank has, in order."""
    blocks_JRL = torch.arange(L, device=device).view(-1, 2, degree, block_length(L, degree))
    forth, back = blocks_JRL[:, 0, rank], blocks_JRL[:, 1, degree - 1 - rank]
    return torch.stack((forth, back), dim=1).flatten()


def in_order(x_RBLW: Tensor) -> Tensor:
    """Put what lies by rank back in its places: (ranks, B, L / ranks, W) -> (B, L, W)."""
    R, B, L, W = x_RBLW.shape
    block = block_length(R * L, R)
    forth, back = x_RBLW.view(R, B, -1, 2, block, W).permute(1, 2, 3, 0, 4, 5).unbind(2)
    return torch.stack((forth, back.flip(2)), dim=2).reshape(B, R * L, W)


class Gathered(torch.autograd.Function):
    """All ranks' parts, stacked. Backward sums the ranks' gradients, and each takes its part."""

    @staticmethod
    def forward(ctx: Any, x_BLW: Tensor, degree: int, group: str) -> Tensor:
        ctx.degree, ctx.group = degree, group
        flat = c10d.wait_tensor(c10d.all_gather_into_tensor(x_BLW.contiguous(), degree, group))
        return flat.unflatten(0, (degree, -1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        flat = grads[0].flatten(0, 1).contiguous()
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(flat, "sum", ctx.degree, ctx.group)), None, None


def whole_rows(parts: tuple[Tensor, ...], degree: int, group: str) -> tuple[Tensor, ...]:
    """Gather tensors (B, L / degree, ...) over the sequence, in one collective: (B, L, ...), in true order."""
    packed_BLW = torch.cat([x.flatten(2) for x in parts], dim=-1)
    whole_BLW = in_order(Gathered.apply(packed_BLW, degree, group))
    split = whole_BLW.split([x[0, 0].numel() for x in parts], dim=-1)
    return tuple(y.unflatten(2, x.shape[2:]) for x, y in zip(parts, split, strict=True))
