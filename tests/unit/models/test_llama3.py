"""llama3: its sizes, and its numbers against Hugging Face transformers' own model with the same weights."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_graph.models import llama3
from torchtitan_graph.models.layers.rope import Llama3Scaling, rope_frequencies
from torchtitan_graph.models.spec import build_model

PARAMETERS = {
    "1B": 1_235_814_400,
    "3B": 3_212_749_824,
    "8B": 8_030_261_248,
    "70B": 70_553_706_496,
    "405B": 405_853_388_800,
}

TINY = llama3.Config(dim=32, num_layers=2, num_heads=4, num_kv_heads=4, ffn_dim=48, vocab_size=64, rope_scaling=None)
SCALING = Llama3Scaling(factor=8.0, original_context=16)
CONFIGS = {
    "plain": TINY,
    "grouped queries": dataclasses.replace(TINY, num_kv_heads=2),
    "one kv head": dataclasses.replace(TINY, num_kv_heads=1),
    "tied": dataclasses.replace(TINY, tied=True),
    "scaled rope": dataclasses.replace(TINY, rope_scaling=SCALING, rope_theta=100.0),
    "all": dataclasses.replace(TINY, num_kv_heads=2, tied=True, rope_scaling=SCALING, rope_theta=100.0),
}


@pytest.mark.parametrize("flavor", PARAMETERS)
def test_a_flavour_has_the_released_models_parameters(flavor: str) -> None:
    model = build_model("llama3", flavor, "sdpa", tokenizer_vocab_size=128256)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[flavor]
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_every_flavour_is_counted_here_or_is_the_debug_model() -> None:
    assert set(llama3.FLAVORS) == {*PARAMETERS, "debugmodel"}


def build(config: llama3.Config, attn: str = "sdpa", dtype: torch.dtype = torch.float64) -> llama3.Model:
    model = llama3.Model(config, attn).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=dtype) * 0.3 + ("norm" in name))
    return model


def hugging_face_name(name: str) -> str:
    pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
    number = next((part for part in name.split(".") if part.isdigit()), "")
    return llama3.HF_KEYS[pattern].replace("*", number)


def hugging_face(config: llama3.Config, ours: llama3.Model) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    scaling = config.rope_scaling
    rope: dict = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            vocab_size=config.vocab_size,
            tie_word_embeddings=config.tied,
            rms_norm_eps=config.norm_eps,
            max_position_embeddings=4096,
            rope_parameters=rope,
            attn_implementation="eager",
        )
    ).to(next(ours.parameters()).dtype)
    weights = {hugging_face_name(name): p for name, p in ours.named_parameters()}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tied else set())
    return theirs


def tokens(B: int = 2, L: int = 24, V: int = 64, seed: int = 1) -> Tensor:
    return torch.randint(V, (B, L), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=logits.dtype)
    found = torch.autograd.grad((logits * weights).sum(), list(model.parameters()))
    return dict(zip([name for name, _ in model.named_parameters()], found, strict=True))


def gap(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def in_double(theirs: nn.Module, config: llama3.Config) -> nn.Module:
    """Take out what transformers computes in fp32 whatever the dtype, or with another rounding of fp32."""
    theirs.set_attn_implementation("sdpa")  # its own attention takes the softmax in fp32
    for norm in (m for m in theirs.modules() if type(m).__name__ == "LlamaRMSNorm"):
        norm.forward = partial(F.rms_norm, normalized_shape=[config.dim], weight=norm.weight, eps=config.norm_eps)
    rotary = theirs.model.rotary_emb
    rotary.inv_freq = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling, torch.device("cpu"))
    return theirs


def largest_gap(ours: nn.Module, theirs: nn.Module) -> float:
    """Compare the logits, and every gradient, each relative to its largest number."""
    found, expected = ours(tokens()), theirs(input_ids=tokens()).logits
    gaps = [gap(found.detach(), expected.detach())]
    ours_of, theirs_of = gradients(ours, found), gradients(theirs, expected)
    assert {hugging_face_name(name) for name in ours_of} == set(theirs_of)
    gaps += [gap(gradient, theirs_of[hugging_face_name(name)]) for name, gradient in ours_of.items()]
    return max(gaps)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    ours = build(CONFIGS[name], dtype=torch.float32)
    assert largest_gap(ours, hugging_face(CONFIGS[name], ours)) < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_those_of_transformers_in_double_precision(name: str) -> None:
    ours = build(CONFIGS[name])
    assert largest_gap(ours, in_double(hugging_face(CONFIGS[name], ours), CONFIGS[name])) < 1e-10


@pytest.mark.parametrize("change", [{"rope_theta": 99.0}, {"rope_scaling": None}, {"norm_eps": 2e-5}])
def test_another_model_is_seen(change: dict) -> None:
    ours = build(CONFIGS["all"])
    other = dataclasses.replace(CONFIGS["all"], **change)
    assert largest_gap(ours, in_double(hugging_face(other, ours), other)) > 1e-7


@pytest.mark.parametrize("flavor", ["1B", "8B"])
def test_rotary_frequencies_are_those_of_transformers_at_the_released_sizes(flavor: str) -> None:
    config = dataclasses.replace(llama3.FLAVORS[flavor], num_layers=0, vocab_size=8)
    small = dataclasses.replace(config, dim=config.head_dim, num_heads=1, num_kv_heads=1, ffn_dim=8)
    theirs = hugging_face(small, build(small, dtype=torch.float32)).model.rotary_emb.inv_freq
    ours = rope_frequencies(small.head_dim, small.rope_theta, small.rope_scaling, torch.device("cpu"))
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=0)


# --- documents --------------------------------------------------------------------------------------------------------

LENGTHS = (5, 11, 8)


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """Give one row of three documents: tokens, positions, documents."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).unsqueeze(0)
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)]).unsqueeze(0)
    return tokens(B=1, L=sum(LENGTHS)), positions, documents


