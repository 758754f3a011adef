"""Every family against transformers' own class for it, logits and the gradient of every parameter."""

from functools import cache
from typing import Any

import pytest
import torch

from reference import Results, build, largest_gap, results, results_of_transformers
from torchtitan_graph.models.layers.rope import Llama3Scaling, YarnScaling, yarn_magnitude

LLAMA3_SCALING = {"rope_scaling": Llama3Scaling(factor=8.0, original_context=16), "rope_theta": 100.0}
YARN = {"factor": 8.0, "beta_fast": 4.0, "beta_slow": 0.5, "original_context": 32}
DEEPSEEK_YARN = {"rope_scaling": YarnScaling(**YARN), "rope_theta": 100.0}
GPT_OSS_YARN = {
    "rope_scaling": YarnScaling(**YARN, truncate=False, magnitude=yarn_magnitude(YARN["factor"])),
    "rope_theta": 100.0,
}
V2 = {"version": 2, "num_experts": 8, "top_k": 3}
GROUPS = {"num_experts": 12, "num_groups": 4, "num_chosen_groups": 2, "top_k": 3, "route_scale": 2.5}

# Family, flavour, and what differs from `tiny_config`'s sizes: sequences of 24 are longer than its window (7) and chunk
# (8), and attention's temperature changes within them. A new family adds its rows here.
ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama3": ("llama3", "debugmodel", {}),
    "llama3, a kv head per head": ("llama3", "debugmodel", {"num_kv_heads": 4}),
    "llama3, one kv head": ("llama3", "debugmodel", {"num_kv_heads": 1}),
    "llama3, tied": ("llama3", "debugmodel", {"tied": True}),
    "llama3, scaled rope": ("llama3", "debugmodel", {**LLAMA3_SCALING}),
    "llama3, tied, scaled rope": ("llama3", "debugmodel", {"tied": True, **LLAMA3_SCALING}),
    "qwen3": ("qwen3", "debugmodel", {}),
    "qwen3, a kv head per head": ("qwen3", "debugmodel", {"num_kv_heads": 4}),
    "qwen3, one kv head": ("qwen3", "debugmodel", {"num_kv_heads": 1}),
    "qwen3, tied": ("qwen3", "debugmodel", {"tied": True}),
    "qwen3 moe": ("qwen3", "debugmodel_moe", {}),
    "qwen3 moe, not renormalised": ("qwen3", "debugmodel_moe", {"renormalize": False, "top_k": 3}),
    "qwen3 moe, one kv head, tied": ("qwen3", "debugmodel_moe", {"num_kv_heads": 1, "tied": True}),
    "llama4, dense and experts": ("llama4", "debugmodel", {}),
    "llama4, all experts": ("llama4", "debugmodel", {"moe_every": 1, **LLAMA3_SCALING}),
    "llama4, no qk norm": ("llama4", "debugmodel", {"qk_norm": False, "num_kv_heads": 4}),
    "llama4, two experts per token, tied": ("llama4", "debugmodel", {"top_k": 2, "tied": True, "moe_every": 1}),
    "deepseek v3": ("deepseek_v3", "debugmodel", {**DEEPSEEK_YARN}),
    "deepseek v3, q_lora": ("deepseek_v3", "debugmodel", {"q_lora_rank": 20, "mscale": 1.0, **DEEPSEEK_YARN}),
    "deepseek v3, groups": ("deepseek_v3", "debugmodel", {**GROUPS, **DEEPSEEK_YARN}),
    "deepseek v3, plain rope, tied": ("deepseek_v3", "debugmodel", {"rope_scaling": None, "tied": True}),
    "deepseek v2": ("deepseek_v3", "debugmodel", {**V2, **DEEPSEEK_YARN}),
    "deepseek v2, q_lora, groups": ("deepseek_v3", "debugmodel", {**V2, **GROUPS, "q_lora_rank": 20, **DEEPSEEK_YARN}),
    "gpt_oss": ("gpt_oss", "debugmodel", {**GPT_OSS_YARN}),
    "gpt_oss, one kv head": ("gpt_oss", "debugmodel", {"num_kv_heads": 1, "top_k": 3, **GPT_OSS_YARN}),
    "gpt_oss, window of one": ("gpt_oss", "debugmodel", {"window": 1, **GPT_OSS_YARN}),
    "gpt_oss, plain rope, tied": ("gpt_oss", "debugmodel", {"rope_scaling": None, "tied": True}),
}
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}


def ours(row: str, attn: str = "sdpa", dtype: torch.dtype = torch.float64, **changes: Any):
    name, flavor, of_row = ROWS[row]
    return build(name, flavor, attn, dtype, **{**of_row, **changes})


@cache
def theirs(row: str, dtype: torch.dtype = torch.float64) -> Results:
    return results_of_transformers(ours(row, dtype=dtype))


@pytest.mark.parametrize("attn", ["sdpa", "flex"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=["fp32", "fp64"])
@pytest.mark.parametrize("row", ROWS)
def test_logits_and_gradients_are_those_of_transformers(row: str, dtype: torch.dtype, attn: str) -> None:
    assert largest_gap(results(ours(row, attn, dtype)), theirs(row, dtype)) < BOUNDS[dtype]
