"""gpt-oss: https://arxiv.org/abs/2508.10925. Weights are laid out as Hugging Face's `GptOssForCausalLM`."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from torchtitan_graph.models.layers.attention import Attention
from torchtitan_graph.models.layers.decoder import Block, Decoder, decoder_plan
from torchtitan_graph.models.layers.hf_config import ConfigReader
from torchtitan_graph.models.layers.hf_rope import common_to_hf, read_common, scaling_to_hf
from torchtitan_graph.models.layers.masks import Rule, all_of, sliding
from torchtitan_graph.models.layers.moe import MoE, MoEConfig
from torchtitan_graph.models.layers.rope import Scaling, YarnScaling, rope_cos_sin, yarn_magnitude
from torchtitan_graph.models.layers.stored import LLAMA_KEYS, Stored


@dataclasses.dataclass(frozen=True)
class Config:
    """`window`: number of positions that the even layers see, each position's own among them."""

    dim: int
    num_layers: int
    num_experts: int
    num_heads: int = 64
    num_kv_heads: int = 8
    head_dim: int = 64
    ffn_dim: int = 2880
    top_k: int = 4
    window: int = 128
    vocab_size: int = 201088
    tied: bool = False
    rope_theta: float = 150000.0
    rope_scaling: Scaling | None = YarnScaling(factor=32.0, truncate=False, magnitude=yarn_magnitude(32.0))
    norm_eps: float = 1e-5


FLAVORS = {
    # The debug model's vocabulary is the tokenizer's.
    "debugmodel": Config(256, 4, 8, vocab_size=2048),
    "20b": Config(2880, 24, 32),
    "120b": Config(2880, 36, 128),
}

PLAN = decoder_plan(attention=Attention.PLAN, moe=MoE.PLAN)

HF_ARCHITECTURES = ("GptOssForCausalLM",)

_EXPERTS = "model.layers.*.mlp.experts"

# Our parameter -> Hugging Face's, "*" the layer number.
HF_KEYS: dict[str, str | Stored] = {
    **LLAMA_KEYS,
    "layers.*.attention.wq.bias": "model.layers.*.self_attn.q_proj.bias",
    "layers.*.attention.wk.bias": "model.layers.*.self_attn.k_proj.bias",
    "layers.*.attention.wv.bias": "model.layers.*.self_attn.v_proj.bias",
    "layers.*.attention.wo.bias": "model.layers.*.self_attn.o_proj.bias",
    "layers.*.attention.sinks": "model.layers.*.self_attn.sinks",
    "layers.*.moe.router.gate.weight": "model.layers.*.mlp.router.weight",
    "layers.*.moe.router.gate.bias": "model.layers.*.mlp.router.bias",
    "layers.*.moe.experts.w1": Stored(f"{_EXPERTS}.gate_up_proj", transpose=True, part=(0, 2), interleaved=True),
    "layers.*.moe.experts.b1": Stored(f"{_EXPERTS}.gate_up_proj_bias", part=(0, 2), interleaved=True),
    "layers.*.moe.experts.w3": Stored(f"{_EXPERTS}.gate_up_proj", transpose=True, part=(1, 2), interleaved=True),
    "layers.*.moe.experts.b3": Stored(f"{_EXPERTS}.gate_up_proj_bias", part=(1, 2), interleaved=True),
    "layers.*.moe.experts.w2": Stored(f"{_EXPERTS}.down_proj", transpose=True),
    "layers.*.moe.experts.b2": f"{_EXPERTS}.down_proj_bias",
}


def from_hf_config(raw: dict[str, Any]) -> Config:
    """Return the configuration in a config.json; raise a UserError for what gpt-oss can't express."""
    reader = ConfigReader(raw)
    # Without a value, transformers also defaults to the releases' scaling.
    common, _ = read_common(reader, theta=150000.0, norm_eps=1e-5, implied=scaling_to_hf(Config.rope_scaling))
    num_layers, num_heads, head_dim = common["num_layers"], common["num_heads"], reader.integer("head_dim")
    num_kv_heads = reader.integer("num_key_value_heads")
    num_experts = reader.num_experts("num_local_experts", alias="num_experts")
    top_k = reader.integer("num_experts_per_tok", alias="experts_per_token")
    reader.expect_of_all("gpt_oss")
    reader.expect("attention_bias", True)
    reader.expect("swiglu_limit", 7.0)
    reader.expect("swiglu_alpha", 1.702)
    reader.expect("layer_types", _layer_types(num_layers), None)
    reader.check_heads(num_heads, num_kv_heads, head_dim)
    reader.check_experts(num_experts, top_k, num_layers * num_experts)
    return reader.build(
        Config,
        **common,
        num_experts=num_experts,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_dim=reader.integer("intermediate_size"),
        top_k=top_k,
        window=reader.integer("sliding_window"),
    )


def to_hf_config(config: Config) -> dict[str, Any]:
    """Return a config.json, in the form of the releases."""
    return {
        **common_to_hf(config, "GptOssForCausalLM", "gpt_oss"),
        "num_local_experts": config.num_experts,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
        "num_experts_per_tok": config.top_k,
        "sliding_window": config.window,
        "layer_types": _layer_types(config.num_layers),
        "rope_scaling": scaling_to_hf(config.rope_scaling) or {"rope_type": "default"},
        "max_position_embeddings": 131072,  # ours have no limit
        "attention_bias": True,
        "swiglu_limit": 7.0,
    }


def _layer_types(num_layers: int) -> list[str]:
    return ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]


class Model(Decoder):
    def __init__(self, config: Config, attn: str = "sdpa"):
        super().__init__(config, attn, [self.block(config, i) for i in range(config.num_layers)])

    @staticmethod
    def block(c: Config, index: int) -> Block:
        experts = MoEConfig(
            c.num_experts, c.top_k, c.ffn_dim, score="softmax_of_chosen", biased=True, clamped_swiglu=True
        )
        return Block(
            c.dim,
            c.norm_eps,
            Attention(c.dim, c.num_heads, c.num_kv_heads, c.head_dim, bias=True, sinks=True),
            MoE(c.dim, experts),
            mask="causal" if index % 2 else "sliding",
        )

    def rope(self, positions_BL: Tensor) -> tuple[Tensor, Tensor]:
        return rope_cos_sin(positions_BL, self.config.head_dim, self.config.rope_theta, self.config.rope_scaling)

    def mask_rules(self, documents_BL: Tensor, positions_BL: Tensor) -> dict[str, Rule]:
        rules = super().mask_rules(documents_BL, positions_BL)
        return rules | {"sliding": all_of(rules["causal"], sliding(self.config.window))}

    def segments(self, documents_BL: Tensor, positions_BL: Tensor) -> dict[str, Tensor]:
        segments = super().segments(documents_BL, positions_BL)
        return segments | {"sliding": segments["causal"]}

    def windows(self) -> dict[str, int]:
        return {"sliding": self.config.window}

    def num_visible(self, positions_BL: Tensor) -> dict[str, Tensor]:
        numbers = super().num_visible(positions_BL)
        return numbers | {"sliding": numbers["causal"].clamp(max=self.config.window)}
