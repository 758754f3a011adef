"""DeepSeek-V2 and V3: https://arxiv.org/abs/2405.04434, https://arxiv.org/abs/2412.19437. Weights are laid out as
Hugging Face's `DeepseekV2ForCausalLM` and `DeepseekV3ForCausalLM`. Multi-token prediction is not built."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from torchtitan_graph.models.layers.decoder import Block, Decoder, decoder_plan
from torchtitan_graph.models.layers.feed_forward import FeedForward
from torchtitan_graph.models.layers.latent_attention import LatentAttention
from torchtitan_graph.models.layers.moe import MoE, MoEConfig
from torchtitan_graph.models.layers.rope import YarnScaling, rope_cos_sin, yarn_magnitude
from torchtitan_graph.models.layers.stored import Stored


@dataclasses.dataclass(frozen=True)
class Config:
    """
    ffn_dim         of the first `num_dense_layers` layers; `moe_ffn_dim` of an expert
    version         3 scores experts by sigmoid, chooses them with a correction bias, and renormalises; 2 by softmax
    num_groups, num_chosen_groups   of experts; see MoEConfig
    route_scale     multiplies the experts' scores
    mscale          YaRN's `mscale_all_dim`, and `mscale`, which is the same in every release
    """

    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    moe_ffn_dim: int
    num_experts: int
    top_k: int
    num_shared_experts: int
    num_dense_layers: int = 1
    q_lora_rank: int = 0
    kv_lora_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128
    version: int = 3
    num_groups: int = 1
    num_chosen_groups: int = 1
    route_scale: float = 1.0
    vocab_size: int = 102400
    tied: bool = False
    rope_theta: float = 10000.0
    rope_scaling: YarnScaling | None = YarnScaling(factor=40.0)
    mscale: float = 0.707
    norm_eps: float = 1e-6


FLAVORS = {
    # The debug model's vocabulary is the tokenizer's.
    "debugmodel": Config(256, 6, 16, 1024, 256, 8, 3, 2, vocab_size=2048),
    "16B": Config(2048, 27, 16, 10944, 1408, 64, 6, 2, version=2),
    "236B": Config(
        5120, 60, 128, 12288, 1536, 160, 6, 2,
        q_lora_rank=1536, version=2, num_groups=8, num_chosen_groups=3, route_scale=16.0,
    ),
    "671B": Config(
        7168, 61, 128, 18432, 2048, 256, 8, 1,
        num_dense_layers=3, q_lora_rank=1536, num_groups=8, num_chosen_groups=4, route_scale=2.5, vocab_size=129280,
        mscale=1.0,
    ),
}  # fmt: skip

PLAN = decoder_plan(attention=LatentAttention.PLAN, feed_forward=FeedForward.PLAN, moe=MoE.PLAN)

HF_ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")

# Our parameter -> Hugging Face's, "*" the layer number, "#" the expert's.
HF_KEYS: dict[str, str | Stored] = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.wq_a.weight": "model.layers.*.self_attn.q_a_proj.weight",
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_a_layernorm.weight",
    "layers.*.attention.wq_b.weight": "model.layers.*.self_attn.q_b_proj.weight",
    "layers.*.attention.wkv_a.weight": "model.layers.*.self_attn.kv_a_proj_with_mqa.weight",
    "layers.*.attention.kv_norm.weight": "model.layers.*.self_attn.kv_a_layernorm.weight",
    "layers.*.attention.wkv_b.weight": "model.layers.*.self_attn.kv_b_proj.weight",
    "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
    "layers.*.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
    "layers.*.moe.router.gate.weight": "model.layers.*.mlp.gate.weight",
    "layers.*.moe.router.bias_E": "model.layers.*.mlp.gate.e_score_correction_bias",
    "layers.*.moe.experts.w1": Stored("model.layers.*.mlp.experts.#.gate_proj.weight"),
    "layers.*.moe.experts.w2": Stored("model.layers.*.mlp.experts.#.down_proj.weight"),
    "layers.*.moe.experts.w3": Stored("model.layers.*.mlp.experts.#.up_proj.weight"),
    "layers.*.moe.shared_experts.w1.weight": "model.layers.*.mlp.shared_experts.gate_proj.weight",
    "layers.*.moe.shared_experts.w2.weight": "model.layers.*.mlp.shared_experts.down_proj.weight",
    "layers.*.moe.shared_experts.w3.weight": "model.layers.*.mlp.shared_experts.up_proj.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class Model(Decoder):
    def __init__(self, config: Config, attn: str = "sdpa"):
        super().__init__(config, attn, [self.block(config, i) for i in range(config.num_layers)])

    @staticmethod
    def block(c: Config, index: int) -> Block:
        scale = (c.nope_dim + c.rope_dim) ** -0.5
        if c.rope_scaling is not None:
            scale *= yarn_magnitude(c.rope_scaling.factor, c.mscale) ** 2
        attention = LatentAttention(
            c.dim,
            c.num_heads,
            q_lora_rank=c.q_lora_rank,
            kv_lora_rank=c.kv_lora_rank,
            nope_dim=c.nope_dim,
            rope_dim=c.rope_dim,
            v_dim=c.v_dim,
            norm_eps=c.norm_eps,
            scale=scale,
        )
        if index < c.num_dense_layers:
            return Block(c.dim, c.norm_eps, attention, FeedForward(c.dim, c.ffn_dim))
        experts = MoEConfig(
            c.num_experts,
            c.top_k,
            c.moe_ffn_dim,
            score="sigmoid" if c.version == 3 else "softmax",
            renormalize=c.version == 3,
            scale=c.route_scale,
            num_groups=c.num_groups,
            num_chosen_groups=c.num_chosen_groups,
            group_score="top2" if c.version == 3 else "max",
            correction_bias=c.version == 3,
            shared_dim=c.num_shared_experts * c.moe_ffn_dim,
        )
        return Block(c.dim, c.norm_eps, attention, MoE(c.dim, experts))

    def rope(self, positions_BL: Tensor) -> tuple[Tensor, Tensor]:
        return rope_cos_sin(positions_BL, self.config.rope_dim, self.config.rope_theta, self.config.rope_scaling)
