"""The config.json of released models is read, whatever else it says: as the flavour, where we have one."""

from typing import Any

import pytest

from torchtitan_graph.models import deepseek_v3, gpt_oss, llama3, llama4, qwen3
from torchtitan_graph.models.hf.architecture import family_of
from torchtitan_graph.models.layers.rope import LinearScaling, YarnScaling, yarn_magnitude

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "use_cache": True,
}
LLAMA_3 = {
    **LLAMA,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA_ROPE = {"high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
LLAMA_4 = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "boi_token_index": 200080,
    "model_type": "llama4",
    "tie_word_embeddings": False,
    "vision_config": {"model_type": "llama4_vision_model", "hidden_act": "gelu", "rope_theta": 10000},
}
LLAMA_4_TEXT = {
    "_attn_implementation_autoset": True,
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attention_dropout": 0.0,
    "attn_scale": 0.1,
    "attn_temperature_tuning": 4,
    "cache_implementation": "hybrid",
    "floor_scale": 8192,
    "for_llm_compressor": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "model_type": "llama4_text",
    "no_rope_layers": [],
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "output_router_logits": False,
    "pad_token_id": 200018,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "vocab_size": 202048,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_8B = {
    **QWEN3,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "tie_word_embeddings": False,
}
DEEPSEEK = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
}
DEEPSEEK_ROPE = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
V2 = {
    **DEEPSEEK,
    "architectures": ["DeepseekV2ForCausalLM"],
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "model_type": "deepseek_v2",
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "rope_scaling": DEEPSEEK_ROPE,
    "scoring_func": "softmax",
    "vocab_size": 102400,
}
V3 = {
    **DEEPSEEK,
    "architectures": ["DeepseekV3ForCausalLM"],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": {**DEEPSEEK_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}

RELEASES: dict[str, tuple[dict[str, Any], Any]] = {
    "Llama 3.1 8B": (
        {
            **LLAMA_3, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
            "num_hidden_layers": 32, "tie_word_embeddings": False,
            "rope_scaling": {**LLAMA_ROPE, "factor": 8.0, "rope_type": "llama3"},
        },
        llama3.FLAVORS["8B"],
    ),
    "Llama 3.2 1B": (
        {
            **LLAMA_3, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
            "num_hidden_layers": 16, "tie_word_embeddings": True,
            "rope_scaling": {**LLAMA_ROPE, "factor": 32.0, "rope_type": "llama3"},
        },
        llama3.FLAVORS["1B"],
    ),
    "LLaMA 7B, of the first year": (
        {
            **LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "max_sequence_length": 2048,
            "num_attention_heads": 32, "num_hidden_layers": 32, "pad_token_id": 0, "rms_norm_eps": 1e-06,
            "tie_word_embeddings": False, "vocab_size": 32000,
        },
        llama3.Config(4096, 32, 32, 32, 11008, 32000, rope_theta=10000.0, rope_scaling=None, norm_eps=1e-6),
    ),
    "DeepSeek-Coder 6.7B": (
        {
            **LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 16384,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1,
            "rms_norm_eps": 1e-06, "rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000,
            "tie_word_embeddings": False, "vocab_size": 32256,
        },
        llama3.Config(
            4096, 32, 32, 32, 11008, 32256, rope_theta=1e5, rope_scaling=LinearScaling(4.0), norm_eps=1e-6
        ),
    ),
    "Llama 4 Scout": (
        {
            **LLAMA_4,
            "text_config": {
                **LLAMA_4_TEXT, "interleave_moe_layer_step": 1, "max_position_embeddings": 10485760,
                "num_local_experts": 16, "use_qk_norm": True,
                "rope_scaling": {**LLAMA_ROPE, "factor": 16.0, "high_freq_factor": 1.0, "rope_type": "llama3"},
            },
        },
        llama4.FLAVORS["17Bx16E"],
    ),
    "Llama 4 Maverick": (
        {
            **LLAMA_4,
            "text_config": {
                **LLAMA_4_TEXT, "attn_temperature_tuning": True, "interleave_moe_layer_step": 2,
                "layer_types": [*["chunked_attention"] * 3, "full_attention"] * 12,
                "max_position_embeddings": 1048576, "moe_layers": list(range(1, 48, 2)),
                "no_rope_layers": [1, 1, 1, 0] * 12, "num_local_experts": 128, "rope_scaling": None,
                "use_qk_norm": False,
            },
        },
        llama4.FLAVORS["17Bx128E"],
    ),
    "Qwen3 8B": (QWEN3_8B, qwen3.FLAVORS["8B"]),
    "DeepSeek-R1 0528 Qwen3 8B": (
        {
            **QWEN3_8B,
            "rope_scaling": {
                "attn_factor": 0.8782488562869419, "factor": 4.0, "original_max_position_embeddings": 32768,
                "rope_type": "yarn",
            },
        },
        qwen3.Config(
            4096, 36, 32, 8, 12288,
            rope_scaling=YarnScaling(4.0, original_context=32768, magnitude=yarn_magnitude(4.0)),
        ),
    ),
    "Qwen3 30B-A3B": (
        {
            **QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_size": 2048,
            "intermediate_size": 6144, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
            "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
            "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
            "output_router_logits": False, "router_aux_loss_coef": 0.001, "tie_word_embeddings": False,
        },
        qwen3.FLAVORS["30B-A3B"],
    ),
    "DeepSeek-V2-Lite": (
        {
            **V2, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1,
            "n_routed_experts": 64, "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
            "q_lora_rank": None, "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy",
        },
        deepseek_v3.FLAVORS["16B"],
    ),
    "DeepSeek-V2": (
        {
            **V2, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_group": 8,
            "n_routed_experts": 160, "num_attention_heads": 128, "num_hidden_layers": 60, "num_key_value_heads": 128,
            "q_lora_rank": 1536, "routed_scaling_factor": 16.0, "topk_group": 3,
            "topk_method": "group_limited_greedy",
        },
        deepseek_v3.FLAVORS["236B"],
    ),
    "DeepSeek-V3": (V3, deepseek_v3.FLAVORS["671B"]),
    "Kimi K2": (
        {
            **V3, "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "model_type": "kimi_k2", "n_group": 1,
            "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64,
            "num_nextn_predict_layers": 0, "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1,
            "vocab_size": 163840,
            "rope_scaling": {
                **DEEPSEEK_ROPE, "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        deepseek_v3.Config(
            7168, 61, 64, 18432, 2048, 384, 8, 1, q_lora_rank=1536, route_scale=2.827, vocab_size=163840,
            rope_theta=5e4, rope_scaling=YarnScaling(32.0, beta_fast=1.0), mscale=1.0,
        ),
    ),
    "gpt-oss 20b": (
        {
            "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
            "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
            "initial_context_length": 4096, "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
            "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
            "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
            "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
            "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
            "rope_scaling": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                "rope_type": "yarn", "truncate": False,
            },
        },
        gpt_oss.FLAVORS["20b"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("release", RELEASES)
def test_a_released_config_is_read(release: str) -> None:
    raw, config = RELEASES[release]
    _, family = family_of(raw, None)
    assert family.from_hf_config(raw) == config
    assert family.from_hf_config(family.to_hf_config(config)) == config