def separately(model: llama3.Model) -> Tensor:
    return torch.cat([model(part) for part in packed()[0].split(LENGTHS, dim=1)], dim=1)


@pytest.mark.parametrize("attn", ["sdpa", "flex"])
def test_packed_documents_are_as_if_each_had_a_row_of_its_own(attn: str) -> None:
    model = build(CONFIGS["all"], attn)
    row, positions, documents = packed()
    together, apart = model(row, positions, model.masks(documents, positions)), separately(model)
    assert gap(together.detach(), apart.detach()) < 1e-12
    found, expected = gradients(model, together), gradients(model, apart)
    assert max(gap(found[name], expected[name]) for name in found) < 1e-12


@pytest.mark.parametrize("fault", ["one document", "boundary moved", "positions run on"])
def test_a_mask_or_positions_that_cross_documents_are_seen(fault: str) -> None:
    model = build(CONFIGS["all"])
    row, positions, documents = packed()
    if fault == "one document":
        documents = torch.zeros_like(documents)
    elif fault == "boundary moved":
        documents = documents.roll(1, dims=1)
    else:
        positions = torch.arange(row.shape[1]).unsqueeze(0)
    with torch.no_grad():
        changed = gap(model(row, positions, model.masks(documents, positions)), separately(model))
    # Attention knows only distances: positions that run on change nothing but the rounding of angles, kept in fp32.
    assert changed > 1e-3 if fault != "positions run on" else 1e-12 < changed < 1e-5


def test_no_token_sees_a_later_one() -> None:
    model, row = build(CONFIGS["all"]), tokens(B=1, L=12)
    other = row.clone()
    other[0, 7] = (other[0, 7] + 1) % 64
    with torch.no_grad():
        before, after = model(row), model(other)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7], after[:, 7])


@pytest.mark.parametrize("name", ["plain", "all"])
def test_sdpa_and_flex_attention_agree(name: str) -> None:
    row, positions, documents = packed()
    results = []
    for attn in ("sdpa", "flex"):
        model = build(CONFIGS[name], attn)
        logits = model(row, positions, model.masks(documents, positions))
        results.append({"logits": logits.detach(), **gradients(model, logits)})
    assert max(gap(results[1][key], results[0][key]) for key in results[0]) < 1e-12


def test_without_positions_and_mask_every_row_is_one_document() -> None:
    model, row = build(TINY), tokens()
    documents, positions = torch.zeros_like(row), torch.arange(row.shape[1]).expand_as(row)
    assert torch.equal(model(row), model(row, positions, model.masks(documents, positions)))


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "tied"])
def test_the_key_map_names_every_parameter_once(name: str) -> None:
    model = build(CONFIGS[name])
    names = [hugging_face_name(n) for n, _ in model.named_parameters()]
    assert len(set(names)) == len(names)
    assert ("lm_head.weight" in names) is not CONFIGS[name].tied
