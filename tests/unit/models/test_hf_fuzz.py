"""Random config.json files, keys dropped, null or contradicting: the model is transformers', or the file is refused.

transformers builds a tiny model with random weights and saves it; its config.json is changed, and both load the folder.
Where transformers can't load it, we may load or refuse it, but not crash otherwise.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from reference import gap, in_double, rope_width, tokens

from torchtitan_graph.errors import UserError
from torchtitan_graph.models import llama3
from torchtitan_graph.models.hf import from_hf, new_model, to_hf
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.rope import rope_frequencies

transformers = pytest.importorskip("transformers")

Raw = dict[str, Any]

SIZES: Raw = {
    "vocab_size": [64],
    "hidden_size": [32],
    "num_hidden_layers": [3],
    "num_attention_heads": [4],
    "intermediate_size": [16, 48],
    "max_position_embeddings": [64],
    "rms_norm_eps": [1e-6, 1e-5, 1e-3],
    "tie_word_embeddings": [False, False, True],
}
GROUPED: Raw = {"num_key_value_heads": [1, 2, 4]}
HEADS: Raw = {**GROUPED, "head_dim": [8, 12]}
LATENT: Raw = {
    "kv_lora_rank": [24],
    "q_lora_rank": [None, 20],
    "qk_nope_head_dim": [8],
    "qk_rope_head_dim": [8, 16],
    "v_head_dim": [12],
    "moe_intermediate_size": [16],
    "n_routed_experts": [8, 12],
    "num_experts_per_tok": [2, 3],
    "n_shared_experts": [1, 2],
    "first_k_dense_replace": [0, 1],
    "n_group": [1, 2, 4],
    "topk_group": [1, 2],
    "routed_scaling_factor": [1.0, 2.5],
    "num_key_value_heads": [4],
}

# By transformers' model_type: the sizes to draw from.
DRAWN: dict[str, Raw] = {
    "llama": {**SIZES, **GROUPED},
    "llama4_text": {
        **SIZES,
        **HEADS,
        "intermediate_size_mlp": [48],
        "num_local_experts": [4, 6],
        "num_experts_per_tok": [1, 2],
        "interleave_moe_layer_step": [1, 2],
        "no_rope_layer_interval": [2, 3, 4],
        "attention_chunk_size": [8],
        "floor_scale": [8],
        "use_qk_norm": [True, False],
    },
    "qwen3": {**SIZES, **HEADS},
    "qwen3_moe": {
        **SIZES,
        **HEADS,
        "moe_intermediate_size": [16],
        "num_experts": [4, 6],
        "num_experts_per_tok": [1, 2],
        "norm_topk_prob": [True, False],
    },
    "deepseek_v2": {**SIZES, **LATENT, "topk_method": ["greedy", "group_limited_greedy"]},
    "deepseek_v3": {**SIZES, **LATENT},
    "gpt_oss": {**SIZES, **HEADS, "num_local_experts": [4, 6], "num_experts_per_tok": [1, 3], "sliding_window": [1, 7]},
}

ARCHITECTURES = {
    "llama": ["LlamaForCausalLM"],
    "llama4_text": ["Llama4ForCausalLM"],
    "qwen3": ["Qwen3ForCausalLM"],
    "qwen3_moe": ["Qwen3MoeForCausalLM"],
    "deepseek_v2": ["DeepseekV2ForCausalLM"],
    "deepseek_v3": ["DeepseekV3ForCausalLM"],
    "gpt_oss": ["GptOssForCausalLM"],
}

# What a key is changed to; the keys that a model hasn't are put beside its own. Weights keep their shapes.
CHANGES: Raw = {
    "attention_bias": [True, False],
    "attention_chunk_size": [5, None],
    "attention_dropout": [0.0, 0.1],
    "attn_scale": [0.2],
    "attn_temperature_tuning": [False, 4],
    "decoder_sparse_step": [1, 2],
    "floor_scale": [3],
    "head_dim": [4, 8, None],
    "hidden_act": ["silu", "swish", "gelu"],
    "is_causal": [True, False],
    "layer_types": [None, ["full_attention"] * 3, ["chunked_attention"] * 3, ["sliding_attention"] * 3],
    "max_position_embeddings": [16, 32, 1024],
    "max_window_layers": [1],
    "mlp_bias": [True, False],
    "mlp_only_layers": [[], [0], None],
    "model_type": ["llama", "qwen3", "deepseek_v2", "deepseek_v3"],
    "moe_layer_freq": [1, 2],
    "moe_layers": [None, [], [0, 1, 2]],
    "n_group": [1, 2, None],
    "no_rope_layers": [None, [], [1, 1, 1], [1, 0, 1], [0, 1, 1]],
    "norm_topk_prob": [True, False, None],
    "num_experts": [4, 8],
    "num_local_experts": [4, 8],
    "num_experts_per_tok": [1, 2, 9],
    "num_key_value_heads": [2, 4, None],
    "original_max_position_embeddings": [8, 16, 4096, None],
    "partial_rotary_factor": [1.0, 0.5, None],
    "pretraining_tp": [2],
    "rms_norm_eps": [1e-6, 1e-4, 1e-2],
    "rope_interleave": [True, False, None],
    "rope_theta": [100.0, 10000, None],
    "routed_scaling_factor": [1.5],
    "scoring_func": ["softmax", "sigmoid"],
    "sliding_window": [3, 5, None],
    "swiglu_alpha": [1.702, 1.5],
    "swiglu_limit": [7.0, 1.0],
    "tie_word_embeddings": [True, False],
    "topk_group": [1, 2, None],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc", None],
    "use_qk_norm": [True, False],
    "use_sliding_window": [True, False],
}
ODD = [None, 0, -1, 1.5, "x", True, [], {}]

ROPE: dict[str, Raw] = {
    "default": {},
    "linear": {"factor": [2.0, 4]},
    "dynamic": {"factor": [2.0]},
    "yarn": {
        "factor": [4.0, 40, 1.0],
        "original_max_position_embeddings": [8, 64],
        "beta_fast": [32, 8.0, 0],
        "beta_slow": [1, 2.0],
        "mscale": [1.0, 0.707, 0],
        "mscale_all_dim": [1.0, 0.707, 0],
        "attention_factor": [1.0, 1.3],
        "truncate": [True, False],
    },
    "llama3": {
        "factor": [8.0, 32],
        "low_freq_factor": [1.0, 2.0],
        "high_freq_factor": [4.0, 1.0],
        "original_max_position_embeddings": [8, 16],
    },
    "longrope": {"short_factor": [[1.0] * 4], "long_factor": [[2.0] * 4], "original_max_position_embeddings": [8]},
}
# What makes a scaling's parameters whole, and is dropped more seldom.
NEEDED = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


def rope(rng: random.Random) -> Raw:
    """Draw keys that say how positions are rotated, in the old form, the new, or both."""
    kind = rng.choice([*ROPE, "default", "yarn", "yarn", "llama3"])
    parameters = {key: rng.choice(values) for key, values in ROPE[kind].items()}
    parameters = {key: x for key, x in parameters.items() if rng.random() < (0.95 if key in NEEDED else 0.5)}
    if parameters and rng.random() < 0.1:
        parameters[rng.choice(list(parameters))] = rng.choice(ODD)
    if kind != "default" or rng.random() < 0.3:
        parameters["type" if rng.random() < 0.3 else "rope_type"] = kind
    theta = {"rope_theta": rng.choice([100.0, 10000, 5e5])} if rng.random() < 0.8 else {}
    form = rng.choice(["old", "new", "new", "both"])
    if form == "new":
        return {"rope_parameters": {**parameters, **theta}}
    old = {"rope_scaling": parameters or rng.choice([None, {}]), **theta}
    return old if form == "old" else {**old, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}


def changed(raw: Raw, rng: random.Random) -> Raw:
    """Change how positions are rotated, and up to three keys."""
    raw = {key: value for key, value in raw.items() if key != "rope_parameters"}
    raw |= rope(rng) if rng.random() < 0.9 else {}
    # What belongs to the family is changed more often than what doesn't.
    likely = [*CHANGES, *[key for key in CHANGES if key in raw] * 3]
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        how = rng.random()
        if how < 0.7:
            key = rng.choice(likely)
            raw[key] = rng.choice(CHANGES[key])
        elif how < 0.9:
            raw.pop(rng.choice([key for key in raw if key != "architectures"]))
        else:
            raw[rng.choice([key for key in raw if key != "architectures"])] = rng.choice(ODD)
    return raw


def save(model_type: str, rng: random.Random, folder: Path, **only: Any) -> Raw:
    """Save a model of transformers', drawn by `rng`, some sizes `only` of those; return its config.json."""
    sizes = {key: rng.choice(values) for key, values in {**DRAWN[model_type], **only}.items()}
    config = transformers.AutoConfig.for_model(model_type, pad_token_id=None, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            scale = 0.3 if "norm" in name or tensor.dim() == 1 else tensor.shape[-1] ** -0.5
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale + ("norm" in name))
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def loaded_by_transformers(folder: Path) -> Any:
    """Give transformers' model, or None where it fails, or leaves tensors as they are drawn."""
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",  # the others have no fp64
            output_loading_info=True,
        )
        model(input_ids=tokens())
    except Exception:
        return None
    return None if info["missing_keys"] or info["mismatched_keys"] else model


