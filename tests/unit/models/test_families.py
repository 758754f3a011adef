"""Every family: its sizes, and its logits and all gradients against transformers' own class for it."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from reference import Results, build, gap, largest_gap, results, results_of_transformers, rope_width, tokens
from torch import Tensor

from torchtitan_graph.models.layers import attention
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.moe import Router
from torchtitan_graph.models.layers.rope import Llama3Scaling, YarnScaling, rope_frequencies, yarn_magnitude
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
# The first row of each family and flavour.
FIRST = [*{ROWS[row][:2]: row for row in reversed(ROWS)}.values()]

BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}

# By family and flavour, without vision towers and layers that predict further tokens, as transformers counts.
PARAMETERS = {
    ("llama3", "1B"): 1_235_814_400,
    ("llama3", "3B"): 3_212_749_824,
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3", "405B"): 405_853_388_800,
    ("llama4", "17Bx16E"): 107_769_861_120,
    ("llama4", "17Bx128E"): 400_711_848_960,
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "14B"): 14_768_307_200,
    ("qwen3", "32B"): 32_762_123_264,
    ("qwen3", "30B-A3B"): 30_532_122_624,
    ("qwen3", "235B-A22B"): 235_093_634_560,
    ("deepseek_v3", "16B"): 15_706_484_224,
    ("deepseek_v3", "236B"): 235_741_434_880,
    ("deepseek_v3", "671B"): 671_026_404_352,
    ("gpt_oss", "20b"): 20_914_757_184,
    ("gpt_oss", "120b"): 116_829_156_672,
}


@pytest.mark.parametrize(("name", "flavor"), PARAMETERS)
def test_a_flavour_has_the_released_models_parameters(name: str, flavor: str) -> None:
    vocabulary = load_family(name).FLAVORS[flavor].vocab_size
    model = build_model(name, flavor, "sdpa", tokenizer_vocab_size=vocabulary)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name, flavor]
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_every_flavour_is_counted_here_or_is_a_debug_model() -> None:
    flavors = {(name, flavor) for name in family_names() for flavor in load_family(name).FLAVORS}
    assert {pair for pair in flavors if not pair[1].startswith("debugmodel")} == set(PARAMETERS)


def test_every_family_is_compared_here() -> None:
    """Transformers' own models in test_transformers.py."""
    assert {name for name, _, _ in ROWS.values()} == set(family_names()) - {"transformers"}


# --- numbers ----------------------------------------------------------------------------------------------------------


def ours(row: str, attn: str = "sdpa", dtype: torch.dtype = torch.float64, **changes: Any) -> Decoder:
    name, flavor, of_row = ROWS[row]
    return build(name, flavor, attn, dtype, **{**of_row, **changes})


@cache
def theirs(row: str, dtype: torch.dtype = torch.float64) -> Results:
    return results_of_transformers(ours(row, dtype=dtype))


@pytest.mark.parametrize("attn", ["sdpa", "flex"])
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64], ids=["fp32", "fp64"]
)
@pytest.mark.parametrize("row", ROWS)
def test_logits_and_gradients_are_those_of_transformers(row: str, dtype: torch.dtype, attn: str) -> None:
    assert largest_gap(results(ours(row, attn, dtype)), theirs(row, dtype)) < BOUNDS[dtype]


@pytest.mark.parametrize(("name", "flavor"), PARAMETERS)
def test_rotary_frequencies_are_those_of_transformers_at_the_released_sizes(name: str, flavor: str) -> None:
    transformers = pytest.importorskip("transformers")
    family = load_family(name)
    released = family.FLAVORS[flavor]
    width = rope_width(released)
    # Few and narrow layers, whose heads are as wide as the release's.
    config = tiny_config(released, dim=4 * width, head_dim=width, rope_dim=width, num_layers=1, vocab_size=8)
    raw = family.to_hf_config(config)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw)).model.rotary_emb
    scaling = getattr(config, "rope_scaling", None)
    ours = rope_frequencies(width, config.rope_theta, scaling, torch.device("cpu"))
    assert torch.allclose(ours, theirs.inv_freq, rtol=1e-6, atol=0)
    assert theirs.attention_scaling == pytest.approx(scaling.magnitude if scaling else 1.0, rel=1e-12)


# --- documents --------------------------------------------------------------------------------------------------------

