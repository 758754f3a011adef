"""Llama 3: https://arxiv.org/abs/2407.21783. Weights are laid out as Hugging Face's `LlamaForCausalLM`."""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from torchtitan_graph.models.layers.attention import Attention
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.feed_forward import FeedForward
from torchtitan_graph.models.layers.rope import Llama3Scaling, rope_cos_sin


@dataclasses.dataclass(frozen=True)
class Config:
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int = 128256
    tied: bool = False
    rope_theta: float = 500000.0
    rope_scaling: Llama3Scaling | None = Llama3Scaling(factor=8.0)
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


_FACTOR_32 = Llama3Scaling(factor=32.0)

FLAVORS = {
    # The debug model's vocabulary is the tokenizer's.
    "debugmodel": Config(256, 6, 16, 16, 768, vocab_size=2048, rope_scaling=None),
    "1B": Config(2048, 16, 32, 8, 8192, tied=True, rope_scaling=_FACTOR_32),
    "3B": Config(3072, 28, 24, 8, 8192, tied=True, rope_scaling=_FACTOR_32),
    "8B": Config(4096, 32, 32, 8, 14336),
    "70B": Config(8192, 80, 64, 8, 28672),
    "405B": Config(16384, 126, 128, 8, 53248),
}

# What is split under tensor parallelism; the words are explained in parallel/plan.py.
PLAN = {
    "tok_embeddings": "embedding",
    "layers.*.attention_norm.weight": "replicate",
    "layers.*.attention": "partial",
    "layers.*.attention.wq.weight": "shard 0",
    "layers.*.attention.wk.weight": "shard 0",
    "layers.*.attention.wv.weight": "shard 0",
    "layers.*.attention.wo.weight": "shard 1",
    "layers.*.ffn_norm.weight": "replicate",
    "layers.*.feed_forward": "partial",
    "layers.*.feed_forward.w1.weight": "shard 0",
    "layers.*.feed_forward.w2.weight": "shard 1",
    "layers.*.feed_forward.w3.weight": "shard 0",
    "norm.weight": "replicate",
    "output": "vocabulary",
}

# Our parameter -> Hugging Face's, "*" the layer number. No tensor changes its layout. A tied output is not stored.
HF_KEYS = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.wk.weight": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attention.wv.weight": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
    "layers.*.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config.dim, config.num_heads, config.num_kv_heads, config.head_dim)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim)

    def forward(self, x_BLD: Tensor, *, rope: tuple[Tensor, Tensor], mask: Tensor | BlockMask) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rope=rope, mask=mask)
        return x_BLD + self.feed_forward(self.ffn_norm(x_BLD))


class Model(Decoder):
    def __init__(self, config: Config, attn: str = "sdpa"):
        super().__init__(
            vocab_size=config.vocab_size,
            dim=config.dim,
            num_heads=config.num_heads,
            norm_eps=config.norm_eps,
            tied=config.tied,
            attn=attn,
            blocks=[Block(config) for _ in range(config.num_layers)],
        )
        self.config = config

    def rope(self, positions_BL: Tensor) -> tuple[Tensor, Tensor]:
        return rope_cos_sin(positions_BL, self.config.head_dim, self.config.rope_theta, self.config.rope_scaling)

    def initial_std(self, name: str) -> float | None:
        if "norm" in name:
            return None
        if name == "output.weight" or (name == "tok_embeddings.weight" and self.config.tied):
            return self.config.dim**-0.5  # logits start near unit variance
        if name == "tok_embeddings.weight":
            return 1.0
        if name.endswith(("wo.weight", "w2.weight")):
            # Each block adds twice to the residual stream: its variance grows with depth unless these shrink.
            return 0.02 / (2 * self.config.num_layers) ** 0.5
        return 0.02
