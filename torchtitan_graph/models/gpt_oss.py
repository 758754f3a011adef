"""gpt-oss: https://arxiv.org/abs/2508.10925. Weights are laid out as Hugging Face's `GptOssForCausalLM`."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from torchtitan_graph.models.layers.attention import Attention
from torchtitan_graph.models.layers.decoder import Block, Decoder, decoder_plan
from torchtitan_graph.models.layers.masks import Rule, all_of, sliding
from torchtitan_graph.models.layers.moe import MoE, MoEConfig
from torchtitan_graph.models.layers.rope import YarnScaling, rope_cos_sin, yarn_magnitude
from torchtitan_graph.models.layers.stored import Stored


@dataclasses.dataclass(frozen=True)
class Config:
    """`window`: how many positions the even layers see, each position's own among them."""

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
    rope_scaling: YarnScaling | None = YarnScaling(factor=32.0, truncate=False, magnitude=yarn_magnitude(32.0))
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
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.wq.bias": "model.layers.*.self_attn.q_proj.bias",
    "layers.*.attention.wk.weight": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attention.wk.bias": "model.layers.*.self_attn.k_proj.bias",
    "layers.*.attention.wv.weight": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attention.wv.bias": "model.layers.*.self_attn.v_proj.bias",
    "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.attention.wo.bias": "model.layers.*.self_attn.o_proj.bias",
    "layers.*.attention.sinks": "model.layers.*.self_attn.sinks",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.moe.router.gate.weight": "model.layers.*.mlp.router.weight",
    "layers.*.moe.router.gate.bias": "model.layers.*.mlp.router.bias",
    "layers.*.moe.experts.w1": Stored(f"{_EXPERTS}.gate_up_proj", transpose=True, part=(0, 2), interleaved=True),
    "layers.*.moe.experts.b1": Stored(f"{_EXPERTS}.gate_up_proj_bias", part=(0, 2), interleaved=True),
    "layers.*.moe.experts.w3": Stored(f"{_EXPERTS}.gate_up_proj", transpose=True, part=(1, 2), interleaved=True),
    "layers.*.moe.experts.b3": Stored(f"{_EXPERTS}.gate_up_proj_bias", part=(1, 2), interleaved=True),
    "layers.*.moe.experts.w2": Stored(f"{_EXPERTS}.down_proj", transpose=True),
    "layers.*.moe.experts.b2": f"{_EXPERTS}.down_proj_bias",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


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
