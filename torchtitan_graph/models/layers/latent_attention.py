"""Multi-head latent attention (DeepSeek-V2: https://arxiv.org/abs/2405.04434)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchtitan_graph.models.layers.attention import Seen, attend
from torchtitan_graph.models.layers.init import RESIDUAL
from torchtitan_graph.models.layers.masks import Mask
from torchtitan_graph.models.layers.rope import Rotation

LATENT_EPS = 1e-6  # of the latents' norms, whatever a model's other norms have


class LatentAttention(nn.Module):
    """Attention whose keys and values come from one narrow latent vector per token.

    A head's query and key have `nope_dim` features without position, and `rope_dim` rotated ones; the rotated part of
    the key is shared by all heads. Under tensor parallelism a rank holds its own heads, and the latent's whole
    projections.

    Args:
        q_lora_rank: width of the latent that queries come from; 0: straight from the input.
        scale: factor of the products of queries and keys.
    """

    PLAN = {
        "": {"tp": "partial"},
        "wq.weight": {"tp": "shard 0"},
        "wq_a.weight": {"tp": "replicate"},
        "q_norm.weight": {"tp": "replicate"},
        "wq_b.weight": {"tp": "shard 0"},
        "wkv_a.weight": {"tp": "replicate"},
        "kv_norm.weight": {"tp": "replicate"},
        "wkv_b.weight": {"tp": "shard 0"},
        "wo.weight": {"tp": "shard 1"},
        "seen": {"cp": "context"},
    }
    INITIAL = {"wo.weight": RESIDUAL}

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        q_lora_rank: int,
        kv_lora_rank: int,
        nope_dim: int,
        rope_dim: int,
        v_dim: int,
        scale: float,
    ):
        super().__init__()
        self.num_heads, self.scale = num_heads, scale
        self.nope_dim, self.rope_dim, self.v_dim, self.kv_lora_rank = nope_dim, rope_dim, v_dim, kv_lora_rank
        q_width = num_heads * (nope_dim + rope_dim)
        if q_lora_rank:
            self.wq_a = nn.Linear(dim, q_lora_rank, bias=False)
            self.q_norm = nn.RMSNorm(q_lora_rank, eps=LATENT_EPS)
            self.wq_b = nn.Linear(q_lora_rank, q_width, bias=False)
        else:
            self.wq = nn.Linear(dim, q_width, bias=False)
        self.q_lora_rank = q_lora_rank
        self.wkv_a = nn.Linear(dim, kv_lora_rank + rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(kv_lora_rank, eps=LATENT_EPS)
        self.wkv_b = nn.Linear(kv_lora_rank, num_heads * (nope_dim + v_dim), bias=False)
        self.wo = nn.Linear(num_heads * v_dim, dim, bias=False)
        self.rotate = Rotation(interleaved=True)
        self.seen = Seen()

    def forward(self, x_BLD: Tensor, *, rope: tuple[Tensor, ...], mask: Mask) -> Tensor:
        q = self.wq_b(self.q_norm(self.wq_a(x_BLD))) if self.q_lora_rank else self.wq(x_BLD)
        q_BLNH = q.unflatten(-1, (-1, self.nope_dim + self.rope_dim))
        q_nope, q_rope = q_BLNH.split((self.nope_dim, self.rope_dim), dim=-1)
        latent_BLC, k_rope = self.wkv_a(x_BLD).split((self.kv_lora_rank, self.rope_dim), dim=-1)
        cos, sin = rope
        k_rope = self.rotate(k_rope.unsqueeze(2), cos, sin)
        latent_BLC, k_rope = self.seen(self.kv_norm(latent_BLC), k_rope)  # narrow; each rank expands all of it
        kv_BLNH = self.wkv_b(latent_BLC).unflatten(-1, (-1, self.nope_dim + self.v_dim))
        k_nope, v_BLNH = kv_BLNH.split((self.nope_dim, self.v_dim), dim=-1)
        q_rope = self.rotate(q_rope, cos, sin)
        q_BLNH = torch.cat((q_nope, q_rope), dim=-1)
        k_BLNH = torch.cat((k_nope, k_rope.expand(*k_nope.shape[:-1], self.rope_dim)), dim=-1)
        return self.wo(attend(q_BLNH, k_BLNH, v_BLNH, mask, scale=self.scale).flatten(-2))
