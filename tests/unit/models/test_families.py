"""Every family: its sizes, and its logits and all gradients against transformers' own class for it."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor

from reference import Results, build, gap, largest_gap, results, results_of_transformers, tokens
from torchtitan_graph.models.layers import attention, latent_attention
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.moe import Router
from torchtitan_graph.models.layers.rope import Llama3Scaling, YarnScaling, apply_rope, yarn_magnitude
from torchtitan_graph.models.spec import build_model, family_names, load_family, tiny_config

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


def ours(row: str, attn: str = "sdpa", dtype: torch.dtype = torch.float64, **changes: Any) -> Decoder:
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


# --- what the comparison must see -------------------------------------------------------------------------------------

CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("llama3", {"norm_eps": 2e-5}),
    ("llama3, scaled rope", {"rope_theta": 99.0}),
    ("llama3, scaled rope", {"rope_scaling": None}),
    ("qwen3", {"norm_eps": 2e-6}),
    ("qwen3 moe", {"renormalize": False}),
    ("llama4, dense and experts", {"chunk": 7}),
    ("llama4, dense and experts", {"qk_norm": False}),
    ("llama4, dense and experts", {"temperature_span": 9}),
    ("deepseek v3", {"mscale": 0.6}),
    ("deepseek v3, groups", {"route_scale": 2.4}),
    ("deepseek v3, groups", {"num_chosen_groups": 3}),
    ("deepseek v2, q_lora, groups", {"num_chosen_groups": 1}),
    ("gpt_oss", {"window": 6}),
    ("gpt_oss", {"rope_scaling": dataclasses.replace(GPT_OSS_YARN["rope_scaling"], truncate=True)}),
    ("gpt_oss", {"rope_scaling": dataclasses.replace(GPT_OSS_YARN["rope_scaling"], magnitude=1.0)}),
]


@pytest.mark.parametrize(("row", "change"), CHANGES)
def test_another_configuration_is_seen(row: str, change: dict[str, Any]) -> None:
    assert largest_gap(results(ours(row, **change)), theirs(row)) > 1e-7


def drop_the_gradient_through_the_log_sum_exp(model: Decoder, patch: MonkeyPatch) -> None:
    def faulty(*args: Any) -> tuple[Tensor, Tensor]:
        out, lse = attention_op(*args)
        return out, lse.detach()

    attention_op = attention.flex_attention_op
    patch.setattr(attention, "flex_attention_op", faulty)


def drop_the_sinks(model: Decoder, patch: MonkeyPatch) -> None:
    with torch.no_grad():
        for layer in model.layers:
            layer.attention.sinks.fill_(-1e4)


def leak_the_correction_bias_into_the_scores(model: Decoder, patch: MonkeyPatch) -> None:
    scores, choose = Router.scores, Router._choose
    patch.setattr(Router, "scores", lambda self, logits: scores(self, logits) + self.bias_E)
    patch.setattr(Router, "_choose", lambda self, leaked: choose(self, leaked - self.bias_E))


def keep_the_correction_bias_out_of_the_choice(model: Decoder, patch: MonkeyPatch) -> None:
    for layer in experts_of(model):
        layer.router.bias_E.zero_()


def pair_features_that_are_half_a_head_apart(model: Decoder, patch: MonkeyPatch) -> None:
    patch.setattr(latent_attention, "apply_rope", lambda x, cos, sin, interleaved: apply_rope(x, cos, sin))


def reconfigure(**changes: Any) -> Callable[[Decoder, MonkeyPatch], None]:
    def fault(model: Decoder, patch: MonkeyPatch) -> None:
        for layer in experts_of(model):
            layer.config = layer.router.config = dataclasses.replace(layer.config, **changes)

    return fault


def do_not_clamp(model: Decoder, patch: MonkeyPatch) -> None:
    for layer in experts_of(model):
        layer.experts.activation = lambda gate, up: gate * torch.sigmoid(1.702 * gate) * (up + 1)


def experts_of(model: Decoder) -> list[Any]:
    return [layer.moe for layer in model.layers if layer.moe is not None]


FAULTS: dict[str, tuple[str, Callable[[Decoder, MonkeyPatch], None]]] = {
    "the log-sum-exp's gradient dropped": ("gpt_oss", drop_the_gradient_through_the_log_sum_exp),
    "sinks dropped": ("gpt_oss", drop_the_sinks),
    "not clamped": ("gpt_oss", do_not_clamp),
    "softmax over all experts": ("gpt_oss", reconfigure(score="softmax")),
    "a correction bias in the weights": ("deepseek v3", leak_the_correction_bias_into_the_scores),
    "no correction bias in the choice": ("deepseek v3", keep_the_correction_bias_out_of_the_choice),
    "V3's groups scored as V2's": ("deepseek v3, groups", reconfigure(group_score="max")),
    "V2's groups scored as V3's": ("deepseek v2, q_lora, groups", reconfigure(group_score="top2")),
    "rope not interleaved": ("deepseek v3", pair_features_that_are_half_a_head_apart),
    "scores on outputs": ("llama4, dense and experts", reconfigure(score_input=False)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, monkeypatch: MonkeyPatch) -> None:
    row, commit = FAULTS[fault]
    model = ours(row, "flex")
    commit(model, monkeypatch)
    assert largest_gap(results(model), theirs(row)) > 1e-3
