"""Context parallelism: the tokens of a row on each rank, and the gather of whole rows.

Zigzag sharding in short blocks, 0 1 1 0 0 1 1 0, balances the load: under a causal mask late queries see more than
early ones, and with packed documents two long parts a rank, one early and one late, would have unequal loads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

c10d = torch.ops._c10d_functional

LONGEST_BLOCK = 128  # flex attention's mask block


def block_length(L: int, degree: int) -> int:
    """Return the length of zigzag blocks for a row of `L` tokens: the longest with equally many blocks in both
    directions on each rank."""
    assert L % (2 * degree) == 0, "checked with the configuration"
    share = L // (2 * degree)
    return max(block for block in range(1, min(share, LONGEST_BLOCK) + 1) if share % block == 0)


def places_of(rank: int, L: int, degree: int, device: torch.device) -> Tensor:
    """Return the places (L / degree) in the row of a rank's tokens, in order."""
    blocks_JRL = torch.arange(L, device=device).view(-1, 2, degree, block_length(L, degree))
    forth, back = blocks_JRL[:, 0, rank], blocks_JRL[:, 1, degree - 1 - rank]
    return torch.stack((forth, back), dim=1).flatten()


def in_order(x_RBLW: Tensor) -> Tensor:
    """Reorder a row gathered by ranks into its true order: (ranks, B, L / ranks, W) -> (B, L, W)."""
    R, B, L, W = x_RBLW.shape
    block = block_length(R * L, R)
    forth, back = x_RBLW.view(R, B, -1, 2, block, W).permute(1, 2, 3, 0, 4, 5).unbind(2)
    return torch.stack((forth, back.flip(2)), dim=2).reshape(B, R * L, W)


class Gathered(torch.autograd.Function):
    """All-gather of ranks' parts, stacked. Backward is a reduce-scatter of the gradients."""

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
    """Return tensors (B, L / degree, ...) all-gathered over the sequence in one collective: (B, L, ...), in order."""
    packed_BLW = torch.cat([x.flatten(2) for x in parts], dim=-1)
    whole_BLW = in_order(Gathered.apply(packed_BLW, degree, group))
    split = whole_BLW.split([x[0, 0].numel() for x in parts], dim=-1)
    return tuple(y.unflatten(2, x.shape[2:]) for x, y in zip(parts, split, strict=True))
