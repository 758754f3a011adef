"""With a cache and without, alone and in a batch, as by transformers: the same tokens, in every family."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CPU, KINDS, PROMPTS, VOCAB, build, continuations
from torch import Tensor

from torchtitan_graph.errors import UserError
from torchtitan_graph.generate import Decoding, why_no_cache
from torchtitan_graph.generate import decoding as decoding_module
from torchtitan_graph.models import transformers as wrapped
from torchtitan_graph.models.hf import to_hf
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.init import allocate


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "flavor"), KINDS, ids=map("-".join, KINDS))
def test_a_family_has_the_tokens_of_transformers_with_and_without_a_cache(
    name: str, flavor: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    model = build(name, flavor, dtype)
    found = continuations(model, PROMPTS)
    assert found == continuations(model, PROMPTS, cache=False)
    assert found == [continuations(model, [prompt])[0] for prompt in PROMPTS]
    to_hf(model, tmp_path / "hf", dtype)
    how = dict(dtype=dtype, attn_implementation="eager", experts_implementation="eager")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", **how).eval()
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        config = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), **config)
        assert out[0, len(prompt) :].tolist() == tokens


def logits(model: Decoder, forced_BL: Tensor, *, spoil: Any = None, **options: Any) -> Tensor:
    """Return the logits of PROMPTS and of forced tokens after them, one after the other."""
    decoding = Decoding(model, PROMPTS, forced_BL.shape[1], CPU, **options)
    if spoil is not None:
        spoil(decoding)
    found = []
    for tokens_B in forced_BL.unbind(1):
        found.append(decoding.next_logits())
        decoding.append(tokens_B)
    return torch.stack(found)


FORCED = torch.randint(VOCAB, (len(PROMPTS), 10), generator=torch.Generator().manual_seed(1))


def gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


MARKED = [pytest.param(*kind, marks=[pytest.mark.slow] * (kind[0] != "gpt_oss"), id="-".join(kind)) for kind in KINDS]


@pytest.mark.parametrize(("name", "flavor"), MARKED)
def test_passes_may_end_with_tokens_that_the_next_replaces(name: str, flavor: str) -> None:
    model = build(name, flavor)
    expected = logits(model, FORCED, cache=False)
    assert gap(logits(model, FORCED), expected) < 1e-12
    assert gap(logits(model, FORCED, multiple=4, whole_logits=True), expected) < 1e-12


def _stale(decoding: Decoding) -> None:
    decoding.cache._extend = lambda seen, args, new: new  # type: ignore[union-attr, method-assign]


def _of_zeros(decoding: Decoding) -> None:
    extend = decoding.cache._extend  # type: ignore[union-attr]
    decoding.cache._extend = lambda *args: tuple(
        x * (torch.arange(x.shape[1]) != 3)[:, None, None] for x in extend(*args)
    )  # type: ignore[union-attr, method-assign]  # noqa: E501


def _wrong_positions(decoding: Decoding) -> None:
    decoding.positions_BL[:, decoding.end :] = decoding.positions_BL[:, decoding.end - 1 : decoding.end]


def _seen_padding(decoding: Decoding) -> None:
    decoding.documents_BL.fill_(1)


@pytest.mark.parametrize("spoil", [_of_zeros, _wrong_positions, _seen_padding])
def test_the_comparison_finds(spoil: Any) -> None:
    model = build("llama3")
    assert gap(logits(model, FORCED, spoil=spoil), logits(model, FORCED, cache=False)) > 1e-3


def test_a_cache_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="attention is given 1 keys, and a mask of 12"):
        logits(build("llama3"), FORCED, spoil=_stale)


@pytest.mark.parametrize("shift", [-1, 1])
def test_the_comparison_finds_a_window_at_another_place(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("gpt_oss")
    expected = logits(model, FORCED, cache=False)
    model.config = model.config.__class__(**{**vars(model.config), "window": model.config.window + shift})
    assert gap(logits(model, FORCED), expected) > 1e-6


# --- models of transformers ---


def build_wrapped(raw: dict[str, Any]) -> Decoder:
    sizes = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    with torch.device("meta"):
        model = wrapped.Model(wrapped.from_hf_config(sizes | raw))
    allocate(model, torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


WRAPPED = {
    "a window": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 5},
    "a soft cap": {"model_type": "gemma2", "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5},
    "a table of positions": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "a soft cap")) for kind in WRAPPED]
)
def test_a_model_of_transformers_has_a_cache(kind: str) -> None:
    pytest.importorskip("transformers")
    model = build_wrapped(WRAPPED[kind])
    assert why_no_cache(model) is None
    assert model.changes_scores == (kind == "a soft cap")
    assert gap(logits(model, FORCED), logits(model, FORCED, cache=False)) < 1e-12


def test_a_state_space_model_has_none_and_runs_alone() -> None:
    pytest.importorskip("transformers")
    model = build_wrapped({"model_type": "mamba", "state_size": 4, "intermediate_size": 64, "time_step_rank": 2})
    assert "sees earlier tokens by other means than attention's keys" in (why_no_cache(model) or "")
    assert len(continuations(model, PROMPTS[:1])[0]) == 12
    with pytest.raises(UserError, match="sees all that is before a token, padding too"):
        continuations(model, PROMPTS)


def test_an_attention_of_ones_own_without_seen_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_module, "Seen", torch.nn.Conv1d)
    assert (
        why_no_cache(build("llama3")) == "layers.0 has no module `Seen`, through which attention passes keys and values"
    )
