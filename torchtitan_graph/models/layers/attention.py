"""Attention that never crosses documents, through `scaled_dot_product_attention` or flex attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from torchtitan_graph.graph.torch_private import flex_attention_op
from torchtitan_graph.models.layers.rope import apply_rope

FLEX_BLOCK = 128


def attention_mask(attn: str, documents_BL: Tensor) -> Tensor | BlockMask:
    """Build the mask of one batch: causal, and within a document.

    Args:
        attn: "sdpa" gives a boolean tensor (B, 1, L, L), True where a query (dim 2) sees a key (dim 3); "flex" a
            `BlockMask` that holds the same rule over blocks.
        documents_BL: equal numbers where two tokens belong to one document.
    """
    B, L = documents_BL.shape

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (documents_BL[b, q] == documents_BL[b, kv])

    if attn == "flex":
        return create_block_mask(visible, B, None, L, L, device=documents_BL.device, BLOCK_SIZE=FLEX_BLOCK)
    rows_L = torch.arange(L, device=documents_BL.device)
    same_BLL = documents_BL.unsqueeze(2) == documents_BL.unsqueeze(1)
    return (same_BLL & (rows_L.unsqueeze(1) >= rows_L)).unsqueeze(1)


def attend(q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, mask: Tensor | BlockMask) -> Tensor:
    """Attend with grouped queries: each of the K key heads serves N/K query heads. Gives (B, L, N, H)."""
    groups = q_BLNH.shape[2] // k_BLKH.shape[2]
    q_BNLH, k_BKLH, v_BKLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLKH, v_BLKH))
    if groups > 1:
        # The CPU's fused kernel has no grouped form and would fall back to one that holds every score.
        k_BKLH, v_BKLH = (x.repeat_interleave(groups, dim=1) for x in (k_BKLH, v_BKLH))
    if isinstance(mask, BlockMask):
        out_BNLH = flex_attention_op(q_BNLH, k_BKLH, v_BKLH, mask)
    else:
        out_BNLH = F.scaled_dot_product_attention(q_BNLH, k_BKLH, v_BKLH, attn_mask=mask)
    return out_BNLH.transpose(1, 2)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions. Under tensor parallelism it holds a rank's own heads."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, head_dim: int):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.wq = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(num_heads * head_dim, dim, bias=False)

    def forward(self, x_BLD: Tensor, *, rope: tuple[Tensor, Tensor], mask: Tensor | BlockMask) -> Tensor:
        q_BLNH, k_BLKH, v_BLKH = (w(x_BLD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q_BLNH, k_BLKH = apply_rope(q_BLNH, *rope), apply_rope(k_BLKH, *rope)
        return self.wo(attend(q_BLNH, k_BLKH, v_BLKH, mask).flatten(-2))


def flex_cpu_bytes(batch: int, num_heads: int, seq_len: int) -> int:
    """Estimate the peak bytes of one layer's uncompiled flex attention, forward and backward, on a CPU.

    It holds every score in fp32, several times over in the backward: 14 GiB were measured at batch 8, 16 heads,
    sequence 2048, which is seven score matrices.
    """
    return 7 * 4 * batch * num_heads * seq_len * seq_len
