"""DeepSeek-V2 and V3: https://arxiv.org/abs/2405.04434, https://arxiv.org/abs/2412.19437. Weights are laid out as
Hugging Face's `DeepseekV2ForCausalLM` and `DeepseekV3ForCausalLM`."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from torchtitan_graph.models.layers.decoder import AheadBlock, Block, Decoder, decoder_plan
from torchtitan_graph.models.layers.feed_forward import FeedForward
from torchtitan_graph.models.layers.hf_config import ConfigReader
from torchtitan_graph.models.layers.hf_rope import common_to_hf, read_common, scaling_to_hf
from torchtitan_graph.models.layers.latent_attention import LatentAttention
from torchtitan_graph.models.layers.moe import MoE, MoEConfig
from torchtitan_graph.models.layers.rope import Scaling, YarnScaling, rope_cos_sin, yarn_magnitude
from torchtitan_graph.models.layers.stored import LLAMA_KEYS, Stored


@dataclasses.dataclass(frozen=True)
class Config:
    """
    ffn_dim         of the first `num_dense_layers` layers; `moe_ffn_dim` of an expert
    version         3 scores experts by sigmoid, chooses them with a correction bias, and renormalises; 2 by softmax
    num_groups, num_chosen_groups   of experts; see MoEConfig
    route_scale     multiplies the experts' scores
    mscale          YaRN's `mscale_all_dim`; 0: attention's scale is not corrected
    num_mtp_layers  layers that each predict one more token in training; they follow the others
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
    rope_scaling: Scaling | None = YarnScaling(factor=40.0)
    mscale: float = 0.707
    norm_eps: float = 1e-6
    num_mtp_layers: int = 0


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
    **LLAMA_KEYS,
    "layers.*.attention.wq_a.weight": "model.layers.*.self_attn.q_a_proj.weight",
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_a_layernorm.weight",
    "layers.*.attention.wq_b.weight": "model.layers.*.self_attn.q_b_proj.weight",
    "layers.*.attention.wkv_a.weight": "model.layers.*.self_attn.kv_a_proj_with_mqa.weight",
    "layers.*.attention.kv_norm.weight": "model.layers.*.self_attn.kv_a_layernorm.weight",
    "layers.*.attention.wkv_b.weight": "model.layers.*.self_attn.kv_b_proj.weight",
    "layers.*.moe.router.gate.weight": "model.layers.*.mlp.gate.weight",
    "layers.*.moe.router.bias_E": "model.layers.*.mlp.gate.e_score_correction_bias",
    "layers.*.moe.experts.w1": Stored("model.layers.*.mlp.experts.#.gate_proj.weight"),
    "layers.*.moe.experts.w2": Stored("model.layers.*.mlp.experts.#.down_proj.weight"),
    "layers.*.moe.experts.w3": Stored("model.layers.*.mlp.experts.#.up_proj.weight"),
    "layers.*.moe.shared_experts.w1.weight": "model.layers.*.mlp.shared_experts.gate_proj.weight",
    "layers.*.moe.shared_experts.w2.weight": "model.layers.*.mlp.shared_experts.down_proj.weight",
    "layers.*.moe.shared_experts.w3.weight": "model.layers.*.mlp.shared_experts.up_proj.weight",
    "layers.*.enorm.weight": "model.layers.*.enorm.weight",
    "layers.*.hnorm.weight": "model.layers.*.hnorm.weight",
    "layers.*.eh_proj.weight": "model.layers.*.eh_proj.weight",
    "layers.*.norm.weight": "model.layers.*.shared_head.norm.weight",
}


# The multi-token-prediction layers, where `model.num_mtp_layers` leaves them out; and their copies of shared weights.
HF_SKIPPED = (
    "model.layers.{num_layers}.*",
    "model.layers.*.embed_tokens.weight",
    "model.layers.*.shared_head.head.weight",
)


