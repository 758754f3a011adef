"""The skeleton that every family fills: embedding, blocks, norm, output."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from torchtitan_graph.models.layers.attention import attention_mask


class Decoder(nn.Module):
    """A decoder-only transformer over packed documents.

    A family gives the blocks (each called as `block(x_BLD, rope=..., mask=...)`), and defines `rope(positions_BL)`
    and `initial_std(name)`.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        dim: int,
        num_heads: int,
        norm_eps: float,
        tied: bool,
        attn: str,
        blocks: list[nn.Module],
    ):
        super().__init__()
        self.num_heads = num_heads
        self.attn = attn
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def rope(self, positions_BL: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def initial_std(self, name: str) -> float | None:
        """Give the standard deviation that parameter `name` is drawn with; None means ones."""
        raise NotImplementedError

    def mask(self, documents_BL: Tensor) -> Tensor | BlockMask:
        """Build the attention mask of one batch; made once, outside the graph, and passed to every layer."""
        return attention_mask(self.attn, documents_BL)

    def forward(
        self, tokens_BL: Tensor, positions_BL: Tensor | None = None, mask: Tensor | BlockMask | None = None
    ) -> Tensor:
        """Give the logits (B, L, V); without positions and mask every row is one document."""
        if positions_BL is None:
            positions_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device).expand_as(tokens_BL)
        if mask is None:
            mask = self.mask(torch.zeros_like(tokens_BL))
        rope = self.rope(positions_BL)
        x_BLD = self.tok_embeddings(tokens_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD, rope=rope, mask=mask)
        return self.output(self.norm(x_BLD))
