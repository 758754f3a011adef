"""Qwen3, dense and mixture of experts: https://arxiv.org/abs/2505.09388. As Hugging Face's `Qwen3ForCausalLM` and
`Qwen3MoeForCausalLM`."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from torchtitan_graph.models.layers.attention import Attention
from torchtitan_graph.models.layers.decoder import Block, Decoder, decoder_plan
from torchtitan_graph.models.layers.feed_forward import FeedForward
from torchtitan_graph.models.layers.hf_config import ConfigReader
from torchtitan_graph.models.layers.hf_rope import common_to_hf, read_common
from torchtitan_graph.models.layers.moe import MoE, MoEConfig
from torchtitan_graph.models.layers.rope import Scaling, rope_cos_sin
from torchtitan_graph.models.layers.stored import LLAMA_KEYS, Stored


@dataclasses.dataclass(frozen=True)
class Config:
    """`ffn_dim` is an expert's where there are experts; `top_k` of them serve a token."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    num_experts: int = 0
    top_k: int = 8
    vocab_size: int = 151936
    tied: bool = False
    head_dim: int = 128
    rope_theta: float = 1e6
    rope_scaling: Scaling | None = None
    norm_eps: float = 1e-6
    renormalize: bool = True


FLAVORS = {
    # The debug models' vocabulary is the tokenizer's.
    "debugmodel": Config(256, 8, 16, 8, 3072, vocab_size=2048),
    "debugmodel_moe": Config(256, 8, 16, 8, 768, num_experts=64, vocab_size=2048),
    "0.6B": Config(1024, 28, 16, 8, 3072, tied=True),
    "1.7B": Config(2048, 28, 16, 8, 6144, tied=True),
    "4B": Config(2560, 36, 32, 8, 9728, tied=True),
    "8B": Config(4096, 36, 32, 8, 12288),
    "14B": Config(5120, 40, 40, 8, 17408),
    "32B": Config(5120, 64, 64, 8, 25600),
    "30B-A3B": Config(2048, 48, 32, 4, 768, num_experts=128),
    "235B-A22B": Config(4096, 94, 64, 4, 1536, num_experts=128),
}

PLAN = decoder_plan(attention=Attention.PLAN, feed_forward=FeedForward.PLAN, moe=MoE.PLAN)

HF_ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")

# Our parameter -> Hugging Face's, "*" the layer number, "#" the expert's. A tied output is not stored.
HF_KEYS: dict[str, str | Stored] = {
    **LLAMA_KEYS,
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attention.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
    "layers.*.moe.router.gate.weight": "model.layers.*.mlp.gate.weight",
    "layers.*.moe.experts.w1": Stored("model.layers.*.mlp.experts.#.gate_proj.weight"),
    "layers.*.moe.experts.w2": Stored("model.layers.*.mlp.experts.#.down_proj.weight"),
    "layers.*.moe.experts.w3": Stored("model.layers.*.mlp.experts.#.up_proj.weight"),
}


def from_hf_config(raw: dict[str, Any]) -> Config:
    """Return the configuration in a config.json; raise a UserError for what Qwen3 can't express."""
    reader, defaults = ConfigReader(raw), Config(0, 0, 0, 0, 0)
    common, _ = read_common(reader)
    has_experts = "Qwen3MoeForCausalLM" in raw["architectures"]
    num_layers, num_heads = common["num_layers"], common["num_heads"]
    num_kv_heads = reader.integer("num_key_value_heads", null=num_heads)
    head_dim = reader.integer("head_dim", common["dim"] // num_heads if has_experts else defaults.head_dim)
    num_experts, top_k = 0, defaults.top_k
    if has_experts:
        num_experts = reader.num_experts("num_experts", 128, alias="num_local_experts")
        top_k = reader.integer("num_experts_per_tok", 8)
        reader.check_experts(num_experts, top_k, num_layers * num_experts)
    reader.expect_of_all("qwen3_moe" if has_experts else "qwen3")
    reader.expect("attention_bias", False)
    reader.expect("use_sliding_window", False)
    reader.expect("layer_types", ["full_attention"] * num_layers, None)
    reader.expect("decoder_sparse_step", 1)
    reader.expect("mlp_only_layers", [], None)
    reader.check_heads(num_heads, num_kv_heads, head_dim)
    return reader.build(
        Config,
        **common,
        num_kv_heads=num_kv_heads,
        ffn_dim=reader.integer("moe_intermediate_size" if has_experts else "intermediate_size"),
        num_experts=num_experts,
        top_k=top_k,
        head_dim=head_dim,
        renormalize=reader.flag("norm_topk_prob", False) if has_experts else defaults.renormalize,
    )


def to_hf_config(config: Config) -> dict[str, Any]:
    """Return a config.json, in the form of the releases."""
    architecture = ("Qwen3MoeForCausalLM", "qwen3_moe") if config.num_experts else ("Qwen3ForCausalLM", "qwen3")
    common = {
        **common_to_hf(config, *architecture),
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
        "max_position_embeddings": 40960,  # ours have no limit
        "use_sliding_window": False,
    }
    if not config.num_experts:
        return common
    return {
        **common,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.ffn_dim,
        "norm_topk_prob": config.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


class Model(Decoder):
    def __init__(self, config: Config, attn: str = "sdpa"):
        super().__init__(config, attn, [self.block(config) for _ in range(config.num_layers)])

    @staticmethod
    def block(c: Config) -> Block:
        attention = Attention(c.dim, c.num_heads, c.num_kv_heads, c.head_dim, qk_norm_eps=c.norm_eps)
        if not c.num_experts:
            return Block(c.dim, c.norm_eps, attention, FeedForward(c.dim, c.ffn_dim))
        experts = MoEConfig(c.num_experts, c.top_k, c.ffn_dim, score="softmax", renormalize=c.renormalize)
        return Block(c.dim, c.norm_eps, attention, MoE(c.dim, experts))

    def rope(self, positions_BL: Tensor) -> tuple[Tensor, Tensor]:
        return rope_cos_sin(positions_BL, self.config.head_dim, self.config.rope_theta, self.config.rope_scaling)