def from_hf_config(raw: dict[str, Any]) -> Config:
    """Return the configuration in a config.json; raise a UserError for what DeepSeek-V2 and V3 can't express."""
    reader = ConfigReader(raw)
    common, mscale = read_common(reader)
    is_v3 = "DeepseekV3ForCausalLM" in raw["architectures"]
    num_layers, num_heads, rope_dim = common["num_layers"], common["num_heads"], reader.integer("qk_rope_head_dim")
    num_experts = reader.num_experts("n_routed_experts", alias="num_local_experts" if is_v3 else "num_experts")
    top_k, (num_groups, num_chosen_groups) = reader.integer("num_experts_per_tok"), _groups(reader, is_v3)
    _expect_constants(reader, is_v3)
    reader.expect("num_key_value_heads", num_heads, None)
    reader.expect("head_dim", rope_dim)
    reader.check_heads(num_heads, num_heads, rope_dim)
    reader.check_experts(num_experts // num_groups * num_chosen_groups, top_k, num_layers * num_experts)
    reader.need(num_experts % num_groups == 0, f"n_group = {num_groups} must divide n_routed_experts = {num_experts}")
    reader.need(num_chosen_groups <= num_groups, f"topk_group = {num_chosen_groups}: there are {num_groups} groups")
    reader.need(not is_v3 or num_experts >= 2 * num_groups, f"n_group = {num_groups}: groups have two experts or more")
    return reader.build(
        Config,
        **common,
        ffn_dim=reader.integer("intermediate_size"),
        moe_ffn_dim=reader.integer("moe_intermediate_size"),
        num_experts=num_experts,
        top_k=top_k,
        num_shared_experts=reader.integer("n_shared_experts"),
        num_dense_layers=reader.integer("first_k_dense_replace", least=0),
        q_lora_rank=reader.integer("q_lora_rank", null=0),
        kv_lora_rank=reader.integer("kv_lora_rank"),
        nope_dim=reader.integer("qk_nope_head_dim"),
        rope_dim=rope_dim,
        v_dim=reader.integer("v_head_dim"),
        version=3 if is_v3 else 2,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        route_scale=reader.number("routed_scaling_factor", 2.5 if is_v3 else 1.0),
        mscale=mscale if common["rope_scaling"] else Config.mscale,
    )


def _groups(reader: ConfigReader, is_v3: bool) -> tuple[int, int]:
    """Return the number of expert groups, and the number that a token's experts are chosen from."""
    method = reader.raw.get("topk_method", "noaux_tc" if is_v3 else "greedy")
    reader.expect("topk_method", *(["noaux_tc"] if is_v3 else ["greedy", "group_limited_greedy"]))
    return (1, 1) if method == "greedy" else (reader.integer("n_group"), reader.integer("topk_group"))


def _expect_constants(reader: ConfigReader, is_v3: bool) -> None:
    reader.expect_of_all(*(["deepseek_v3", "kimi_k2"] if is_v3 else ["deepseek_v2"]))
    reader.expect("attention_bias", False)
    reader.expect("mlp_bias", False)
    reader.expect("moe_layer_freq", 1)
    reader.expect("scoring_func", "sigmoid" if is_v3 else "softmax")
    reader.expect("norm_topk_prob", is_v3)
    reader.expect("rope_interleave", True)


def to_hf_config(config: Config) -> dict[str, Any]:
    """Return a config.json, in the form of the releases."""
    is_v3 = config.version == 3
    return {
        **common_to_hf(config, f"DeepseekV{config.version}ForCausalLM", f"deepseek_v{config.version}"),
        "num_nextn_predict_layers": config.num_mtp_layers,
        "num_key_value_heads": config.num_heads,
        "intermediate_size": config.ffn_dim,
        "moe_intermediate_size": config.moe_ffn_dim,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "n_shared_experts": config.num_shared_experts,
        "first_k_dense_replace": config.num_dense_layers,
        "moe_layer_freq": 1,
        "q_lora_rank": config.q_lora_rank or None,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.nope_dim,
        "qk_rope_head_dim": config.rope_dim,
        "v_head_dim": config.v_dim,
        "n_group": config.num_groups,
        "topk_group": config.num_chosen_groups,
        "topk_method": "noaux_tc" if is_v3 else "group_limited_greedy" if config.num_groups > 1 else "greedy",
        "scoring_func": "sigmoid" if is_v3 else "softmax",
        "norm_topk_prob": is_v3,
        "routed_scaling_factor": config.route_scale,
        "rope_scaling": scaling_to_hf(config.rope_scaling, config.mscale),
        "max_position_embeddings": 163840,  # ours have no limit
    }


class Model(Decoder):
    def __init__(self, config: Config, attn: str = "sdpa"):
        super().__init__(
            config, attn, [self.block(config, i) for i in range(config.num_layers + config.num_mtp_layers)]
        )

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
            scale=scale,
        )
        kind = AheadBlock if index >= c.num_layers else Block
        if index < c.num_dense_layers:
            return kind(c.dim, c.norm_eps, attention, FeedForward(c.dim, c.ffn_dim))
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
        return kind(c.dim, c.norm_eps, attention, MoE(c.dim, experts))

    def rope(self, positions_BL: Tensor) -> tuple[Tensor, Tensor]:
        return rope_cos_sin(positions_BL, self.config.rope_dim, self.config.rope_theta, self.config.rope_scaling)
