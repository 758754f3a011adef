"""Llama 4, the language model: Scout and Maverick. Weights are laid out as Hugging Face's `Llama4ForCausalLM`.

Three layers of four have rotary positions and attend within chunks of a document; the fourth attends to the whole
document without positions.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchtitan_graph.errors import UserError
from torchtitan_graph.models.layers.attention import Attention
from torchtitan_graph.models.layers.decoder import Block, Decoder, decoder_plan
from torchtitan_graph.models.layers.feed_forward import FeedForward
from torchtitan_graph.models.layers.hf_config import ConfigReader
from torchtitan_graph.models.layers.hf_rope import common_to_hf, read_common
from torchtitan_graph.models.layers.masks import Rule, all_of, begins_of, chunked
from torchtitan_graph.models.layers.moe import MoE, MoEConfig
from torchtitan_graph.models.layers.rope import Llama3Scaling, Rotation, Scaling, rope_cos_sin
from torchtitan_graph.models.layers.stored import LLAMA_KEYS, Stored


@dataclasses.dataclass(frozen=True)
class Config:
    """
    ffn_dim       of an expert, and of the shared one
    dense_ffn_dim of the layers without experts
    moe_every     every `moe_every`-th layer has experts
    qk_norm       queries and keys are normalised after they are rotated
    temperature_span  how many positions make attention without positions one step sharper
    """

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int
    moe_every: int
    ffn_dim: int = 8192
    dense_ffn_dim: int = 16384
    head_dim: int = 128
    top_k: int = 1
    chunk: int = 8192
    full_every: int = 4
    qk_norm: bool = True
    temperature_span: int = 8192
    vocab_size: int = 202048
    tied: bool = False
    rope_theta: float = 500000.0
    rope_scaling: Scaling | None = None
    norm_eps: float = 1e-5


FLAVORS = {
    # The debug model's vocabulary is the tokenizer's.
    "debugmodel": Config(
        256, 6, 16, 16, 8, moe_every=2, ffn_dim=256, dense_ffn_dim=512, head_dim=16, chunk=256, vocab_size=2048
    ),
    "17Bx16E": Config(5120, 48, 40, 8, 16, moe_every=1, rope_scaling=Llama3Scaling(16.0, 1.0, 1.0)),
    "17Bx128E": Config(5120, 48, 40, 8, 128, moe_every=2, qk_norm=False),
}

PLAN = decoder_plan(attention=Attention.PLAN, feed_forward=FeedForward.PLAN, moe=MoE.PLAN)

HF_ARCHITECTURES = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")
HF_PREFIXES = ("", "language_model.")
HF_SKIPPED = ("vision_model.*", "multi_modal_projector.*")

# Our parameter -> Hugging Face's, "*" the layer number.
HF_KEYS: dict[str, str | Stored] = {
    **LLAMA_KEYS,
    "layers.*.feed_forward.w1.weight": "model.layers.*.feed_forward.gate_proj.weight",
    "layers.*.feed_forward.w2.weight": "model.layers.*.feed_forward.down_proj.weight",
    "layers.*.feed_forward.w3.weight": "model.layers.*.feed_forward.up_proj.weight",
    "layers.*.moe.router.gate.weight": "model.layers.*.feed_forward.router.weight",
    "layers.*.moe.experts.w1": Stored("model.layers.*.feed_forward.experts.gate_up_proj", transpose=True, part=(0, 2)),
    "layers.*.moe.experts.w2": Stored("model.layers.*.feed_forward.experts.down_proj", transpose=True),
    "layers.*.moe.experts.w3": Stored("model.layers.*.feed_forward.experts.gate_up_proj", transpose=True, part=(1, 2)),
    "layers.*.moe.shared_experts.w1.weight": "model.layers.*.feed_forward.shared_expert.gate_proj.weight",
    "layers.*.moe.shared_experts.w2.weight": "model.layers.*.feed_forward.shared_expert.down_proj.weight",
    "layers.*.moe.shared_experts.w3.weight": "model.layers.*.feed_forward.shared_expert.up_proj.weight",
}


def from_hf_config(raw: dict[str, Any]) -> Config:
    """Return the configuration in a config.json, of the language model or all; raise a UserError for others."""
    text = raw.get("text_config", raw)
    if not isinstance(text, dict):
        raise UserError(f"text_config = {text!r}: an object is wanted")
    reader = ConfigReader(text)
    common, _ = read_common(reader, theta=500000.0, norm_eps=1e-5)
    num_layers, num_heads = common["num_layers"], common["num_heads"]
    full_every, moe_every = reader.integer("no_rope_layer_interval", 4), reader.integer("interleave_moe_layer_step", 1)
    num_kv_heads = reader.integer("num_key_value_heads")
    num_experts, top_k = reader.num_experts("num_local_experts"), reader.integer("num_experts_per_tok")
    head_dim, rotated = reader.integer("head_dim"), _rotated_layers(num_layers, full_every)
    reader.expect_of_all("llama4_text", "llama4")
    ConfigReader(raw, problems=reader.problems).expect("tie_word_embeddings", common["tied"])
    reader.expect("attention_bias", False)
    reader.expect("attn_scale", 0.1)
    reader.expect("attn_temperature_tuning", True, 4)  # 4 is in the first releases, and means true
    reader.expect("no_rope_layers", rotated, [], None)
    reader.expect("layer_types", [("full_attention", "chunked_attention")[rotates] for rotates in rotated], None)
    reader.expect("moe_layers", list(range(moe_every - 1, num_layers, moe_every)), None)
    reader.check_heads(num_heads, num_kv_heads, head_dim)
    reader.check_experts(num_experts, top_k, num_layers * num_experts)
    return reader.build(
        Config,
        **common,
        num_kv_heads=num_kv_heads,
        num_experts=num_experts,
        moe_every=moe_every,
        ffn_dim=reader.integer("intermediate_size"),
        dense_ffn_dim=reader.integer("intermediate_size_mlp"),
        head_dim=head_dim,
        top_k=top_k,
        chunk=reader.integer("attention_chunk_size", 8192),
        full_every=full_every,
        qk_norm=reader.flag("use_qk_norm", True),
        temperature_span=reader.integer("floor_scale", 8192),
    )


def to_hf_config(config: Config) -> dict[str, Any]:
    """Return a config.json of the language model."""
    return {
        **common_to_hf(config, "Llama4ForCausalLM", "llama4_text"),
        "num_key_value_heads": config.num_kv_heads,
        "num_local_experts": config.num_experts,
        "interleave_moe_layer_step": config.moe_every,
        "intermediate_size": config.ffn_dim,
        "intermediate_size_mlp": config.dense_ffn_dim,
        "head_dim": config.head_dim,
        "num_experts_per_tok": config.top_k,
        "attention_chunk_size": config.chunk,
        "no_rope_layer_interval": config.full_every,
        "no_rope_layers": _rotated_layers(config.num_layers, config.full_every),
        "use_qk_norm": config.qk_norm,
        "floor_scale": config.temperature_span,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        # Ours have no limit; these are the releases' values: Maverick, and Scout.
        "max_position_embeddings": 1048576 if config.rope_scaling is None else 10485760,
    }


def _rotated_layers(num_layers: int, full_every: int) -> list[int]:
    """Return 1 for each layer with rotary positions, else 0, like `no_rope_layers`."""
    return [int((i + 1) % full_every != 0) for i in range(num_layers)]


class Positions(NamedTuple):
    """Cosine and sine (B, L, 1, H/2) for the layers with rotary positions; for the others a factor of the queries (B,
    L, 1, 1): attention over a long document gets sharper (https://arxiv.org/abs/2501.19399)."""

    cos: Tensor
    sin: Tensor
    sharpness: Tensor


class RotatedAttention(Attention):
    """Attention that rotates interleaved pairs, and then normalises queries and keys without weights."""

    def __init__(self, c: Config):
        super().__init__(c.dim, c.num_heads, c.num_kv_heads, c.head_dim)
        self.rotate = Rotation(interleaved=True)
        self.qk_norm = nn.RMSNorm(c.head_dim, eps=c.norm_eps, elementwise_affine=False) if c.qk_norm else None

    def placed(self, q_BLNH: Tensor, k_BLKH: Tensor, rope: Positions) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q, k = (self.rotate(x, rope.cos, rope.sin) for x in (q_BLNH, k_BLKH))
        return (q, k) if self.qk_norm is None else (self.qk_norm(q), self.qk_norm(k))


class UnplacedAttention(Attention):
    """Attention without positions; see `Positions.sharpness`."""

    def __init__(self, c: Config):
        super().__init__(c.dim, c.num_heads, c.num_kv_heads, c.head_dim)
        del self.rotate

    def placed(self, q_BLNH: Tensor, k_BLKH: Tensor, rope: Positions) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return (q_BLNH * rope.sharpness).type_as(q_BLNH), k_BLKH


class Model(Decoder):
    def __init__(self, config: Config, attn: str = "sdpa"):
        super().__init__(config, attn, [self.block(config, i) for i in range(config.num_layers)])

    @staticmethod
    def block(c: Config, index: int) -> Block:
        sees_all = (index + 1) % c.full_every == 0
        feed_forward: FeedForward | MoE = FeedForward(c.dim, c.dense_ffn_dim)
        if (index + 1) % c.moe_every == 0:
            experts = MoEConfig(
                c.num_experts, c.top_k, c.ffn_dim, score="sigmoid", score_input=True, shared_dim=c.ffn_dim
            )
            feed_forward = MoE(c.dim, experts)
        attention = UnplacedAttention(c) if sees_all else RotatedAttention(c)
        return Block(c.dim, c.norm_eps, attention, feed_forward, mask="causal" if sees_all else "chunked")

    def rope(self, positions_BL: Tensor) -> Positions:
        c = self.config
        cos, sin = rope_cos_sin(positions_BL, c.head_dim, c.rope_theta, c.rope_scaling)
        spans_BL = torch.floor((positions_BL.float() + 1) / c.temperature_span)
        return Positions(cos, sin, (0.1 * torch.log1p(spans_BL) + 1).unsqueeze(-1).unsqueeze(-1))

    def mask_rules(self, documents_BL: Tensor, positions_BL: Tensor) -> dict[str, Rule]:
        rules = super().mask_rules(documents_BL, positions_BL)
        return rules | {"chunked": all_of(rules["causal"], chunked(positions_BL, self.config.chunk))}

    def segments(self, documents_BL: Tensor, positions_BL: Tensor) -> dict[str, Tensor]:
        chunks_BL = positions_BL // self.config.chunk
        return super().segments(documents_BL, positions_BL) | {"chunked": begins_of(documents_BL, chunks_BL)}

    def num_visible(self, positions_BL: Tensor) -> dict[str, Tensor]:
        return super().num_visible(positions_BL) | {"chunked": positions_BL % self.config.chunk + 1}
