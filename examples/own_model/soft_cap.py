"""llama3 with capped attention scores, and a window in every second layer, as Gemma 2 has both; `attn = "flex"`."""

import dataclasses

import torch

from torchtitan_graph.models import llama3
from torchtitan_graph.models.layers.attention import Attention, attend
from torchtitan_graph.models.layers.masks import all_of, sliding
from torchtitan_graph.models.llama3 import HF_KEYS, PLAN

__all__ = ["FLAVORS", "HF_KEYS", "PLAN", "Model"]


@dataclasses.dataclass(frozen=True)
class Config(llama3.Config):
    window: int = 64
    cap: float = 50.0


FLAVORS = {"debugmodel": Config(dim=256, num_layers=6, num_heads=16, num_kv_heads=8, ffn_dim=768, rope_scaling=None)}


class CappedAttention(Attention):
    def __init__(self, c):
        super().__init__(c.dim, c.num_heads, c.num_kv_heads, c.head_dim)
        self.cap = c.cap

    def forward(self, x_BLD, *, rope, mask):
        q_BLNH, k_BLKH, v_BLKH = (w(x_BLD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q_BLNH, k_BLKH = self.placed(q_BLNH, k_BLKH, rope)
        k_BLKH, v_BLKH = self.seen(k_BLKH, v_BLKH)
        return self.wo(attend(q_BLNH, k_BLKH, v_BLKH, mask, score=self.capped).flatten(-2))

    def capped(self, score, b, h, q, kv):
        return self.cap * torch.tanh(score / self.cap)


class Model(llama3.Model):
    def __init__(self, config, attn="flex"):
        super().__init__(config, attn)
        for number, block in enumerate(self.layers):
            block.attention = CappedAttention(config)
            block.mask = "causal" if number % 2 else "window"

    def mask_rules(self, documents_BL, positions_BL):
        rules = super().mask_rules(documents_BL, positions_BL)
        return rules | {"window": all_of(rules["causal"], sliding(self.config.window))}