LENGTHS = (5, 11, 8)


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """Give one row of three documents: tokens, positions, documents."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).unsqueeze(0)
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)]).unsqueeze(0)
    return tokens(B=1, L=sum(LENGTHS)), positions, documents


def together(model: Decoder) -> Tensor:
    row, positions, documents = packed()
    return model(row, positions, model.masks(documents, positions))


def separately(model: Decoder) -> Tensor:
    return torch.cat([model(part) for part in packed()[0].split(LENGTHS, dim=1)], dim=1)


@pytest.mark.parametrize("attn", ["sdpa", "flex", "varlen"])
@pytest.mark.parametrize("row", FIRST)
def test_packed_documents_are_as_if_each_had_a_row_of_its_own(row: str, attn: str) -> None:
    if attn == "varlen" and row.startswith("gpt_oss"):
        pytest.skip("refused: windows and sinks, see test_segments.py")
    model = ours(row, attn)
    assert largest_gap(results(model, together), results(model, separately)) < 1e-12


def packed_for_transformers(config: Any) -> dict[str, Any]:
    """Write out the masks that are added to scores, by the names that transformers has for kinds of layers."""
    row, positions, documents = packed()
    q, k = torch.arange(sum(LENGTHS)).unsqueeze(1), torch.arange(sum(LENGTHS))
    seen = {"full_attention": (k <= q) & (documents == documents.T)}
    if hasattr(config, "window"):
        seen["sliding_attention"] = seen["full_attention"] & (k > q - config.window)
    if hasattr(config, "chunk"):
        seen["chunked_attention"] = seen["full_attention"] & (positions.T // config.chunk == positions // config.chunk)
    lowest = torch.finfo(torch.float64).min
    masks = {kind: torch.zeros(1, 1, *x.shape).double().masked_fill(~x, lowest) for kind, x in seen.items()}
    mask = masks if len(masks) > 1 else masks["full_attention"]
    return {"input_ids": row, "position_ids": positions, "attention_mask": mask}


@pytest.mark.parametrize("row", FIRST)
def test_packed_documents_give_what_transformers_gives_for_them(row: str) -> None:
    # For llama4's temperature transformers counts positions from the row's start: let it be constant.
    model = ours(row, temperature_span=8192)
    theirs = results_of_transformers(model, **packed_for_transformers(model.config))
    assert largest_gap(results(model, together), theirs) < 1e-10


@pytest.mark.parametrize("fault", ["one document", "boundary moved", "positions run on"])
@pytest.mark.parametrize("row", FIRST)
def test_a_mask_or_positions_that_cross_documents_are_seen(row: str, fault: str) -> None:
    model = ours(row)
    packed_tokens, positions, documents = packed()
    if fault == "one document":
        documents = torch.zeros_like(documents)
    elif fault == "boundary moved":
        documents = documents.roll(1, dims=1)
    else:
        positions = torch.arange(sum(LENGTHS)).unsqueeze(0)
    with torch.no_grad():
        changed = gap(model(packed_tokens, positions, model.masks(documents, positions)), separately(model))
    # Rotated attention knows only distances: positions that run on change nothing but the rounding of angles, kept in
    # fp32; llama4's chunks and temperature know positions.
    only_rounding = fault == "positions run on" and ROWS[row][0] != "llama4"
    assert 1e-12 < changed < 1e-5 if only_rounding else changed > 1e-3


@pytest.mark.parametrize("row", FIRST)
def test_no_token_sees_a_later_one(row: str) -> None:
    model, before = ours(row), tokens(B=1, L=12)
    after = before.clone()
    after[0, 7] = (after[0, 7] + 1) % 64
    with torch.no_grad():
        before, after = model(before), model(after)
    assert gap(after[:, :7], before[:, :7]) < 1e-12  # a product of a group's rows may round otherwise if it has more
    assert gap(after[:, 7], before[:, 7]) > 1e-3


@pytest.mark.parametrize("row", FIRST)
def test_without_positions_and_masks_every_row_is_one_document(row: str) -> None:
    model, of_rows = ours(row), tokens()
    documents, positions = torch.zeros_like(of_rows), torch.arange(of_rows.shape[1]).expand_as(of_rows)
    assert torch.equal(model(of_rows), model(of_rows, positions, model.masks(documents, positions)))


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
    patch.setattr(Router, "_choose", lambda self, leaked, is_token: choose(self, leaked - self.bias_E, is_token))


def keep_the_correction_bias_out_of_the_choice(model: Decoder, patch: MonkeyPatch) -> None:
    for layer in experts_of(model):
        layer.router.bias_E.zero_()


def pair_features_that_are_half_a_head_apart(model: Decoder, patch: MonkeyPatch) -> None:
    for layer in model.layers:
        layer.attention.rotate.interleaved = False


def reconfigure(**changes: Any) -> Callable[[Decoder, MonkeyPatch], None]:
    def fault(model: Decoder, patch: MonkeyPatch) -> None:
        for layer in experts_of(model):
            layer.config = layer.router.config = dataclasses.replace(layer.config, **changes)

    return fault


def do_not_clamp(model: Decoder, patch: MonkeyPatch) -> None:
    for layer in experts_of(model):
        layer.experts.activation.forward = lambda gate, up: gate * torch.sigmoid(1.702 * gate) * (up + 1)


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
