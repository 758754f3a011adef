"""Attention within segments: sdpa's numbers under the mask of the same documents, and what it can't do is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_graph.check.kernels import same_and_earlier
from torchtitan_graph.errors import UserError
from torchtitan_graph.models.layers.attention import attend
from torchtitan_graph.models.layers.decoder import Decoder
from torchtitan_graph.models.layers.masks import all_of, begins_of, build_mask, causal, same_document, sliding
from torchtitan_graph.models.spec import load_family, tiny_config
from torchtitan_graph.ops.varlen import Segments, segments_of, varlen_attention

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
    assert segments.begins.dtype == torch.int32 and segments.sizes.tolist() == [4, 4]
    every = segments_of(torch.ones(2, 5, dtype=torch.bool), CPU)
    assert every.begins.tolist() == list(range(11)) and every.sizes.tolist() == [10, 1]


def test_torch_can_trace_and_differentiate_it() -> None:
    segments = segments_of(begins_of(documents("random")), CPU)
    torch.library.opcheck(varlen_attention, (*inputs(2), segments.begins, segments.sizes, 0.25))


def tiny(family: str) -> Decoder:
    module = load_family(family)
    with torch.device("meta"):
        return module.Model(tiny_config(module.FLAVORS["debugmodel"]), "varlen")


@pytest.mark.parametrize("family", ["llama3", "llama4", "qwen3", "deepseek_v3"])
def test_segments_let_see_what_the_rules_let_see(family: str) -> None:
    model, documents_BL = tiny(family), documents("random")
    begins_BL = begins_of(documents_BL)
    positions_BL = torch.arange(L) - torch.where(begins_BL, torch.arange(L), 0).cummax(1).values
    rules, segments = model.mask_rules(documents_BL, positions_BL), model.segments(documents_BL, positions_BL)
    assert rules.keys() == segments.keys()
    for name, rule in rules.items():
        expected = same_and_earlier(segments[name].cumsum(1))
        assert torch.equal(build_mask("sdpa", rule, B, L, CPU), expected), name  # type: ignore[arg-type]
    if family == "llama4":
        assert segments["chunked"].sum() > segments["causal"].sum()
    model.check_attention()


def test_what_is_more_than_segments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="'varlen': the mask 'sliding' of this model is not causal .* use flex or sdpa"):
        tiny("gpt_oss").check_attention()
    with pytest.raises(UserError, match="context_parallel_degree = 2: not with model.attn = 'varlen'"):
        tiny("llama3").check_attention(cp=2)
    model = tiny("llama3")
    windows = all_of(causal, same_document(torch.zeros(2, 64)), sliding(5))
    monkeypatch.setattr(model, "mask_rules", lambda *_: {"causal": windows})
    with pytest.raises(UserError, match="`segments` let other tokens be seen than the rule 'causal'"):
        model.check_attention()
    q, k, v = inputs(N)
    segments: Segments = segments_of(begins_of(documents("random")), CPU)
    with pytest.raises(UserError, match="'varlen': this model's attention has sinks; use flex"):
        attend(q, k, v, segments, sinks_N=torch.zeros(N))
    with pytest.raises(UserError, match="has another score, which only 'flex' can"):
        attend(q, k, v, segments, score=lambda score, b, h, q, kv: score)
