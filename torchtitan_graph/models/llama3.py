"""Llama 3: https://arxiv.org/abs/2407.21783. Weights are laid out as Hugging Face's `LlamaForCausalLM`."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from torchtitan_graph.models.layers.attention import Attention
from torchtitan_graph.models.layers.decoder import Block, Decoder, decoder_plan
from torchtitan_graph.models.layers.feed_forward import FeedForward
from torchtitan_graph.models.layers.hf_config import ConfigReader
from torchtitan_graph.models.layers.hf_rope import common_to_hf, read_common
from torchtitan_graph.models.layers.rope import Llama3Scaling, Scaling, rope_cos_sin
from torchtitan_graph.models.layers.stored import LLAMA_KEYS


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
    rope_scaling: Scaling | None = Llama3Scaling(factor=8.0)
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

PLAN = decoder_plan(attention=Attention.PLAN, feed_forward=FeedForward.PLAN)

# Our parameter -> Hugging Face's, "*" the layer number. No tensor changes its layout. A tied output is not stored.
HF_KEYS = LLAMA_KEYS

HF_ARCHITECTURES = ("LlamaForCausalLM",)
HF_SKIPPED = ("*.rotary_emb.inv_freq",)  # computed here; the oldest releases store it


def from_hf_config(raw: dict[str, Any]) -> Config:
    """Return the configuration in a config.json.

    Raises:
        UserError: llama3 can't express it.
    """
    reader = ConfigReader(raw)
    common, _ = read_common(reader)
    dim, num_heads = common["dim"], common["num_heads"]
    num_kv_heads = reader.integer("num_key_value_heads", num_heads, null=num_heads)
    reader.expect_of_all("llama")
    reader.expect("attention_bias", False)
    reader.expect("mlp_bias", False)
    reader.expect("head_dim", dim // num_heads, None)
    reader.need(dim % num_heads == 0, f"num_attention_heads = {num_heads} must divide hidden_size = {dim}")
    reader.check_heads(num_heads, num_kv_heads, dim // num_heads)
    return reader.build(
        Config,
        **common,
        num_kv_heads=num_kv_heads,
        ffn_dim=reader.integer("intermediate_size"),
    )


def to_hf_config(config: Config) -> dict[str, Any]:
    """Return a config.json, in the form of the releases, which every version of transformers reads."""
    return {
        **common_to_hf(config, "LlamaForCausalLM", "llama"),
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
        # Our rotary positions have no limit; these are the releases' values: 3, and 3.1 and later.
        "max_position_embeddings": 8192 if config.rope_scaling is None else 131072,
        "mlp_bias": False,
    }


class Model(Decoder):
    def __init__(self, config: Config, attn: str = "sdpa"):
        c = config
        blocks = [
            Block(
                c.dim,
                c.norm_eps,
                Attention(c.dim, c.num_heads, c.num_kv_heads, c.head_dim),
                FeedForward(c.dim, c.ffn_dim),
            )
            for _ in range(c.num_layers)
        ]
        super().__init__(c, attn, blocks)

    def rope(self, positions_BL: Tensor) -> tuple[Tensor, Tensor]:
        return rope_cos_sin(positions_BL, self.config.head_dim, self.config.rope_theta, self.config.rope_scaling)