@torch.no_grad()
def difference(ours: Decoder, theirs: Any) -> float:
    """Compare logits; and rotary frequencies, which are fp32's, by themselves."""
    config = ours.config
    scaling = getattr(config, "rope_scaling", None)
    frequencies = rope_frequencies(rope_width(config), config.rope_theta, scaling, torch.device("cpu"))
    if not torch.allclose(theirs.model.rotary_emb.inv_freq, frequencies, rtol=1e-5, atol=0):
        return float("inf")
    return gap(ours(tokens()), in_double(theirs, config)(input_ids=tokens()).logits)


def outcome(folder: Path) -> str:
    """Say "equal", "refused" or "transformers fails"; raise an error for all else."""
    try:
        ours = from_hf(folder, torch.float64)
    except UserError as error:
        assert "legal is ;" not in f"{error};", error
        return "refused"
    ours(tokens())
    theirs = loaded_by_transformers(folder)
    if theirs is None:
        return "transformers fails"
    assert difference(ours, theirs) < 1e-12
    return "equal"


def case(model_type: str, seed: int, folder: Path) -> str:
    """Draw a case and give its outcome."""
    rng = random.Random(f"{model_type} {seed}")
    raw = changed(save(model_type, rng, folder), rng)
    (folder / "config.json").write_text(json.dumps(raw))
    return outcome(folder)


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 105), marks=pytest.mark.slow)], ids=["5", "100"])
@pytest.mark.parametrize("model_type", DRAWN)
def test_a_random_config_is_transformers_model_or_refused(model_type: str, seeds: range, tmp_path: Path) -> None:
    faults, outcomes = [], []
    for seed in seeds:
        try:
            outcomes.append(case(model_type, seed, tmp_path / str(seed)))
        except Exception as error:
            faults.append(f"{tmp_path / str(seed)}: {type(error).__name__}: {error}")
    assert not faults, "\n".join(faults)
    assert outcomes.count("equal") >= len(seeds) // 5, outcomes


