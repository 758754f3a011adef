"""Attention within segments: sdpa's numbers under the mask of the same documents, and what it can't do is refused."""

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from torchtitan_graph.check.kernels import same_and_earlier
from torchtitan_graph.config import load, target_of
from torchtitan_graph.errors import UserError
from torchtitan_graph.models import gpt_oss
from torchtitan_graph.models.hf import allocate, choose_model, own_attention
from torchtitan_graph.models.layers.attention import attend
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.masks import Rule, all_of, begins_of, build_mask, causal, same_document, sliding
from torchtitan_graph.models.spec import load_family, tiny_config
from torchtitan_graph.ops.operator import operator_of
from torchtitan_graph.ops.varlen import Segments, segments_of, varlen_attention, varlen_attention_backward
from torchtitan_graph.parallel.sequence import places_of

CPU = torch.device("cpu")
B, L, N, H = 3, 37, 4, 16


def documents(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    rates_B1 = torch.tensor({"random": [0.1, 0.4, 0.0], "of one token": [1.0, 0.0, 0.9]}[kind]).unsqueeze(1)
    return (torch.rand(B, L, generator=generator) < rates_B1).long().cumsum(1)


def inputs(num_kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, L, heads, H) for heads in (N, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def results(given: list[Tensor], out_BLNH: Tensor) -> list[Tensor]:
    weights = torch.randn(out_BLNH.shape, generator=torch.Generator().manual_seed(2), dtype=out_BLNH.dtype)
    return [out_BLNH.detach(), *torch.autograd.grad((out_BLNH * weights).sum(), given)]


def largest_gap(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", ["random", "of one token"])
def test_numbers(kind: str, num_kv_heads: int) -> None:
    documents_BL, (q, k, v) = documents(kind), inputs(num_kv_heads)
    each = (x.transpose(1, 2) for x in (q, k, v))
    plain = F.scaled_dot_product_attention(*each, attn_mask=same_and_earlier(documents_BL), enable_gqa=True)
    expected = results([q, k, v], plain.transpose(1, 2))
    found = results([q, k, v], attend(q, k, v, segments_of(begins_of(documents_BL), CPU)))
    assert largest_gap(found, expected) < 1e-13
    shifted = segments_of(begins_of(documents_BL.roll(1, dims=1)), CPU)
    assert largest_gap(results([q, k, v], attend(q, k, v, shifted)), expected) > 0.1


def test_segments_are_of_one_size_however_many_there_are() -> None:
    begins_BL = begins_of(torch.tensor([[0, 0, 1, 1, 1], [1, 2, 2, 2, 2]]), torch.zeros(2, 5))
    segments = segments_of(begins_BL, CPU)
    assert segments.begins.tolist() == [0, 2, 5, 6, 10, 10, 10, 10, 10, 10, 10]
    assert segments.begins.dtype == torch.int32 and segments.sizes.tolist() == [4, 4, 0]
    every = segments_of(torch.ones(2, 5, dtype=torch.bool), CPU)
    assert every.begins.tolist() == list(range(11)) and every.sizes.tolist() == [10, 1, 0]


def test_torch_can_trace_and_differentiate_it() -> None:
    segments = segments_of(begins_of(documents("random")), CPU, window=5)
    places, sinks_N = (segments.begins, segments.sizes, segments.places), torch.randn(N, dtype=torch.float64)
    for sinks in (None, sinks_N.requires_grad_()):
        torch.library.opcheck(varlen_attention, (*inputs(2), *places, sinks, 0.25))


def dense(q: Tensor, k: Tensor, v: Tensor, seen_BLL: Tensor, sinks_N: Tensor | None) -> Tensor:
    """Compute attention by its definition, a sink as a key without a value."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    scores = (q @ k.mT / H**0.5).masked_fill(~seen_BLL.unsqueeze(1), float("-inf"))
    if sinks_N is not None:
        scores = torch.cat((scores, sinks_N.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("window", [0, 1, 3, 70])
@pytest.mark.parametrize("rate", [0.3, 0.03, 0.002])
def test_windows_sinks_and_parts_of_rows(rate: float, window: int, cp: int) -> None:
    length = 384  # longer than what is rounded, and more than one block behind a window
    generator = torch.Generator().manual_seed(3)
    documents_BL = (torch.rand(2, length, generator=generator) < rate).long().cumsum(1)
    places_L = torch.arange(length) if cp == 1 else places_of(1, length, cp, CPU)
    shapes = [(2, len(places_L), N, H), (2, length, 2, H), (2, length, 2, H - 5), (N,)]
    given = [torch.randn(x, generator=generator, dtype=torch.float64).requires_grad_() for x in shapes]
    rules = all_of(causal, same_document(documents_BL), sliding(window or length))
    seen_BLL = build_mask("sdpa", rules, 2, length, CPU, places_L).squeeze(1)  # type: ignore[union-attr]
    segments = segments_of(begins_of(documents_BL), CPU, window, None if cp == 1 else places_L)
    expected = results(given, dense(*given[:3], seen_BLL, given[3]))
    found = results(given, attend(*given[:3], segments, sinks_N=given[3]))
    assert largest_gap(found, expected) < 1e-12
    without = given[:3]
    found = results(without, attend(*without, segments))
    assert largest_gap(found, results(without, dense(*without, seen_BLL, None))) < 1e-12
    if rate < 0.3 and window:
        wider = segments_of(begins_of(documents_BL), CPU, window + 1, None if cp == 1 else places_L)
        assert largest_gap(results(without, attend(*without, wider)), found) > 1e-3


def test_a_row_gives_the_same_bits_in_every_layer() -> None:
    documents_BL, (q, k, v) = documents("random"), inputs(2)
    twice = [results([q, k, v], attend(q, k, v, segments_of(begins_of(documents_BL), CPU, 5))) for _ in range(2)]
    assert largest_gap(*twice) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1024, 7])
def test_memory_is_what_is_forecast(length: int, dtype: torch.dtype, tmp_path: Path) -> None:
    documents_BL = (torch.arange(1024) // length).expand(2, -1)
    segments = segments_of(begins_of(documents_BL), CPU)
    q, k, v, d_out = (torch.randn(2, 1024, heads, 64).to(dtype) for heads in (8, 4, 4, 8))
    places = segments.begins, segments.sizes, segments.places, None, 0.2
    out, lse = varlen_attention(q, k, v, *places)
    for call in (
        partial(varlen_attention, q, k, v, *places),
        partial(varlen_attention_backward, d_out, q, k, v, out, lse, *places),
    ):
        scratch = operator_of(call.func).scratch
        assert scratch is not None
        results = sum(x.numel() * x.element_size() for x in call())
        measured = peak_bytes(call, tmp_path / "trace.json") - results
        assert measured < scratch(*call.args)
        # The forecast is that of documents as long as a row.
        assert scratch(*call.args) < 2.1 * measured or length < 1024


def peak_bytes(call: Callable[[], object], file: Path) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        call()
    measured.export_chrome_trace(str(file))
    events = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    events.sort(key=lambda e: e["ts"])
    return max(itertools.accumulate(event["args"]["Bytes"] for event in events))


def tiny(family: str) -> Decoder:
    module = load_family(family)
    with torch.device("meta"):
        return module.Model(tiny_config(module.FLAVORS["debugmodel"]), "varlen")


@pytest.mark.parametrize("family", ["llama3", "llama4", "qwen3", "deepseek_v3", "gpt_oss"])
def test_segments_let_see_what_the_rules_let_see(family: str) -> None:
    model, documents_BL = tiny(family), documents("random")
    begins_BL = begins_of(documents_BL)
    positions_BL = torch.arange(L) - torch.where(begins_BL, torch.arange(L), 0).cummax(1).values
    rules, segments = model.mask_rules(documents_BL, positions_BL), model.segments(documents_BL, positions_BL)
    assert rules.keys() == segments.keys()
    for name, rule in rules.items():
        window = sliding(model.windows().get(name, L))
        expected = all_of(causal, same_document(segments[name].cumsum(1)), window)
        seen, expected_seen = (build_mask("sdpa", x, B, L, CPU) for x in (rule, expected))
        assert torch.equal(seen, expected_seen), name  # type: ignore[arg-type]
    if family == "llama4":
        assert segments["chunked"].sum() > segments["causal"].sum()
    model.check_attention()


def windowed_rules(window: int, documents_BL: Tensor, _: Tensor) -> dict[str, Rule]:
    return {"causal": all_of(causal, same_document(documents_BL), sliding(window))}


def test_what_is_more_than_segments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gpt_oss")
    monkeypatch.setattr(model, "windows", lambda: {"sliding": 6})
    with pytest.raises(
        UserError, match="'varlen': .* let other tokens be seen than the rule 'sliding' .* flex or sdpa"
    ):
        model.check_attention()
    monkeypatch.setattr(model, "segments", lambda documents_BL, _: {"causal": begins_of(documents_BL)})
    with pytest.raises(UserError, match="'varlen': the mask 'sliding' of this model is not causal .* use flex or sdpa"):
        model.check_attention()
    model = tiny("llama3")
    for window in (5, 5000):
        windowed = partial(windowed_rules, window)
        monkeypatch.setattr(model, "mask_rules", windowed)
        with pytest.raises(UserError, match="let other tokens be seen than the rule 'causal'"):
            model.check_attention()
    q, k, v = inputs(N)
    segments: Segments = segments_of(begins_of(documents("random")), CPU)
    with pytest.raises(UserError, match="'varlen': this model changes attention's scores, which only 'flex' can"):
        attend(q, k, v, segments, score=lambda score, b, h, q, kv: score)


def test_auto_on_a_cpu_is_what_computes_a_models_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("llama3", "gpt_oss"):
        config = load(["--model.name", family, "--model.flavor", "debugmodel"])
        _, model, options = choose_model(config, None, 256, target_of(config))
        assert model.attn == options.attn == "varlen"
    monkeypatch.setattr(gpt_oss.Model, "windows", lambda self: {})
    _, model, options = choose_model(config, None, 256, target_of(config))
    assert model.attn == options.attn == "sdpa"
    assert own_attention(model)[1].startswith("for this model's `segments` and `windows` let other tokens be seen than")
    model.changes_scores = True
    assert own_attention(model) == ("flex", "for this model changes attention's scores, which only 'flex' can")


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "gemma2"])
def test_models_of_transformers_attend_within_segments(kind: str) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers = ["sliding_attention", "full_attention"]
    more = {"head_dim": 8, "intermediate_size": 32, "vocab_size": 64, "sliding_window": 5, "layer_types": layers}
    if kind == "gpt_oss":
        more |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    family = load_family("transformers")
    with torch.device("meta"):
        model = family.Model(family.from_hf_config({"model_type": kind, **sizes, **more}), "varlen")
    if kind == "gemma2":  # its soft cap changes scores
        assert own_attention(model)[0] == "flex"
        with pytest.raises(UserError, match="'varlen': this model changes attention's scores, .* use flex"):
            model.check_attention()
        return
    assert own_attention(model)[0] == "varlen" and model.windows() == {"window 5": 5}
    allocate(model, torch.float64)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(len(name)))
    documents_BL, tokens_BL = documents("random"), torch.randint(64, (B, L), generator=torch.Generator().manual_seed(4))
    begins_BL, positions_BL = begins_of(documents_BL), torch.arange(L).expand(B, L)
    positions_BL = positions_BL - torch.where(begins_BL, positions_BL, 0).cummax(1).values
    logits = []
    for attn in ("varlen", "sdpa"):
        model.attn = attn
        logits.append(model(tokens_BL, positions_BL, model.masks(documents_BL, positions_BL)).detach())
    assert largest_gap(logits[:1], logits[1:]) < 1e-12
    model.attn = "varlen"
    shifted = model(tokens_BL, positions_BL, model.masks(documents_BL.roll(1, 1), positions_BL)).detach()
    assert largest_gap([shifted], logits[:1]) > 1e-3