@pytest.mark.parametrize("model_type", DRAWN)
def test_an_unchanged_config_is_equal(model_type: str, tmp_path: Path) -> None:
    save(model_type, random.Random(0), tmp_path)
    assert outcome(tmp_path) == "equal"


# --- what was wrong once ----------------------------------------------------------------------------------------------

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 8}
CONTEXT_8, CONTEXT_64 = ({"original_max_position_embeddings": n} for n in (8, 64))
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# Sizes that a model is saved with, and what its config.json is changed to.
EQUAL: dict[str, tuple[str, Raw, Raw]] = {
    "V2's latent norms": ("deepseek_v2", {"q_lora_rank": [20]}, {"rms_norm_eps": 1e-3}),
    "V3's latent norms": ("deepseek_v3", {"q_lora_rank": [20]}, {"rms_norm_eps": 1e-3}),
    "no mscale": ("deepseek_v3", {}, {"rope_scaling": YARN}),
    "mscale alone": ("deepseek_v3", {}, {"rope_scaling": {**YARN, "mscale": 0.7}}),
    "mscale_all_dim alone": ("deepseek_v2", {}, {"rope_scaling": {**YARN, "mscale_all_dim": 0.7}}),
    "mscales that differ": ("deepseek_v3", {}, {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}),
    "mscales of zero": ("deepseek_v2", {}, {"rope_scaling": {**YARN, "mscale": 0, "mscale_all_dim": 0}}),
    "null mscales": ("deepseek_v3", {}, {"rope_scaling": {**YARN, "mscale": None, "mscale_all_dim": None}}),
    "attention_factor": ("deepseek_v3", {}, {"rope_scaling": {**YARN, "mscale": 1.0, "attention_factor": 1.3}}),
    "gpt_oss with mscales": ("gpt_oss", {}, {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}),
    "gpt_oss with attention_factor": ("gpt_oss", {}, {"rope_scaling": {**YARN, "attention_factor": 1.3}}),
    "gpt_oss with empty parameters": ("gpt_oss", {}, {"rope_parameters": {}}),
    "groups that greedy ignores": ("deepseek_v2", {"n_group": [4], "topk_group": [1], "topk_method": ["greedy"]}, {}),
    "V2's own topk_method": ("deepseek_v2", {"n_group": [4], "topk_group": [1]}, {"topk_method": ...}),
    "V3's own scale": ("deepseek_v3", {"routed_scaling_factor": [2.5]}, {"routed_scaling_factor": ...}),
    "context beside the scaling": ("llama", {}, {**CONTEXT_8, "rope_scaling": {**LLAMA3, **CONTEXT_64}}),
    "context beside, gpt_oss": ("gpt_oss", {}, {**CONTEXT_8, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "context of the positions": ("llama", {}, {"rope_scaling": LLAMA3, "max_position_embeddings": 32}),
    "both forms": ("llama", {}, {"rope_scaling": {**LLAMA3, **CONTEXT_8}, "rope_parameters": {"rope_theta": 7.0}}),
    "low above high": ("llama", {}, {"rope_scaling": {**LLAMA3, **CONTEXT_8, "low_freq_factor": 5.0}}),
    "linear": ("llama", {}, {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 100000}),
    "qwen3 with YaRN": ("qwen3", {}, {"rope_scaling": {**YARN, "attn_factor": 0.8}}),
    "Qwen3-MoE's width of heads": ("qwen3_moe", {"head_dim": [8]}, {"head_dim": ...}),
    "one name of the experts' number": (
        "qwen3_moe", {"num_experts": [4]}, {"num_experts": ..., "num_local_experts": 4},
    ),
}  # fmt: skip


def saved(name: str, sizes: Raw, changes: Raw, folder: Path) -> None:
    raw = save(name, random.Random(0), folder, **sizes)
    raw = {key: value for key, value in raw.items() if key != "rope_parameters"} | changes
    (folder / "config.json").write_text(json.dumps({key: x for key, x in raw.items() if x is not ...}))


@pytest.mark.parametrize("what", EQUAL)
def test_a_config_that_was_misread_is_equal(what: str, tmp_path: Path) -> None:
    saved(*EQUAL[what], tmp_path)
    assert outcome(tmp_path) == "equal"
    # What is read survives being written again.
    model = from_hf(tmp_path, torch.float64)
    to_hf(model, tmp_path / "again")
    assert from_hf(tmp_path / "again", torch.float64).config == model.config


REFUSED: dict[str, tuple[str, Raw, str]] = {
    "layers that all rotate": ("llama4_text", {"layer_types": ["chunked_attention"] * 3}, "layer_types = "),
    "a null base": ("llama", {"rope_theta": None}, "rope_theta is null"),
    "a null type": ("llama", {"rope_scaling": {"rope_type": None, "type": "yarn"}}, "rope_type = None"),
    "a null context": ("qwen3", {"original_max_position_embeddings": None, "rope_scaling": YARN}, "embeddings is null"),
    "no factor": ("llama", {"rope_scaling": {"type": "llama3", **CONTEXT_8}}, "rope_scaling: low_freq_factor is miss"),
    "a type of its own per layer": ("gpt_oss", {"rope_parameters": {"full_attention": {}}}, "full_attention has"),
    "no object": ("llama", {"rope_scaling": "yarn"}, "rope_scaling = 'yarn': an object is wanted"),
    "a part of the features rotated": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    "dropout": ("qwen3", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
    "another activation": ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    "another alpha": ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0"),
    "no window": ("gpt_oss", {"sliding_window": None}, "sliding_window is null"),
    "weights that add up to less": ("deepseek_v3", {"norm_topk_prob": None}, "norm_topk_prob = None"),
    "V2's biases": ("deepseek_v2", {"mlp_bias": True}, "mlp_bias = True"),
    "V2 with V3's method": ("deepseek_v2", {"topk_method": "noaux_tc"}, "legal is 'greedy' or 'group_limited_greedy'"),
    "no causal mask": ("llama", {"is_causal": False}, "is_causal = False"),
    "another model": ("llama", {"model_type": "qwen3"}, "model_type = 'qwen3' can't be expressed; legal is 'llama'"),
    "two numbers of experts": ("gpt_oss", {"num_experts": 3}, "num_experts = 3 can't be expressed; legal is"),
    "dense layers": ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers = "),
    "a number that no tensor has": ("qwen3", {"hidden_size": 10**30}, "an integer from 1 to 2^31 - 1"),
    "a number in words": ("qwen3", {"num_attention_heads": "4"}, "num_attention_heads = '4': an integer from 1"),
    "layers without end": (
        "gpt_oss",
        {"num_hidden_layers": 10**9},
        "= 1000000000: an integer from 1 to 2,000 is wanted",
    ),
    "experts without end": ("qwen3_moe", {"num_experts": 10**9}, "= 1000000000: an integer from 1 to 4,096 is wanted"),
    "experts in all without end": (
        "gpt_oss",
        {"num_local_experts": 4096, "num_hidden_layers": 2000, "layer_types": None},
        "8,192,000 experts in all",
    ),
    "less than none": ("llama", {"num_hidden_layers": -1}, "num_hidden_layers = -1"),
    "no number": ("llama", {"rope_theta": float("nan")}, "rope_theta = nan"),
    "a long text": ("llama", {"hidden_act": "x" * 10**6}, "hidden_act = 'xxx"),
    "heads that can't be grouped": ("llama", {"num_key_value_heads": 3}, "num_key_value_heads = 3 must divide"),
    "too few experts": ("llama4_text", {"num_experts_per_tok": 9}, "a token chooses from"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_config_that_can_not_be_expressed_is_refused_by_name(what: str, tmp_path: Path) -> None:
    name, changes, said = REFUSED[what]
    raw = {"architectures": ARCHITECTURES[name], **{key: values[0] for key, values in DRAWN[name].items()}, **changes}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=re.escape(said)) as error:
        new_model(tmp_path)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("hidden_size", [10**9, 2**31 - 8])
def test_shapes_are_compared_before_memory_is_asked_for(hidden_size: int, tmp_path: Path) -> None:
    saved("llama", {}, {}, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw = {key: value for key, value in raw.items() if key != "head_dim"} | {"hidden_size": hidden_size}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match="is of another model:|more numbers than memory can hold"):
        from_hf(tmp_path)


@pytest.mark.parametrize(("key", "read_as"), [("rms_norm_eps", 1e-4), ("rope_theta", 101.0)])
def test_a_key_that_is_misread_is_seen(key: str, read_as: float, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    saved("llama", {"rms_norm_eps": [1e-5]}, {"rope_theta": 100.0}, tmp_path)
    assert outcome(tmp_path) == "equal"
    read = llama3.from_hf_config
    monkeypatch.setattr(llama3, "from_hf_config", lambda raw: read({**raw, key: read_as}))
    with pytest.raises(AssertionError):
        outcome(tmp_path)


def test_an_error_that_is_not_for_the_user_is_seen(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    saved("llama", {}, {}, tmp_path)
    monkeypatch.setattr(llama3, "from_hf_config", lambda raw: raw["no such key"])
    with pytest.raises(KeyError):
        outcome(tmp_path)
